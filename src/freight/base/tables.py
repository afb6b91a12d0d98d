"""Tables of text: Markdown that is also read as it is, and cells padded to columns."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], sides: str) -> list[list[str]]:
    """Pad the cells of each column to one width; `sides` has l or r for each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.ljust if side == "l" else str.rjust for side in sides]
    padded = []
    for row in rows:
        cells = zip(pads, row, widths, strict=True)
        padded.append([pad(cell, width) for pad, cell, width in cells])
    return padded


def markdown(rows: Sequence[Sequence[str]], num_left: int) -> str:
    """Write a Markdown table, never wrapped.

    The first row is the heading. The first `num_left` columns align left, the others right.
    """
    num_right = len(rows[0]) - num_left
    head, *body = aligned(rows, "l" * num_left + "r" * num_right)
    rule = ["-" * len(cell) for cell in head[:num_left]]
    rule += ["-" * (len(cell) - 1) + ":" for cell in head[num_left:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))
