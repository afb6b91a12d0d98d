"""Forms of an answer after its reasoning, calls that cannot be forced, and the checkpoint's own
response template, with its calls. test_forced_forms.py has the calls that are forced."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tests.clock import takes_less
from tests.refusals import refuses
from tests.unit.server.call_form_cases import large_tools
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from freight.engine.grammar import Grammars, _source
from freight.serve.answers.pieces import Piece, PieceKind
from freight.serve.answers.tools import MessageFormat, parser_for
from freight.serve.transport.errors import ApiError
from freight.structured import StructuredOutputs
from freight.text.tokenizer import Tokenizer

SPECIAL = ("<|im_end|>", "[TOOL_CALLS]", "[ARGS]")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATES = {
    "qwen3": "<|im_start|><tool_call></tool_call><think></think>",
    "hermes": "<|im_start|><tool_call></tool_call>",
}
CITY = {"type": "string", "maxLength": 8}
WEATHER = {
    "type": "object",
    "properties": {"city": CITY, "days": {"type": "integer", "minimum": 1, "maximum": 2}},
    "required": ["city"],
}
POINT = {
    "$ref": "#/$defs/p",
    "$defs": {
        "p": {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"]}
    },
}
PARAMETERS: dict[str, Any] = {
    "get_weather": WEATHER,
    "get-time": None,
    'a"b\\ü': {"type": "object"},
    "at": POINT,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name} | ({} if schema is None else {"parameters": schema}),
    }
    for name, schema in PARAMETERS.items()
]
GEMMA = {  # the checkpoint's own: JSON with keys and strings in a form of its own
    "defaults": {"role": "assistant"},
    "start_anchor": "<|turn>model\n",
    "fields": {
        "reasoning_content": {
            "open": "<|channel>thought\n",
            "close": "<channel|>",
            "content": "text",
        },
        "tool_calls": {
            "open_pattern": r"\s*<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close": ["<|im_end|>", "<eos>"], "content": "text"},
    },
}
XML = {  # values without types
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
            },
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"content": "text"},
    },
}


def backend(added: Sequence[str] = ADDED, special: Sequence[str] = SPECIAL) -> Backend:
    """One token per byte, besides the markup."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Backend(
        models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    made.add_tokens(list(added))
    return made


def format_of(built: Backend, template: str, own: Mapping[str, Any] | None = None) -> MessageFormat:
    made = parser_for(Tokenizer(built, {"eos_token": "<|im_end|>"}, template, own))
    assert made is not None
    return made


def pieces(form: MessageFormat, chunks: Sequence[str], prompt: str = "") -> list[Piece]:
    parser = form.parser(prompt, TOOLS)
    found = [piece for chunk in chunks for piece in parser.feed(chunk)] + parser.finish(True)
    kinds = [piece for piece in found if piece.kind is not PieceKind.CONTENT]
    text = "".join(piece.text for piece in found if piece.kind is PieceKind.CONTENT)
    return ([Piece(PieceKind.CONTENT, text)] if text else []) + kinds


def source(outputs: Mapping[str, Any]) -> str:
    return _source(LLMatcher, *StructuredOutputs(**outputs).key())


def allows(built: Backend, outputs: Mapping[str, Any], text: str) -> bool:
    """Whether `text`, as the tokenizer writes it, is a whole answer."""
    end = built.token_to_id("<|im_end|>")
    tokenizer = LLTokenizer(built.to_str(), n_vocab=built.get_vocab_size(), eos_token=end)
    matcher = LLMatcher(tokenizer, source(outputs))
    assert not matcher.is_error(), matcher.get_error()
    ids = built.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


@pytest.mark.parametrize("markers", ["as tokens", "as text"])
@pytest.mark.parametrize(
    ("form", "answer"),
    [
        (
            {
                "json": {
                    "type": "object",
                    "properties": {"a": {"type": "integer"}},
                    "required": ["a"],
                }
            },
            '{"a": 5}',
        ),
        ({"json_object": True}, '{"b":[1]}'),
        ({"regex": "a+/b"}, "aa/b"),
        ({"choice": ["yes", "no"]}, "yes"),
        ({"grammar": 'start: "x" y\ny: /z+/'}, "xzz"),
    ],
)
def test_every_form_begins_after_the_reasoning(
    form: Mapping[str, Any], answer: str, markers: str
) -> None:
    built = backend() if markers == "as tokens" else backend((), ("<|im_end|>",))
    answers = format_of(built, TEMPLATES["qwen3"])
    inside = answers.form_to(form, "<|im_start|>assistant\n<think>\n")
    outside = answers.form_to(form, "")
    for text, in_inside, in_outside in (
        (f"Why {answer}?\n</think>\n\n{answer}", True, False),
        (f"<think>\nWhy?</think>{answer}", markers == "as text", True),
        (answer, False, True),
        (f"Why?</think>{answer}Why?", False, False),
        (f"<think>{answer}</think>", False, False),
    ):
        assert allows(built, inside, text) == in_inside, text
        assert allows(built, outside, text) == in_outside, text
    assert format_of(built, TEMPLATES["hermes"]).form_to(form, "") == form


def test_a_large_set_of_tools_compiles_in_a_moment() -> None:
    tools = large_tools(64)
    assert len(json.dumps(tools)) > 100_000
    built = backend()
    forced = format_of(built, TEMPLATES["qwen3"]).call_to(
        tools,
        [tool["function"]["name"] for tool in tools],
        True,
        "<|im_start|>assistant\n<think>\n",
    )

    def compile_tools() -> None:
        tokenizer = Tokenizer(built, {"eos_token": "<|im_end|>"}, TEMPLATES["qwen3"])
        Grammars(tokenizer, tokenizer.vocab_size, [256]).check(StructuredOutputs(**forced))

    assert takes_less(5, compile_tools)  # half of the renderer's deadline
    for broken, why in (
        ({"items": deep(70)}, "nested deeper"),
        ({"description": "a" * 40_000}, "at most 32768"),
    ):
        function = {"name": "f", "parameters": {"type": "object", "properties": {"a": broken}}}
        with pytest.raises(ApiError, match=f"tools: 'f': .*{why}"):
            format_of(built, TEMPLATES["qwen3"]).call_to([{"function": function}], ["f"], False)


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"items": value}
    return value


def test_a_call_that_cannot_be_forced_is_refused_by_name() -> None:
    form = format_of(backend(), TEMPLATES["hermes"])
    for tools, names in ((TOOLS, ["nothing"]), ([], ["at"]), (TOOLS, [])):
        with pytest.raises(ApiError) as error:
            form.call_to(tools, names, True)
        assert (error.value.status, error.value.param) == (400, "tool_choice")
    for unknown in (
        format_of(backend(), "</think>"),
        format_of(backend(), "", GEMMA),
        format_of(backend(), "", XML),
    ):
        with refuses(ApiError, "tool_choice", "'auto'", "'none'", "tool calls"):
            unknown.call_to(TOOLS, ["at"], True)


def test_the_checkpoints_own_template_comes_first() -> None:
    form = format_of(
        backend(special=["<|im_end|>", "<|tool_call>", "<tool_call|>", '<|"|>']),
        "<tool_call></tool_call>",
        GEMMA,
    )
    text = '<|channel>thought\nhm<channel|>Ok.\n<|tool_call>call:at{x:<|"|>a<|"|>}<tool_call|><|im_end|>'
    expected = [
        Piece(PieceKind.CONTENT, "Ok."),
        Piece(PieceKind.REASONING, "hm"),
        Piece(PieceKind.TOOL_CALL, '{"x": "a"}', "at"),
    ]
    assert pieces(form, [text]) == expected
    for cut in range(len(text)):
        parser = form.parser("<|turn>model\n", TOOLS)
        parser.feed(text[:cut])
        rest = parser.finish(False)
        assert (
            "<|tool_call>" not in text[:cut]
            or "<tool_call|>" in text[:cut]
            or "<|tool_call>" in rest[-1].text
        )


def test_values_without_types_take_those_of_the_schema() -> None:
    form = format_of(backend(), "", XML)
    text = (
        "<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\n12\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    )
    found = pieces(form, list(f"Ok\n\n{text}</function>\n</tool_call>"))
    assert found == [
        Piece(PieceKind.CONTENT, "Ok"),
        Piece(PieceKind.TOOL_CALL, '{"city": "12", "days": 2}', "get_weather"),
    ]
    blanks = "\n" * 300_000  # the template's pattern alone would take quadratic time
    assert pieces(form, [blanks[at : at + 16] for at in range(0, len(blanks), 16)]) == [
        Piece(PieceKind.CONTENT, blanks)
    ]


def test_the_template_is_read_from_the_folder(tmp_path: Path) -> None:
    backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"response_template": XML}))
    assert Tokenizer.load(tmp_path).response_template == XML
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"response_template": "qwen"}))
    assert Tokenizer.load(tmp_path).response_template is None


@pytest.mark.parametrize(
    "broken", [{}, {"fields": 3}, {"start_anchor": "a", "fields": {"content": 3}}, {"version": 9}]
)
def test_a_template_that_cannot_be_read_is_replaced(
    broken: Mapping[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        form = format_of(backend(), TEMPLATES["hermes"], broken)
    assert "response_template cannot be read" in caplog.text
    assert pieces(form, ['<tool_call>{"name": "at", "arguments": {}}</tool_call>']) == [
        Piece(PieceKind.TOOL_CALL, "{}", "at")
    ]
    assert parser_for(Tokenizer(backend(), None, "no markup", broken)) is None


def test_calls_in_xml_are_not_read_as_json() -> None:
    form = format_of(backend(), "<tool_call>\n<function=f></tool_call>")
    text = '<tool_call>\n{"name": "at", "arguments": {}}\n</tool_call>'
    assert pieces(form, [text]) == [Piece(PieceKind.CONTENT, text)]
    assert pieces(form, ["<tool_call>\n<function=at>\n</function>\n</tool_call>"]) == [
        Piece(PieceKind.TOOL_CALL, "{}", "at")
    ]


def test_reading_answers_loads_no_torch() -> None:
    program = (
        "import sys; from tokenizers import Tokenizer as B, models; from freight.text.tokenizer import Tokenizer;"
        "from freight.serve.answers.tools import parser_for;"
        "form = parser_for(Tokenizer(B(models.BPE(vocab={'a': 0}, merges=[])), None, '<tool_call></tool_call>'));"
        "form.parser('', [{'name': 'f'}]).feed('a'); assert 'transformers' in sys.modules;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
