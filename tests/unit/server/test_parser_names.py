"""`--tool-call-parser` and `--reasoning-parser`: names that other servers have, and what they
select.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.server.call_form_cases import FORMS, tokenizer
from tests.unit.server.joined_pieces import call, content, joined, reasoning

from freight.errors import ConfigError
from freight.serve.answers.answer_format import answer_format
from freight.serve.answers.call_families import REASONING_PARSERS, TOOL_CALL_PARSERS
from freight.serve.answers.harmony_format import HarmonyFormat
from freight.serve.serving import Serving
from freight.serve.settings import ServerSettings
from freight.text.harmony import MARKERS
from freight.text.tokenizer import Tokenizer

TOOLS = [{"type": "function", "function": {"name": "f"}}]
QWEN = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
HERMES = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
OWN: Mapping[str, Any] = {"start_anchor": "x", "fields": {"content": {"content": "text"}}}


def read(form: Any, text: str) -> list[Any]:
    assert form is not None
    return joined(form.parser("", TOOLS), [text], True)


def test_a_name_comes_before_what_the_checkpoint_shows() -> None:
    model = tokenizer("<tool_call></tool_call>")
    assert read(answer_format(model), HERMES) == [call("f", "{}")]
    chosen = answer_format(model, "qwen3_coder")
    assert read(chosen, HERMES) == [content(HERMES)]
    assert read(chosen, QWEN) == [call("f", "{}")]
    with_own = Tokenizer(model.backend, None, "", OWN)
    assert read(answer_format(with_own), QWEN) == [content(QWEN)]
    assert read(answer_format(with_own, "qwen3_xml"), QWEN) == [call("f", "{}")]


def test_a_name_works_without_a_chat_template_that_shows_anything() -> None:
    model = tokenizer("")
    assert answer_format(model) is None
    found = read(answer_format(model, None, "qwen3"), "<think>hm</think>Hi")
    assert found == [reasoning("hm"), content("Hi")]
    both = answer_format(model, "hermes", "deepseek_r1")
    assert read(both, f"<think>hm</think>{HERMES}") == [reasoning("hm"), call("f", "{}")]


@pytest.mark.parametrize("name", sorted(TOOL_CALL_PARSERS))
def test_of_several_forms_the_template_decides(name: str) -> None:
    forms = TOOL_CALL_PARSERS[name]
    assert len(forms) == 1 or {id(form) for form in forms} <= {id(form) for form in FORMS.values()}
    if name == "mistral":
        for template, text in (
            ("[TOOL_CALLS] [", '[TOOL_CALLS][{"name": "f", "arguments": {}}]'),
            ("", ""),
        ):
            expected = [call("f", "{}")] if text else []
            assert read(answer_format(tokenizer(template), name), text) == expected
        assert read(answer_format(tokenizer(""), name), "[TOOL_CALLS]f[ARGS]{}") == [
            call("f", "{}")
        ]


def test_harmony_is_chosen_by_name_and_needs_its_tokens() -> None:
    model = tokenizer("", MARKERS)
    assert isinstance(answer_format(model, "openai"), HarmonyFormat)
    assert isinstance(answer_format(model, None, "openai_gptoss"), HarmonyFormat)
    for names in (("openai", None), (None, "gpt_oss")):
        with pytest.raises(ConfigError, match="gpt-oss"):
            answer_format(tokenizer(""), *names)


@pytest.mark.parametrize(
    ("field", "known"),
    [("tool_call_parser", TOOL_CALL_PARSERS), ("reasoning_parser", REASONING_PARSERS)],
)
def test_an_unknown_name_is_refused_early(field: str, known: Mapping[str, Any]) -> None:
    for name in known:
        ServerSettings(**{field: name})
    with pytest.raises(ConfigError) as error:
        ServerSettings(**{field: "hermess"})
    assert f"--{field.replace('_', '-')} is 'hermess'" in str(error.value)
    assert all(name in str(error.value) for name in known)


def test_the_names_are_those_of_the_documentation() -> None:
    text = (Path(__file__).parents[3] / "docs" / "server.md").read_text()
    for name in (*TOOL_CALL_PARSERS, *REASONING_PARSERS):
        assert f"`{name}`" in text


@pytest.mark.parametrize(
    ("template", "parser", "warns"),
    [
        ("{{ tools }} [get_weather(city=1)]", None, True),
        ("{{ tools }} </think>", None, True),
        ("{{ tools }} [get_weather(city=1)]", "hermes", False),
        ("{{ tools }} <tool_call></tool_call>", None, False),
        ("{{ messages }}", None, False),
    ],
)
def test_a_line_at_start_says_that_calls_are_not_read(
    template: str, parser: str | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server: Any = SimpleNamespace(_settings=ServerSettings(tool_call_parser=parser))
    with caplog.at_level(logging.WARNING):
        Serving._answer_format(server, tokenizer(template))
    assert [("--tool-call-parser" in message) for message in caplog.messages] == [True] * warns
