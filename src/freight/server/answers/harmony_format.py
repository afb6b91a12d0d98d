"""The grammars of answers in harmony, gpt-oss's format, and which format the answers of a model
have.

An answer may reason first, in the channel `analysis`. Then comes the message that has to have a
form: `final`, or a call. gpt-oss ends its turn with `<|call|>`, so a forced answer is one call,
whatever `parallel_tool_calls` says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from freight.errors import ConfigError
from freight.server.answers.argument_types import arguments_schema
from freight.server.answers.call_families import HARMONY, REASONING_PARSERS, TOOL_CALL_PARSERS
from freight.server.answers.harmony_parser import Harmony, Place
from freight.server.answers.out import SpecialTokens
from freight.server.answers.pieces import MessageParser
from freight.server.answers.tools import forced_functions, parser_for
from freight.text.harmony import CHANNEL, CONSTRAIN, END, MARKERS, MESSAGE, START, is_harmony
from freight.text.tokenizer import Tokenizer


class AnswerFormat(Protocol):
    """How the answers of one model are read, and how they are given a form."""

    reads_calls: bool
    reads_reasoning: bool

    def parser(self, prompt_text: str | None, tools: Sequence[Mapping[str, Any]]) -> MessageParser:
        """A `ParserOf`."""

    def call_to(
        self,
        tools: Sequence[Mapping[str, Any]],
        names: Sequence[str],
        parallel: bool,
        prompt_text: str | None,
    ) -> Mapping[str, Any]:
        """A `ForcedCall`. Raises ApiError 400."""

    def form_to(self, form: Mapping[str, Any], prompt_text: str) -> Mapping[str, Any]:
        """An `AfterReasoning`."""


class HarmonyFormat:
    """An `AnswerFormat`."""

    reads_calls = True
    reads_reasoning = True

    def __init__(self, tokenizer: Tokenizer, ids: Mapping[str, int]) -> None:
        """ids: the token of each marker."""
        self._harmony = Harmony(SpecialTokens(tokenizer.special_texts - set(MARKERS)))
        self._token = {marker: f"<[{token}]>" for marker, token in ids.items()}

    def parser(self, prompt_text: str | None, tools: Sequence[Mapping[str, Any]]) -> MessageParser:
        """Reads one answer. A `ParserOf`: without tools, markup of calls is content."""
        return self._harmony.parser(prompt_text, tools)

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
        token, place = self._token, self._harmony.place(prompt_text)
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
        token, place = self._token, self._harmony.place(prompt_text)
        if place in (Place.CONTENT, Place.CALL):
            return form
        rules = [
            self._start(place, "answer"),
            f'answer: {token[CHANNEL]} "final" {token[MESSAGE]} @form',
        ]
        return {"grammar": "\n".join(rules), "parts": {"form": form}}

    def _start(self, place: Place, then: str) -> str:
        """Rules for an answer that may reason, or goes on with it, before the rule `then`."""
        token = self._token
        rest = f'THOUGHT {token[END]} {token[START]} "assistant"'
        if place is not Place.REASONING:
            rest = f'({token[CHANNEL]} "analysis" {token[MESSAGE]} {rest})?'
        return f"start: {rest} {then}\nTHOUGHT: /(?s:.)*/"  # which no special token matches


def answer_format(
    tokenizer: Tokenizer, tool_call_parser: str | None = None, reasoning_parser: str | None = None
) -> AnswerFormat | None:
    """How answers of the model with this tokenizer are read; None where no markup is known in them.

    tool_call_parser, reasoning_parser   names of `call_families`; None: by the chat template

    Harmony where the chat template writes it and each of its markers is one special token. It is
    read by the format's own rules then, also beside a response template of the checkpoint. Raises
    ConfigError where harmony is asked for and the tokenizer has no such tokens.
    """
    asked = [
        names.get(name) == (HARMONY,)
        for name, names in (
            (tool_call_parser, TOOL_CALL_PARSERS),
            (reasoning_parser, REASONING_PARSERS),
        )
        if name is not None
    ]
    has_markers = tokenizer.special_texts.issuperset(MARKERS)
    if any(asked) and not has_markers:
        raise ConfigError(
            "--tool-call-parser openai and --reasoning-parser openai_gptoss are for gpt-oss: the tokenizer does not "
            f"have its control tokens, like {MARKERS[0]}; leave the option out"
        )
    if any(asked) or (not asked and has_markers and is_harmony(tokenizer.chat_template_source)):
        return HarmonyFormat(
            tokenizer, {marker: tokenizer.encode(marker, False)[0] for marker in MARKERS}
        )
    return parser_for(tokenizer, tool_call_parser, reasoning_parser)
