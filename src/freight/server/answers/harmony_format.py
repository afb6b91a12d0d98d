"""Answers in harmony, gpt-oss's format: their parser, and the grammars that give them a form.

An answer may reason first, in the channel `analysis`. Then comes the message that has to have a
form: `final`, or a call. gpt-oss ends its turn with `<|call|>`, so a forced answer is one call,
whatever `parallel_tool_calls` says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from freight.server.answers.argument_types import arguments_schema
from freight.server.answers.harmony_parser import HarmonyParser, Place
from freight.server.answers.out import SpecialTokens
from freight.server.answers.pieces import MessageParser
from freight.server.answers.tools import forced_functions
from freight.text.harmony import CHANNEL, CONSTRAIN, END, MARKERS, MESSAGE, START
from freight.text.tokenizer import Tokenizer


class HarmonyFormat:
    """The `AnswerFormat` of gpt-oss."""

    reads_calls = True
    reads_reasoning = True

    def __init__(self, tokenizer: Tokenizer, ids: Mapping[str, int]) -> None:
        """ids: the token of each marker."""
        self._special = SpecialTokens(tokenizer.special_texts - set(MARKERS))
        self._token = {marker: f"<[{token}]>" for marker, token in ids.items()}

    def parser(self, prompt_text: str | None, tools: Sequence[Mapping[str, Any]]) -> MessageParser:
        """Reads one answer. A `ParserOf`: without tools, markup of calls is content."""
        return HarmonyParser(self._special, prompt_text, tools)

    def call_to(
        self,
        tools: Sequence[Mapping[str, Any]],
        names: Sequence[str],
        parallel: bool,
        prompt_text: str | None,
    ) -> Mapping[str, Any]:
        """A `ForcedCall`: one call of one of `names`. Raises ApiError 400 where a name is none of
        `tools`.
        """
        functions = forced_functions(tools, names)
        token, place = self._token, self._place(prompt_text)
        rules = [self._start(place, "call")]
        if place in (Place.CONTENT, Place.CALL):  # a message that the prompt has begun ends first
            rules = [f'start: {token[END]} {token[START]} "assistant" call']
        rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(functions))))
        kind = f'({token[CONSTRAIN]})? "json"'
        for index, function in enumerate(functions):
            to = json.dumps(f" to=functions.{function['name']}", ensure_ascii=False)
            rules.append(f"call_{index}: head_{index} {token[MESSAGE]} @arguments_{index}")
            # as the model writes a call, and as the chat template does
            rules.append(
                f'head_{index}: {token[CHANNEL]} "commentary" {to} (" " {kind})?'
                f' | {to} {token[CHANNEL]} "commentary" (" " {kind})?'
            )
        parts = {
            f"arguments_{index}": {"json": arguments_schema(one)}
            for index, one in enumerate(functions)
        }
        return {"grammar": "\n".join(rules), "parts": parts}

    def form_to(self, form: Mapping[str, Any], prompt_text: str) -> Mapping[str, Any]:
        """An `AfterReasoning`: `form` is that of the message in the channel `final`."""
        token, place = self._token, self._place(prompt_text)
        if place in (Place.CONTENT, Place.CALL):
            return form
        rules = [
            self._start(place, "answer"),
            f'answer: {token[CHANNEL]} "final" {token[MESSAGE]} @form',
        ]
        return {"grammar": "\n".join(rules), "parts": {"form": form}}

    def _place(self, prompt_text: str | None) -> Place:
        """Where an answer to this prompt begins."""
        return HarmonyParser(self._special, prompt_text, ()).place

    def _start(self, place: Place, then: str) -> str:
        """Rules for an answer that may reason, or goes on with it, before the rule `then`."""
        token = self._token
        rest = f'THOUGHT {token[END]} {token[START]} "assistant"'
        if place is not Place.REASONING:
            rest = f'({token[CHANNEL]} "analysis" {token[MESSAGE]} {rest})?'
        return f"start: {rest} {then}\nTHOUGHT: /(?s:.)*/"  # which no special token matches
