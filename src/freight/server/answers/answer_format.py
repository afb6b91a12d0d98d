"""How the answers of a model are read and given a form, by its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from freight.errors import ConfigError
from freight.server.answers.call_families import HARMONY, REASONING_PARSERS, TOOL_CALL_PARSERS
from freight.server.answers.harmony_format import HarmonyFormat
from freight.server.answers.pieces import MessageParser
from freight.server.answers.tools import parser_for
from freight.text.harmony import MARKERS, is_harmony
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
