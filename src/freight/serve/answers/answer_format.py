"""The format of a model's answers, chosen by its tokenizer: how they are parsed and constrained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from freight.base.fields import JsonObject
from freight.errors import ConfigError
from freight.serve.answers.call_families import HARMONY, REASONING_PARSERS, TOOL_CALL_PARSERS
from freight.serve.answers.harmony_format import HarmonyFormat
from freight.serve.answers.pieces import MessageParser
from freight.serve.answers.tools import parser_for
from freight.text.harmony import MARKERS, is_harmony
from freight.text.tokenizer import Tokenizer


class AnswerFormat(Protocol):
    """The format of one model's answers: parses them, and builds grammars for them."""

    reads_calls: bool
    reads_reasoning: bool
    thinking_tags: tuple[str, str] | None

    def parser(self, prompt_text: str | None, tools: Sequence[JsonObject]) -> MessageParser:
        """Return the parser of one answer; a `ParserOf`."""

    def call_to(
        self,
        tools: Sequence[JsonObject],
        names: Sequence[str],
        parallel: bool,
        prompt_text: str | None,
    ) -> JsonObject:
        """Return the grammar of a forced call; a `ForcedCall`. Raises ApiError 400."""

    def form_to(self, form: JsonObject, prompt_text: str) -> JsonObject:
        """Return the grammar of reasoning and then `form`; an `AfterReasoning`."""


def answer_format(
    tokenizer: Tokenizer, tool_call_parser: str | None = None, reasoning_parser: str | None = None
) -> AnswerFormat | None:
    """Return the format of a model's answers, or None if they have no known markup.

    tool_call_parser, reasoning_parser   names of `call_families`; None: by the chat template

    The format is harmony if the chat template writes it and each of its markers is one special
    token. Its own rules then apply, even if the checkpoint has a response template. Raises
    ConfigError if harmony is asked for and the tokenizer does not have its tokens.
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
