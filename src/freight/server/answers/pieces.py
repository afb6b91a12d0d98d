"""What an assistant's text is made of: content, reasoning, tool calls. Parsers of a model's markup
make them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol


class PieceKind(StrEnum):
    CONTENT = "content"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a message. `text` is what is new of content or reasoning, or all arguments of one
    call, as JSON.
    """

    kind: PieceKind
    text: str
    name: str = ""  # of the function that is called


class MessageParser(Protocol):
    """Reads one completion of an assistant as it grows."""

    def feed(self, text: str) -> list[Piece]:
        """Take more text, special tokens included; returns what is certain by now."""

    def finish(self, complete: bool) -> list[Piece]:
        """No more text comes. `complete`: the model ended by itself. A call that is not whole comes
        as content.
        """


# From the rendered prompt (None: not known) and the request's tools (JSON schemas, as OpenAI's API
# has them).
ParserOf = Callable[[str | None, Sequence[Mapping[str, Any]]], MessageParser]

# Keyword arguments of StructuredOutputs for an answer that is a call, from the tools, the names of
# those of which one has to be called, whether there may be several calls, and the rendered prompt
# (None: not known yet).
ForcedCall = Callable[
    [Sequence[Mapping[str, Any]], Sequence[str], bool, str | None], Mapping[str, Any]
]

# Keyword arguments of StructuredOutputs for an answer that reasons and then has a form, from the
# keyword arguments of that form and the rendered prompt.
AfterReasoning = Callable[[Mapping[str, Any], str], Mapping[str, Any]]
