"""Pieces of an assistant's text: content, reasoning, tool calls. Parsers of a model's markup make
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from freight.base.fields import JsonObject
from freight.outputs import CompletionDelta, FinishReason


class PieceKind(StrEnum):
    CONTENT = "content"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"


class Piece(NamedTuple):
    """A part of a message. `text`: new content or reasoning, or all arguments of a call (JSON)."""

    kind: PieceKind
    text: str
    name: str = ""  # of the called function


class MessageParser(Protocol):
    """A parser of one completion of an assistant, in chunks."""

    def feed(self, text: str) -> list[Piece]:
        """Take more text, special tokens included; returns the pieces that are certain by now."""

    def finish(self, complete: bool) -> list[Piece]:
        """End the text, once; returns the last pieces. complete: the model ended by itself. An
        incomplete call is content.
        """


class MessagePieces:
    """The pieces of one completion that its answer shows.

    called  whether the answer ended in tool calls: the model stopped by itself, and every call is
            complete
    """

    def __init__(self, parser: MessageParser | None, has_tools: bool, parallel: bool) -> None:
        """parser: None where the model has no known markup. has_tools: otherwise a call is content.
        parallel: whether calls after the first are shown.
        """
        self.called = False
        self._parser = parser
        self._has_tools = has_tools
        self._parallel = parallel
        self._has_call = False

    def of(self, output: CompletionDelta) -> list[Piece]:
        """Return the pieces of a delta. Only those of calls may be without text."""
        if self._parser is None:
            return [Piece(PieceKind.CONTENT, output.text)] if output.text else []
        pieces = self._parser.feed(output.text)
        if output.finish_reason is not None:
            stopped = output.finish_reason is FinishReason.STOP
            ending = self._parser.finish(stopped)
            # text that could have become a call
            cut = any(
                piece.kind is PieceKind.CONTENT and not piece.text.isspace() for piece in ending
            )
            pieces = self._visible(pieces + ending)
            self.called = stopped and self._has_call and not cut
            return pieces
        return self._visible(pieces)

    def _visible(self, pieces: Sequence[Piece]) -> list[Piece]:
        visible = []
        for piece in pieces:
            if piece.kind is not PieceKind.TOOL_CALL:
                if piece.text:
                    visible.append(piece)
            elif not self._has_tools:
                text = f'{{"name": {json.dumps(piece.name)}, "arguments": {piece.text}}}'
                visible.append(Piece(PieceKind.CONTENT, text))
            elif self._parallel or not self._has_call:
                self._has_call = True
                visible.append(piece)
        return visible


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
