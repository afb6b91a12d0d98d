"""Tool calls and reasoning: every family's markup becomes pieces, whatever is cut or broken comes
as content, how a text is divided into chunks changes nothing, and a forced answer is read back as a
call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.clock import takes_less
from tests.unit.server.joined_pieces import call, content, joined, reasoning
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers.utils.chat_parsing import ResponseParser

from freight.serve.answers.finder import Finder, Mark, regions_of
from freight.serve.answers.pieces import Piece, PieceKind
from freight.serve.answers.tools import MessageFormat, parser_for
from freight.text.tokenizer import Tokenizer, load_response_template

QWEN3 = """{%- if tools %}{{ '<|im_start|>system\n<tools>' }}{% for t in tools %}{{ t | tojson }}{% endfor %}
{{- '</tools> in <tool_call></tool_call>: {"name": ..., "arguments": ...}<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- m.content or '' }}
{%- for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{- '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}{{- c.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""
R1 = "{{ '<｜Assistant｜><think>\\n' }}{% set content = content.split('</think>')[-1] %}"
TEMPLATES = {
    "qwen3": QWEN3,
    "hermes": "<|im_start|>{{ '<tool_call>\n{}\n</tool_call>' }}",
    "llama3": """<|start_header_id|>{{ '{"name": ..., "parameters": ...}' }}""",
    "mistral_list": "[INST][/INST]{{ '[TOOL_CALLS] [' }}",
    "mistral_args": "[INST][/INST]{{ '[TOOL_CALLS]' + name + '[ARGS]' }}",
    "r1": R1,
}
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[INST]",
    "[/INST]",
    "<s>",
    "<|eot|>",
]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["city"],
    },
}
TIME = {"name": "get-time", "description": "no parameters"}
POINT = {
    "name": "at",
    "parameters": {
        "$ref": "#/$defs/p",
        "$defs": {
            "p": {
                "type": "object",
                "properties": {"x": {"enum": [1, 2]}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, TIME, POINT)]
CITY = '{"city":  "K\\u00f6ln", "days": 1.0}'  # not as json.dumps would write it
ANSWERS = {  # an answer with two calls, and where its first call begins
    "qwen3": '<think>\nhm\n</think>\n\nLet me see.\n<tool_call>\n{"name": "get_weather", "arguments": '
    + CITY
    + "}\n"
    '</tool_call>\n<tool_call>\n{"name": "get-time", "arguments": {}}\n</tool_call>',
    "hermes": '<tool_call>{"arguments": '
    + CITY
    + ', "name": "get_weather"}</tool_call><tool_call>{"name": "get-time"}'
    "</tool_call>",
    "mistral_list": '[TOOL_CALLS] [{"name": "get_weather", "arguments": '
    + CITY
    + '}, {"name": "get-time", "arguments": {}}]',
    "mistral_args": "[TOOL_CALLS]get_weather[ARGS]" + CITY + "[TOOL_CALLS]get-time[ARGS]{}",
    "llama3": '{"name": "get_weather", "parameters": ' + CITY + "}",
    "llama3 tag": '<|python_tag|>{"name": "get_weather", "parameters": ' + CITY + "}",
}


def tokenizer(
    template: str, response_template: Mapping[str, Any] | None = None, added: Sequence[str] = ADDED
) -> Tokenizer:
    """One token per byte, besides the markup."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(
        models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(list(added))
    return Tokenizer(backend, {"eos_token": "<|im_end|>"}, template, response_template)


FORMATS: dict[str, MessageFormat] = {
    name: made for name, text in TEMPLATES.items() if (made := parser_for(tokenizer(text)))
}


def pieces(
    kind: str | MessageFormat,
    chunks: Sequence[str],
    complete: bool = True,
    prompt: str | None = "",
    tools: Sequence[Mapping[str, Any]] = TOOLS,
) -> list[Piece]:
    """The joined pieces of an answer."""
    parser = (FORMATS[kind.split()[0]] if isinstance(kind, str) else kind).parser(prompt, tools)
    return joined(parser, chunks, complete)


def content_of(found: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in found if piece.kind is PieceKind.CONTENT)


@pytest.mark.parametrize("kind", ANSWERS)
def test_calls_come_with_the_arguments_as_written(kind: str) -> None:
    calls = [call("get_weather", CITY)] + ([] if "llama3" in kind else [call("get-time", "{}")])
    before = [reasoning("hm"), content("Let me see.")] if kind == "qwen3" else []
    assert pieces(kind, [ANSWERS[kind]]) == before + calls
    assert pieces(kind, list(ANSWERS[kind])) == before + calls


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_call_that_is_cut_anywhere_is_text(kind: str) -> None:
    answer = ANSWERS[kind]
    for cut in range(len(answer) + 1):
        part = answer[:cut]
        found = pieces(kind, [part], complete=False)
        assert found == pieces(kind, [part[at : at + 3] for at in range(0, cut, 3)], complete=False)
        calls = [piece for piece in found if piece.kind is PieceKind.TOOL_CALL]
        assert calls == [call("get_weather", CITY), call("get-time", "{}")][: len(calls)]
        begins = [
            begin.start()
            for begin in re.finditer(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|\A\{", part)
        ]
        if begins and "</tool_call>" not in part[begins[-1] :]:
            assert content_of(found).endswith(part[begins[-1] :])
            assert len(calls) == len(begins) - 1


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=60)
@given(data=st.data())
def test_chunks_change_nothing_and_no_text_is_lost(kind: str, data: st.DataObject) -> None:
    words = [
        *SPECIAL[2:5],
        *ADDED,
        "<|im_end|>",
        "\n",
        " ",
        "a",
        "ü",
        "{",
        "}",
        '{"name": "get_weather", "',
        'arguments": {}}',
    ]
    words += [
        'parameters": {}}',
        "<tool_",
        "<|im",
        "[",
        "[TOOL_CALLS]f[ARGS]{}",
        ANSWERS.get(kind, "<think>x</think>"),
    ]
    text = "".join(
        data.draw(st.lists(st.one_of(st.sampled_from(words), st.text(max_size=4)), max_size=12))
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    complete = data.draw(st.booleans())
    whole = pieces(kind, [text], complete)
    assert pieces(kind, chunks, complete) == whole
    assert pieces(kind, list(text), complete) == whole
    if not any(mark in text for mark in ("<", "[", '{"name"')):
        assert "".join(piece.text for piece in whole) == text


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": '
        + '{"a":' * 50_000
        + "1"
        + "}" * 50_000
        + "}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5_000 + "}}</tool_call>",
        "<tool_call>" + "a" * (1 << 20) + "bc</tool_call>",
    ],
    ids=lambda text: text[:60],
)
def test_a_call_that_cannot_be_read_is_text_and_the_next_one_is_read(text: str) -> None:
    next_call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    expected = [content(f"So: {text}"), call("f", "{}")]
    assert pieces("hermes", [f"So: {text}\n{next_call}\n"]) == expected
    assert pieces("hermes", [f"So: {text[:9]}", text[9:], next_call]) == expected


def test_a_call_after_a_call_without_arguments() -> None:
    first = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    second = '<tool_call>{"name": "b", "arguments": {"x": {}}}</tool_call>'
    assert pieces("hermes", [f"{first}\n{second}"]) == [call("a", "{}"), call("b", '{"x": {}}')]


def test_text_around_calls_is_content() -> None:
    one = '<tool_call>{"name": "f", "arguments": null}</tool_call>'
    found = pieces("hermes", [f" Before\n\n{one}\nbetween {one}\n\nafter \n<|im_end|>"])
    assert found == [
        content(" Before"),
        call("f", "{}"),
        content("between"),
        call("f", "{}"),
        content("after \n"),
    ]


def test_arguments_that_are_json_in_a_string_are_that_json() -> None:
    assert pieces(
        "hermes", ['<tool_call>{"name": "f", "arguments": "{\\"a\\":1}"}</tool_call>']
    ) == [call("f", '{"a":1}')]


def test_the_last_end_tag_may_lack_where_the_model_ended_by_itself() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}'
    assert pieces("hermes", [text + "<|im_end|>"]) == [call("f", "{}")]
    assert pieces("hermes", [text], complete=False) == [content(text)]


def test_bare_json_is_a_call_only_of_a_tool_and_only_at_the_beginning() -> None:
    for text in (
        '{"name": "Ann", "parameters": {}}',
        '{"name": "at"}',
        'So {"name": "at", "parameters": {}}',
        '{"name": "at',
    ):
        assert pieces("llama3", list(text)) == [content(text)]
    assert pieces("llama3", list('\n{"name": "at", "parameters": {}}')) == [call("at", "{}")]


@pytest.mark.parametrize("kind", ANSWERS)
def test_without_tools_markup_of_calls_is_text(kind: str) -> None:
    expected = ANSWERS[kind].partition("</think>\n\n")[2] if kind == "qwen3" else ANSWERS[kind]
    for special in SPECIAL:
        if kind != "qwen3" and kind != "hermes":  # the text of these is markup of calls, and stays
            break
        expected = expected.replace(special, "")
    assert content_of(pieces(kind, [ANSWERS[kind]], tools=[])) == expected


def test_special_tokens_are_stripped_however_they_come() -> None:
    text = "a<|im_end|>b <s>c</s> <|im_<|eot|>end|>[INST]"
    assert (
        pieces("hermes", [text])
        == pieces("hermes", list(text))
        == [content("ab <s>c</s> <|im_end|>")]
    )


@pytest.mark.parametrize(
    ("kind", "prompt", "begins_in"),
    [
        ("r1", "Hi<｜Assistant｜><think>\n", "reasoning"),
        ("r1", "Hi<｜Assistant｜>", "content"),
        ("r1", "<｜Assistant｜><think>a</think>b<｜User｜>Hi<｜Assistant｜>", "content"),
        ("r1", "a template that writes other headers: <think>\n", "reasoning"),
        ("r1", "what does <think> mean?", "content"),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "content"),
        ("qwen3", "<|im_start|>assistant\n<think>\nI was just", "reasoning"),
        ("qwen3", "<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", "content"),
        ("hermes", "<|im_start|>assistant\n<think>\n", "content"),
    ],
)
def test_the_end_of_the_prompt_says_where_an_answer_begins(
    kind: str, prompt: str, begins_in: str
) -> None:
    expected = (
        [reasoning("x"), content("y")] if begins_in == "reasoning" else [content("x</think>y")]
    )
    assert pieces(kind, ["x</think>y"], prompt=prompt) == expected
    assert pieces(kind, list("x</think>y"), prompt=prompt) == expected
    assert FORMATS[kind].markup.begins_in_reasoning(prompt) == (begins_in == "reasoning")


@settings(max_examples=30)
@given(st.data())
def test_what_the_template_renders_is_read_back(data: st.DataObject) -> None:
    plain = st.text(st.characters(codec="utf-8", exclude_characters="<[|"), max_size=12)
    arguments = st.dictionaries(
        plain, st.one_of(st.integers(), plain, st.booleans(), st.lists(plain)), max_size=3
    )
    calls = data.draw(
        st.lists(st.tuples(st.sampled_from(["f", "get_weather"]), arguments), max_size=3)
    )
    said, thought = data.draw(plain.map(str.strip)), data.draw(plain.map(str.strip))
    tool_calls = [
        {"function": {"name": name, "arguments": json.dumps(values)}} for name, values in calls
    ]
    message = {
        "role": "assistant",
        "content": said,
        "reasoning_content": thought,
        "tool_calls": tool_calls,
    }
    model = tokenizer(QWEN3)
    text = model.decode(model.apply_chat_template([message], False), skip_special_tokens=False)
    found = pieces("qwen3", [text.removeprefix("<|im_start|>assistant\n").removesuffix("\n")])
    assert "".join(piece.text for piece in found if piece.kind is PieceKind.REASONING) == thought
    assert content_of(found) == said
    assert [(p.name, json.loads(p.text)) for p in found if p.kind is PieceKind.TOOL_CALL] == [
        (n, v) for n, v in calls
    ]


@pytest.mark.parametrize("chunk", [8, 1 << 20])
@pytest.mark.parametrize(
    "text",
    ["<tool_call>" + "{" * 1_000_000, " " * 1_000_000, "<tool_cal" * 20_000],
    ids=["call", "blanks", "tags"],
)
def test_the_cost_is_linear(text: str, chunk: int) -> None:
    def parse() -> None:
        chunks = [text[at : at + chunk] for at in range(0, len(text), chunk)]
        assert content_of(pieces("qwen3", chunks, complete=False)) == text

    assert takes_less(3, parse)  # quadratic: minutes


@pytest.mark.parametrize("opening", ["", "<think>", "<tool_call>"])
def test_text_that_was_read_is_forgotten(opening: str) -> None:
    parser: Any = FORMATS["qwen3"].parser("", TOOLS)
    parser.feed(opening)
    for _ in range(20_000):
        parser.feed("a<b ")
    assert len(parser._finder._text) < 100


@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_regions_go_on_for_long(chunk: int) -> None:
    long = "a <b </ [x] " * 4000 + "end"
    arguments = json.dumps({"city": long})
    one = '<tool_call>{"name": "get_weather", "arguments": ' + arguments + "}</tool_call>"
    text = f"<think>{long}</think>{long}\n{one}{one}{long}"
    found = pieces("qwen3", [text[at : at + chunk] for at in range(0, len(text), chunk)])
    weather = call("get_weather", arguments)
    assert found == [reasoning(long), content(long), weather, weather, content(long)]


def test_a_fault_of_the_parser_gives_the_rest_as_text(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*arguments: object) -> None:
        raise KeyError(arguments)

    parser: Any = FORMATS["qwen3"].parser("", TOOLS)
    found = parser.feed('So <tool_call>{"na')
    parser._finder.next = fail
    found += parser.feed('me": <') + parser.feed("1</tool_call>") + parser.finish(True)
    assert content_of(found) == 'So <tool_call>{"name": <1</tool_call>'
    assert "failed" in caplog.text


@settings(max_examples=100)
@given(data=st.data())
def test_the_regions_are_those_that_transformers_finds(data: st.DataObject) -> None:
    words = [
        "<call>",
        "</call>",
        "<think>",
        "</think>",
        "</think>>",
        "aab",
        "c",
        "cc",
        "<ca",
        " ",
        "x",
    ]
    chunks = data.draw(st.lists(st.sampled_from(words), max_size=15))
    template = load_response_template(
        {
            "start_anchor_pattern": "(?!)",
            "fields": {
                "calls": {"open": "<call>", "close_pattern": r"</call>(?!c)"},
                "reasoning": {"open": "<think>", "close": ["</think>", "</think>>"]},
                "other": {"open_pattern": "a+b", "close_pattern": "c{2,}", "repeats": True},
                "content": {},
            },
        }
    )
    theirs = ResponseParser(template, prefix="")
    events = [event for chunk in chunks for event in theirs.feed(chunk)] + theirs.finalize()[1]
    expected: dict[str, str] = {}
    for event in events:
        expected[event["field"]] = expected.get(event["field"], "") + event.get("text", "")
    finder = Finder(regions_of(field for field in template.fields.values() if field.open_re))
    found: dict[str, str] = {}
    region = None
    for index in range(len(chunks) + 1):
        finder.feed("".join(chunks[index : index + 1]))
        finder.load()
        mark: Mark | None = Mark("", "")
        while mark is not None:
            text, mark = finder.next(region, index == len(chunks))
            name = region or "content"
            if text or region:
                found[name] = found.get(name, "") + text
            if mark is not None:
                region = mark.name if region is None else None
    assert found == expected
