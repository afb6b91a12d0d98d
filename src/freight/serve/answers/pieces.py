"""Pieces of an assistant's text: content, reasoning, tool calls. Parsers of a model's markup make
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from freight.base.fields import JsonObject


class PieceKind(StrEnum):
    CONTENT = "content"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a message. `text`: new content or reasoning, or all arguments of a call (JSON)."""

    kind: PieceKind
    text: str
    name: str = ""  # of the called function


class MessageParser(Protocol):
    """A parser of one completion of an assistant, in chunks."""

    def feed(self, text: str) -> list[Piece]:
        """Take more text, special tokens included; returns the pieces that are certain by now."""

    def finish(self, complete: bool) -> list[Piece]:
        """End the text; returns the last pieces. complete: the model ended by itself. An incomplete
        call is content.
        """


# Makes a parser from the rendered prompt (None: unknown) and the request's tools (as in OpenAI's
# API).
ParserOf = Callable[[str | None, Sequence[JsonObject]], MessageParser]

# Makes keyword arguments of StructuredOutputs for an answer that is a call, from the tools, the
# names of which one must be called, whether several calls are allowed, and the rendered prompt
# (None: unknown yet).
ForcedCall = Callable[[Sequence[JsonObject], Sequence[str], bool, str | None], JsonObject]

# Makes keyword arguments of StructuredOutputs for an answer that reasons and then has a form, from
# the keyword arguments of that form and the rendered prompt.
AfterReasoning = Callable[[JsonObject, str], JsonObject]
