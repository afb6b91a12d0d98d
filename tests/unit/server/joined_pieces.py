"""The pieces of an answer as tests compare them: those that follow each other and are of one kind,
joined.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from freight.serve.answers.pieces import Piece, PieceKind


def joined(parser: Any, chunks: Iterable[str], complete: bool) -> list[Piece]:
    """What `parser` makes of an answer that comes in `chunks`."""
    found: list[Piece] = []
    for piece in [piece for chunk in chunks for piece in parser.feed(chunk)] + parser.finish(
        complete
    ):
        if found and found[-1].kind == piece.kind != PieceKind.TOOL_CALL:
            piece = Piece(piece.kind, found.pop().text + piece.text)
        found.append(piece)
    return found


def content(text: str) -> Piece:
    return Piece(PieceKind.CONTENT, text)


def reasoning(text: str) -> Piece:
    return Piece(PieceKind.REASONING, text)


def call(name: str, arguments: str) -> Piece:
    return Piece(PieceKind.TOOL_CALL, arguments, name)
