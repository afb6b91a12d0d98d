"""Every form of calls, by the chat templates that publish it: the form is recognised, and what the
template writes of two calls is read as these two calls, whole, in pieces, cut anywhere and in
floods."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.server.call_form_cases import (
    ARGUMENTS,
    FORMS,
    TAGS,
    TEMPLATES,
    TOOLS,
    format_of,
    named_format,
    tokenizer,
)
from tests.unit.server.joined_pieces import call, content, joined
from tests.unit.server.test_tools import QWEN3

from freight.base.patterns import AnswerPattern
from freight.serve.answers.call_families import form_of
from freight.serve.answers.listed_calls import ListedCalls
from freight.serve.answers.pieces import Piece, PieceKind
from freight.text.thinking import tags_of

EXPECTED: dict[
    str, tuple[str | None, str | None]
] = {  # template -> form of calls, tags of reasoning
    "ByteDance-Seed-OSS": ("SEED_OSS", "THINK_SEED"),
    "GLM-4.6": ("GLM45", "THINK"),
    "GLM-4.7-Flash": ("GLM47", "THINK"),
    "MiniMax-M2": ("MINIMAX_M2", "THINK"),
    "Qwen-Qwen3-0.6B": ("HERMES", "THINK"),
    "Qwen3-Coder": ("QWEN3_CODER", None),
    "Qwen3.5-4B": ("QWEN3_CODER", "THINK"),
    "StepFun3.5-Flash": ("QWEN3_CODER", "THINK"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("DEEPSEEK_V3", "THINK"),
    "deepseek-ai-DeepSeek-V3.1": ("DEEPSEEK_V31", "THINK"),
    "deepseek-ai-DeepSeek-V3.2": ("DEEPSEEK_V32", "THINK"),
    "deepseek-ai-DeepSeek-V4": ("DEEPSEEK_V4", "THINK"),
    "ibm-granite-granite-3.3-2B-Instruct": ("GRANITE", "THINK"),
    "ibm-granite-granite-4.0": ("HERMES", None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("MISTRAL_ARGS", "THINK_MISTRAL"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("MISTRAL_LIST", None),
    "moonshotai-Kimi-K2": ("KIMI_K2", None),
    "short-DeepSeek-V4.1": ("DEEPSEEK_V41", "THINK"),
    "short-Hy3": ("HY3", "THINK_HY3"),
    "short-Nemotron-Nano-v2": ("NEMOTRON", "THINK"),
    "tool_chat_template_gemma4": ("GEMMA4", "THINK_GEMMA4"),
    "tool_chat_template_granite": ("GRANITE", None),
    "tool_chat_template_hermes": ("HERMES", None),
    "tool_chat_template_hunyuan_a13b": ("HUNYUAN", "THINK"),
    "tool_chat_template_phi4_mini": ("PHI4", None),
}
# the template leaves calls out, or prints them in Python's notation, which the model never sees
WRITES_NO_CALLS = {
    "ibm-granite-granite-3.3-2B-Instruct",
    "tool_chat_template_phi4_mini",
}
KEEPS_REASONING = {  # templates that write the reasoning of an answer with calls
    *(
        "ByteDance-Seed-OSS",
        "GLM-4.6",
        "GLM-4.7-Flash",
        "MiniMax-M2",
        "Qwen-Qwen3-0.6B",
        "Qwen3.5-4B",
        "short-Hy3",
    ),
    *("StepFun3.5-Flash", "tool_chat_template_gemma4", "short-Nemotron-Nano-v2"),
}
CALLS = [("get_weather", ARGUMENTS), ("get_time", {"zone": "CET"})]


def rendered(name: str) -> tuple[str, str]:
    """(prompt, answer) as the template writes an answer that thinks "hm" and makes the two calls."""
    model = tokenizer(TEMPLATES[name])
    calls = [
        {
            "id": f"abcdefgh{index}",
            "type": "function",
            "function": {"name": function, "arguments": arguments},
        }
        for index, (function, arguments) in enumerate(CALLS)
    ]
    user = {"role": "user", "content": "Hi"}
    answer = {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "hm"}

    def text(messages: list[dict[str, Any]], prompt: bool) -> str:
        ids = model.apply_chat_template(messages, add_generation_prompt=prompt, tools=TOOLS)
        return model.decode(ids, skip_special_tokens=False)

    prompt, whole = text([user], True), text([user, answer], False)
    begun = prompt if whole.startswith(prompt) else whole[: whole.rindex("Hi") + 2]
    return (begun if begun == prompt else ""), whole[len(begun) :].removesuffix("</s>")


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_is_recognised(name: str) -> None:
    form, tags = EXPECTED[name]
    assert form_of(TEMPLATES[name]) is FORMS.get(form or "")
    assert tags_of(TEMPLATES[name]) is TAGS.get(tags or "")


@pytest.mark.parametrize(
    ("words", "form"),
    [
        ("<tool_call>{}</tool_call>", "HERMES"),
        ("]<]minimax[>[<tool_call><invoke name=></tool_call>", None),
        ('<|start_header_id|> <function=name>{}</function> "parameters"', None),
        ("<|tool|>{{ tools }}<|/tool|>", "PHI4"),
        ("<tool_sep> <arg_key>", "HY3_PLAIN"),
        ("[get_weather(city='x')]", None),
    ],
)
def test_a_tag_that_several_families_have_is_not_enough(words: str, form: str | None) -> None:
    assert form_of(words) is FORMS.get(form or "")


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - WRITES_NO_CALLS))
def test_what_the_template_writes_is_read_as_the_same_calls(name: str) -> None:
    prompt, answer = rendered(name)
    form = format_of(TEMPLATES[name])
    for chunks in (
        [answer],
        list(answer),
        [answer[at : at + 5] for at in range(0, len(answer), 5)],
    ):
        found = joined(form.parser(prompt, TOOLS), chunks, True)
        calls = [
            (piece.name, json.loads(piece.text))
            for piece in found
            if piece.kind is PieceKind.TOOL_CALL
        ]
        assert calls == CALLS
        thought = [piece.text for piece in found if piece.kind is PieceKind.REASONING]
        assert thought == (["hm"] if name in KEEPS_REASONING else [])
    last = found[-1]
    assert last.kind is PieceKind.TOOL_CALL or not last.text.strip(), "markup was left over"


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - WRITES_NO_CALLS))
def test_a_call_that_is_cut_anywhere_is_text(name: str) -> None:
    prompt, answer = rendered(name)
    form, seen = format_of(TEMPLATES[name]), set()
    whole = [(function, arguments) for function, arguments in CALLS]
    for cut in range(len(answer) + 1):
        found = joined(form.parser(prompt, TOOLS), [answer[:cut]], False)
        calls = [
            (piece.name, json.loads(piece.text))
            for piece in found
            if piece.kind is PieceKind.TOOL_CALL
        ]
        assert calls == whole[: len(calls)]
        seen.add(len(calls))
        if cut == answer.index("get_weather") + 8:
            assert "".join(piece.text for piece in found).endswith("get_weat")
    listed = form_of(TEMPLATES[name]) in (FORMS["HUNYUAN"], FORMS["NEMOTRON"])
    bounded = form_of(TEMPLATES[name]) not in (
        FORMS["MISTRAL_LIST"],
        FORMS["GRANITE"],
    )  # no end: whole or text
    assert seen >= ({0, 2} if listed else {0, 1} if bounded else {0})


def example(name: str) -> str:
    """Two calls as the row writes them."""
    form = FORMS[name]
    quote = '"' if form.quoted else ""
    first = (
        "get_time" if form.syntax is None or isinstance(form.syntax, ListedCalls) else "get_weather"
    )
    arguments = {"GEMMA4": '{city:<|"|>x<|"|>}'}.get(
        name, '{"zone": "CET"}' if first == "get_time" else ""
    )
    number = ":0" if form.numbered else ""
    one = f"{form.before_name}{quote}{first}{quote}{number}{form.before_arguments}{arguments}{form.after_arguments}"
    return form.opening + one + form.between + one + form.closing


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_pieces_change_nothing_and_nothing_raises(name: str, data: st.DataObject) -> None:
    form = named_format(name)
    known = FORMS[name]
    words = [
        *known.markers,
        known.opening,
        known.closing,
        known.before_name,
        known.before_arguments,
        example(name),
    ]
    words += [
        known.after_arguments,
        "get_time",
        "<",
        ">",
        "\n",
        "{",
        "}",
        '"',
        "</parameter>",
        "<parameter=a>",
        "x",
    ]
    words += [
        "<arg_key>a</arg_key>",
        "<arg_value>1</arg_value>",
        '<parameter name="a">',
        "[1, 2]",
        '<|"|>',
        "call:",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=14)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    complete = data.draw(st.booleans())
    whole = joined(form.parser("", TOOLS), [text], complete)
    parts = [text[first:last] for first, last in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert joined(form.parser("", TOOLS), parts, complete) == whole
    assert joined(form.parser("", TOOLS), list(text), complete) == whole
    for piece in whole:
        if piece.kind is PieceKind.TOOL_CALL:
            assert isinstance(json.loads(piece.text), dict)


@pytest.mark.parametrize("name", FORMS)
def test_text_around_calls_is_content(name: str) -> None:
    found = joined(named_format(name).parser("", TOOLS), [f"Let me see.\n{example(name)}"], True)
    calls = [piece for piece in found if piece.kind is PieceKind.TOOL_CALL]
    if name == "LLAMA3":  # bare JSON is a call only as the whole answer
        assert calls == []
        return
    assert (found[0], len(found), len(calls)) == (content("Let me see."), 3, 2)
    assert joined(named_format(name).parser("", ()), [example(name)], True) == [
        content(example(name))
    ]


TAGGED = sorted(name for name, form in FORMS.items() if type(form.syntax).__name__ == "Tagged")


@pytest.mark.parametrize("name", TAGGED)
def test_values_may_have_an_end_of_a_value_in_them(name: str) -> None:
    form = FORMS[name]
    syntax: Any = form.syntax
    value = f"a {syntax.value[1]} b {syntax.value[1]}"
    sign = '" string="true">' if syntax.strings else syntax.key[1]
    argument = (
        syntax.key[0]
        + "zone"
        + sign
        + syntax.gap
        + syntax.value[0]
        + syntax.pad
        + value
        + syntax.pad
    )
    body = argument + syntax.value[1] + syntax.line
    text = (
        form.opening
        + form.before_name
        + "get_time"
        + form.before_arguments
        + body
        + form.after_arguments
    )
    found = joined(named_format(name).parser("", TOOLS), [text + form.closing], True)
    assert found == [call("get_time", json.dumps({"zone": value}, ensure_ascii=False))]


@pytest.mark.parametrize("name", FORMS)
def test_floods_are_read_in_linear_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is counted in characters that are searched for marks, which is what grew in floods."""
    form = FORMS[name]
    searched = 0
    search = AnswerPattern.search

    def counted(pattern: AnswerPattern, text: str, at: int, **more: Any) -> Any:
        nonlocal searched
        match = search(pattern, text, at, **more)
        searched += (len(text) if match is None else match.end()) - at
        return match

    monkeypatch.setattr(AnswerPattern, "search", counted)
    for unit in (
        form.opening + form.before_name,
        form.before_name + "get_time" + form.before_arguments,
        "<",
        " \n",
    ):
        text = unit * (60_000 // len(unit))
        searched = 0
        found = joined(
            named_format(name).parser("", TOOLS),
            [text[at : at + 64] for at in range(0, len(text), 64)],
            False,
        )
        assert "".join(piece.text for piece in found) == text
        assert searched < 40 * len(text)


@pytest.mark.parametrize("name", TAGGED)
def test_a_call_of_a_megabyte_is_read_in_one_pass(name: str) -> None:
    """Every argument looks for the end of its value only once: with a search from each, this would
    take minutes.
    """
    form = FORMS[name]
    syntax: Any = form.syntax
    sign = '" string="true">' if syntax.strings else syntax.key[1]
    argument = syntax.key[0] + "a" + sign + syntax.gap + syntax.value[0]
    for body in (argument * (700_000 // len(argument)), (argument + syntax.value[1] + "x") * 8_000):
        text = form.before_name + "get_time" + form.before_arguments + body + form.after_arguments
        found = joined(
            named_format(name).parser("", TOOLS), [form.opening + text + form.closing], True
        )
        assert [piece.kind for piece in found] == [PieceKind.CONTENT]


def test_hermes_is_still_read_from_its_own_template() -> None:
    assert form_of(QWEN3) is FORMS["HERMES"]


@pytest.mark.parametrize(
    ("name", "prompt", "text", "expected"),
    [
        ("MiniMax-M2", "]~b]ai\n<think>\n", "hm\n</think>\n\nHi", ["hm", "Hi"]),
        ("GLM-4.6", "<|user|>\n<|assistant|>", "\n<think>hm</think>\nHi", ["hm", "Hi"]),
        ("GLM-4.6", "/nothink<|assistant|>\n<think></think>", "Hi", ["", "Hi"]),
        ("GLM-4.7-Flash", "<|user|>Hi<|assistant|><think>", "hm</think>Hi", ["hm", "Hi"]),
        (
            "tool_chat_template_gemma4",
            "<|turn>model\n",
            "<|channel>thought\nhm<channel|>Hi",
            ["hm", "Hi"],
        ),
        (
            "tool_chat_template_gemma4",
            "<|turn>model\n<|channel>thought\n<channel|>",
            "Hi",
            ["", "Hi"],
        ),
        (
            "mistralai-Ministral-3-14B-Reasoning-2512",
            "[/INST]",
            "[THINK]hm[/THINK]Hi",
            ["hm", "Hi"],
        ),
        (
            "ByteDance-Seed-OSS",
            "<seed:bos>assistant\n",
            "<seed:think>hm</seed:think>Hi",
            ["hm", "Hi"],
        ),
        ("deepseek-ai-DeepSeek-V3.1", "<｜Assistant｜></think>", "Hi", ["", "Hi"]),
        ("deepseek-ai-DeepSeek-V3.1", "<｜Assistant｜><think>", "hm</think>Hi", ["hm", "Hi"]),
        (
            "short-Hy3",
            "<｜hy_Assistant:opensource｜>",
            "<think:opensource>hm</think:opensource>Hi",
            ["hm", "Hi"],
        ),
    ],
)
def test_reasoning_begins_where_the_prompt_or_the_model_opens_it(
    name: str, prompt: str, text: str, expected: list[str]
) -> None:
    for chunks in ([text], list(text)):
        found = joined(format_of(TEMPLATES[name]).parser(prompt, TOOLS), chunks, True)
        kinds = (PieceKind.REASONING, PieceKind.CONTENT)
        assert [
            "".join(piece.text for piece in found if piece.kind is kind) for kind in kinds
        ] == expected


def test_granite_marks_its_reasoning_in_words() -> None:
    form = named_format("GRANITE", "THINK_GRANITE")
    for words in ("Here is", "Here's"):
        text = f"{words} my thought process: hm {words} my response: Hi"
        assert joined(form.parser("", ()), list(text), True) == [
            Piece(PieceKind.REASONING, "hm"),
            content("Hi"),
        ]
