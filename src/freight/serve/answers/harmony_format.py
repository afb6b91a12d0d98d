"""Answers in harmony, gpt-oss's format: their parser, and the grammars that constrain them.

An answer may reason first, in the channel `analysis`. Then comes the constrained message: `final`,
or a call. gpt-oss ends its turn with `<|call|>`, so a forced answer is one call, whatever
`parallel_tool_calls` says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from freight.base.fields import JsonObject
from freight.serve.answers.argument_types import arguments_schema
from freight.serve.answers.harmony_parser import HarmonyParser, Place
from freight.serve.answers.out import SpecialTokens
from freight.serve.answers.pieces import MessageParser
from freight.serve.answers.tools import forced_functions
from freight.text.harmony import CHANNEL, CONSTRAIN, END, MARKERS, MESSAGE, START
from freight.text.thinking import THINK_HARMONY
from freight.text.tokenizer import Tokenizer


class HarmonyFormat:
    """The `AnswerFormat` of gpt-oss."""

    reads_calls = True
    reads_reasoning = True
    thinking_tags: tuple[str, str] | None = THINK_HARMONY.pair

    def __init__(self, tokenizer: Tokenizer, ids: Mapping[str, int]) -> None:
        """Keep the tokenizer's tokens. ids: the token of each marker."""
        self._special = SpecialTokens(tokenizer.special_texts - set(MARKERS))
        self._token = {marker: f"<[{token}]>" for marker, token in ids.items()}

    def parser(self, prompt_text: str | None, tools: Sequence[JsonObject]) -> MessageParser:
        """Return the parser of one answer; a `ParserOf`. Without tools, calls are content."""
        return HarmonyParser(self._special, prompt_text, tools)

    def call_to(
        self,
        tools: Sequence[JsonObject],
        names: Sequence[str],
        parallel: bool,
        prompt_text: str | None,
    ) -> JsonObject:
        """Return the grammar of one call of one of `names`; a `ForcedCall`. Raises ApiError 400 for
        a name not in `tools`.
        """
        functions = forced_functions(tools, names)
        token = self._token
        place = self._place(prompt_text)
        rules = [self._start(place, "call")]
        if place in (Place.CONTENT, Place.CALL):  # first end the message that the prompt has begun
            rules = [f'start: {token[END]} {token[START]} "assistant" call']
        rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(functions))))
        kind = f'({token[CONSTRAIN]})? "json"'
        for index, function in enumerate(functions):
            to = json.dumps(f" to=functions.{function['name']}", ensure_ascii=False)
            rules.append(f"call_{index}: head_{index} {token[MESSAGE]} @arguments_{index}")
            # The first header is the model's way to write a call, the second the chat template's.
            rules.append(
                f'head_{index}: {token[CHANNEL]} "commentary" {to} (" " {kind})?'
                f' | {to} {token[CHANNEL]} "commentary" (" " {kind})?'
            )
        parts = {
            f"arguments_{index}": {"json": arguments_schema(schema)}
            for index, schema in enumerate(functions)
        }
        return {"grammar": "\n".join(rules), "parts": parts}

    def form_to(self, form: JsonObject, prompt_text: str) -> JsonObject:
        """Return the grammar of an answer whose `final` message has `form`; an `AfterReasoning`."""
        token = self._token
        place = self._place(prompt_text)
        if place in (Place.CONTENT, Place.CALL):
            return form
        rules = [
            self._start(place, "answer"),
            f'answer: {token[CHANNEL]} "final" {token[MESSAGE]} @form',
        ]
        return {"grammar": "\n".join(rules), "parts": {"form": form}}

    def _place(self, prompt_text: str | None) -> Place:
        """Return where in a message an answer to this prompt begins."""
        return HarmonyParser(self._special, prompt_text, ()).place

    def _start(self, place: Place, then: str) -> str:
        """Return rules for an answer that may reason, or continues to, before the rule `then`."""
        token = self._token
        prefix = f'THOUGHT {token[END]} {token[START]} "assistant"'
        if place is not Place.REASONING:
            prefix = f'({token[CHANNEL]} "analysis" {token[MESSAGE]} {prefix})?'
        # THOUGHT matches no special token, so it ends at the next marker.
        return f"start: {prefix} {then}\nTHOUGHT: /(?s:.)*/"
