"""End tags of a call within its own values, and openings that an answer only quotes.

Values hold what reports of other servers showed: vllm-project/vllm#45167, local-inference-lab/vllm#639,
ai-dynamo/frontend-crates#245, noonghunna/club-3090#1191.
"""

from __future__ import annotations

import json

import pytest
from tests.clock import takes_less
from tests.unit.server.call_form_cases import FORMS, TOOLS, named_format
from tests.unit.server.joined_pieces import call, content, joined

from freight.serve.answers.gemma_calls import GemmaValues
from freight.serve.answers.tagged_calls import Tagged

ENDS = {
    "DEEPSEEK_V3": "```<｜tool▁call▁end｜>",
    "DEEPSEEK_V31": "<｜tool▁call▁end｜>",
    "DEEPSEEK_V32": "</｜DSML｜invoke>",
    "DEEPSEEK_V41": "</｜DSML｜ invoke>",
    "GEMMA4": "<tool_call|>",
    "GLM45": "</tool_call>",
    "GLM47": "</tool_call>",
    "HERMES": "</tool_call>",
    "HUNYUAN": "</tool_calls>",
    "HY3": "</tool_call:opensource>",
    "KIMI_K2": "<|tool_call_end|>",
    "MINIMAX_M2": "</invoke>",
    "MISTRAL_ARGS": "[TOOL_CALLS]",
    "NEMOTRON": "</TOOLCALL>",
    "PHI4": "<|/tool_call|>",
    "QWEN3_CODER": "</function>\n</tool_call>",
    "SEED_OSS": "</function></seed:tool_call>",
}


def written(name: str, value: str, closed: bool = True) -> str:
    """A call of get_time with the argument `zone`, as the form writes it."""
    form = FORMS[name]
    syntax = form.syntax
    if isinstance(syntax, Tagged):
        sign = '" string="true">' if syntax.strings else syntax.key[1]
        end = syntax.pad + syntax.value[1] + syntax.line if closed else ""
        key = f"{syntax.key[0]}zone{sign}{syntax.gap}{syntax.value[0]}{syntax.pad}"
        arguments = key + value + end
    elif isinstance(syntax, GemmaValues):
        arguments = f"{{zone:{syntax.mark}{value}{syntax.mark}}}"
    else:
        arguments = json.dumps({"zone": value}, ensure_ascii=False)
    called = json.dumps("get_time") if form.quoted else "get_time" + ":0" * form.numbered
    before = form.opening + form.before_name + called + form.before_arguments
    return before + arguments + form.after_arguments + form.closing


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("name", ENDS)
def test_an_end_tag_in_a_value_does_not_end_the_call(name: str, size: int) -> None:
    value = f"a {ENDS[name]} b {ENDS[name]} c"
    text = f"Look:\n{written(name, value)}"
    chunks = [text[at : at + size] for at in range(0, len(text), size)]
    found = joined(named_format(name).parser("", TOOLS), chunks, True)
    expected = json.dumps({"zone": value}, ensure_ascii=False)
    assert found == [content("Look:"), call("get_time", expected)]


@pytest.mark.parametrize("name", [name for name in ENDS if isinstance(FORMS[name].syntax, Tagged)])
def test_text_behind_a_call_without_the_end_of_its_value_is_content(name: str) -> None:
    text = f"{written(name, 'CET', closed=False)}\nDone.\n{written(name, 'UTC')}"
    for chunks in ([text], list(text)):
        found = joined(named_format(name).parser("", TOOLS), chunks, True)
        calls = [call("get_time", json.dumps({"zone": zone})) for zone in ("CET", "UTC")]
        assert found == [calls[0], content("Done."), calls[1]]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("HERMES", "I use `<tool_call>` and <tool_call> {x} now:"),
        ("GLM47", "I use `<tool_call>` now:"),
        ("QWEN3_CODER", "I use `<tool_call>` and `<function=` now:"),
        ("SEED_OSS", "I use `<seed:tool_call><function=` now:"),
        ("MINIMAX_M2", "I use `<invoke name=` now:"),
        ("KIMI_K2", "I use <|tool_call_begin|>a:0<|tool_call_argument_begin|> now:"),
        ("NEMOTRON", "I use `<TOOLCALL>` now:"),
    ],
)
def test_a_quoted_opening_does_not_hide_the_call_behind_it(name: str, said: str) -> None:
    text = f"{said}\n{written(name, 'CET')}"
    for chunks in ([text], list(text)):
        found = joined(named_format(name).parser("", TOOLS), chunks, True)
        assert found == [content(said), call("get_time", '{"zone": "CET"}')]


@pytest.mark.parametrize("name", ENDS)
def test_floods_of_ends_and_openings_are_read_in_linear_time(name: str) -> None:
    flood = f"{ENDS[name]} x " * (20_000 // len(ENDS[name]))
    texts = [written(name, flood), f"{written(name, 'CET', closed=False)} a " * 200]
    for text in texts:
        parser = named_format(name).parser("", TOOLS)
        assert takes_less(8, lambda: joined(parser, [text], True), attempts=1)  # noqa: B023
