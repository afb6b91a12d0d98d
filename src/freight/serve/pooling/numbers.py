"""The numbers of a vector in an answer, as JSON and in base64."""

from __future__ import annotations

import json
import sys
from array import array
from base64 import b64encode
from collections.abc import Iterator

_PIECE = 1 << 12  # numbers that are written in one call


class Numbers:
    """A vector as a list of JSON. It is written in pieces (`slices.Sliced`).

    Each number has the 9 digits from which float32 is read back exactly: half of what a double has.
    """

    def __init__(self, values: array[float]) -> None:
        """values: float32 [size], finite"""
        self._values = values

    def __iter__(self) -> Iterator[float]:
        return map(short, self._values)

    def json_slices(self) -> Iterator[str]:
        before = "["
        for begin in range(0, len(self._values), _PIECE):
            piece = list(map(short, self._values[begin : begin + _PIECE]))
            yield before + json.dumps(piece, separators=(",", ":"))[1:-1]
            before = ","
        yield "]" if self._values else "[]"


def short(value: float) -> float:
    """Return the double with the fewest digits that is this float32: the nearest of 9 digits."""
    return float(f"{value:.9g}")


def as_base64(values: array[float]) -> str:
    """Return float32 in little-endian order, in base64."""
    if sys.byteorder == "big":
        values = array("f", values)
        values.byteswap()
    return b64encode(values.tobytes()).decode("ascii")
