"""What an assistant's text is made of: content, reasoning, tool calls. Parsers of a model's markup make them."""

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
    """A part of a message. `text` is what is new of content or reasoning, or all arguments of one call, as JSON."""

    kind: PieceKind
    text: str
    name: str = ""  # of the function that is called


class MessageParser(Protocol):
    """Reads one completion of an assistant as it grows."""

    def feed(self, text: str) -> list[Piece]:
        """Take more text, special tokens included; returns what is certain by now."""

    def finish(self, complete: bool) -> list[Piece]:
        """No more text comes. `complete`: the model ended by itself. A call that is not whole comes as content."""


# From the rendered prompt (None: not known) and the request's tools (JSON schemas, as OpenAI's API has them).
ParserOf = Callable[[str | None, Sequence[Mapping[str, Any]]], MessageParser]


class ForcedCall(Protocol):
    """Makes the keyword arguments of StructuredOutputs that force an answer to be a call of one of `names`.

    tools as OpenAI's API has them. parallel: several calls are allowed. in_reasoning: the prompt ends within reasoning,
    so that the answer begins with the rest of it. Raises ApiError 400 where this model's calls cannot be forced.
    """

    def __call__(
        self,
        tools: Sequence[Mapping[str, Any]],
        names: Sequence[str],
        parallel: bool,
        *,
        in_reasoning: bool = False,
    ) -> Mapping[str, object]: ...
