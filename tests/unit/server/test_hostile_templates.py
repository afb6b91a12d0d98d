"""Response templates whose expressions would hold a server for ever: the answer is content, soon."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
from tests.unit.server.joined_pieces import joined
from tests.unit.server.test_tools import tokenizer

from freight.base import patterns
from freight.serve.answers.pieces import PieceKind
from freight.serve.answers.tools import parser_for

SLOW = r"(?:a|a)+b"  # tries 2 ** n ways through n letters
CALLS = {
    "open": "<call>",
    "close": "</call>",
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
THINKING = {"open": "<think>", "close": "</think>"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
LETTERS = "a" * 60
QUOTES = "<q>" * 100_000


def template(**fields: Any) -> dict[str, Any]:
    return {"start_anchor": "<|im_start|>", "fields": {"content": {}, **fields}}


def tagged(**args: Any) -> dict[str, Any]:
    arguments = {"name": "f", "arguments": "{content}"}
    return template(
        tool_calls={
            **CALLS,
            "content": "xml-inline",
            "content_args": args,
            "transform": {"type": "function", "function": arguments},
        }
    )


def opened(name: str, key: str) -> dict[str, Any]:
    field = {**(CALLS if name == "tool_calls" else THINKING)}
    del field[key]
    return template(**{name: {**field, f"{key}_pattern": SLOW}})


CALL = f"<call>{LETTERS}</call>"
TAG = r"(?P<key>k)(?P<value>a+)"
CASES: dict[str, tuple[Mapping[str, Any], str]] = {
    "the anchor": (
        {"start_anchor_pattern": SLOW, "fields": {"content": {}, "tool_calls": CALLS}},
        "",
    ),
    "the anchor, with reasoning": (
        {"start_anchor_pattern": SLOW, "fields": {"content": {}, "thinking": THINKING}},
        "",
    ),
    "the opening of calls": (opened("tool_calls", "open"), LETTERS),
    "the end of calls": (opened("tool_calls", "close"), CALL),
    "the opening of reasoning": (opened("thinking", "open"), LETTERS),
    "the end of reasoning": (opened("thinking", "close"), f"<think>{LETTERS}"),
    "the end of content": (
        {"start_anchor": "x", "fields": {"content": {"close_pattern": SLOW}, "tool_calls": CALLS}},
        f"{LETTERS}<call>",
    ),
    "tags": (tagged(tag_pattern=f"(?P<key>k)?(?P<value>{SLOW})"), CALL),
    "tags at a begin": (tagged(tag_pattern=rf"\A(?P<key>a)(?P<value>{SLOW})"), CALL),
    "tags in values": (
        tagged(
            tag_pattern=TAG,
            value_parser={"name": "xml-inline", "args": {"tag_pattern": f"(?P<key>{SLOW})"}},
        ),
        f"<call>k{LETTERS}</call>",
    ),
    "tags in values of lines": (
        template(
            tool_calls={
                **CALLS,
                "content": "kv-lines",
                "content_args": {
                    "value_parser": {
                        "name": "xml-inline",
                        "args": {"tag_pattern": f"(?P<key>{SLOW})"},
                    }
                },
            }
        ),
        f"<call>k:{LETTERS}</call>",
    ),
    "strings": (
        template(
            tool_calls={**CALLS, "content_args": {"string_delims": [["<q>", "</q>"]]}},
        ),
        f"<call>{QUOTES}</call>",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_answer_ends_soon_with_all_its_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "ANSWER_SECONDS", 0.1)
    own, answer = CASES[name]
    text = answer or LETTERS
    began = time.thread_time()
    form = parser_for(tokenizer("no markup", own))
    assert form is not None
    form.markup.begins_in_reasoning(f"<|im_start|>{LETTERS}")
    pieces = joined(form.parser(f"<|im_start|>{LETTERS}", TOOLS), [text], True)
    assert time.thread_time() - began < 5
    assert not [piece for piece in pieces if piece.kind is PieceKind.TOOL_CALL]
    assert "".join(piece.text for piece in pieces) == text


def test_an_expression_without_such_repeats_is_used() -> None:
    own = tagged(tag_pattern=r"<(?P<key>\w+)>(?P<value>.*?)</\w+>")
    form = parser_for(tokenizer("no markup", own))
    assert form is not None
    pieces = joined(form.parser("", TOOLS), ["So: <call><x>1</x><y>2</y></call>"], True)
    assert [piece.name for piece in pieces] == ["", "f"]
    assert pieces[1].text.replace(" ", "") == '{"x":"1","y":"2"}'
