"""Covering arrays: a few rows of a cross product in which every pair of values occurs (Cohen et al.
1997, AETG).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

Row = tuple[Any, ...]


def pairs_of(row: Row) -> set[tuple[int, Any, int, Any]]:
    """Every two values of the row, with their places."""
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(row), 2)}


def covering(*axes: Sequence[Any]) -> list[Row]:
    """Rows of the product of `axes`, whose values are hashable, with every pair of values of two
    axes in one of them.

    Greedy, and always the same: the next row is the first of those with the most pairs that no row
    has yet.
    """
    rows = list(itertools.product(*axes))
    pairs = {row: pairs_of(row) for row in rows}
    missing = set().union(*pairs.values())
    found: list[Row] = []
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        found.append(best)
        missing -= pairs[best]
    return found


def covered(*axes: Sequence[Any]) -> list[Any]:
    """The whole product for pytest.mark.parametrize: what is not of the covering array is `slow`."""
    chosen = set(covering(*axes))
    return [
        pytest.param(*row, marks=() if row in chosen else pytest.mark.slow)
        for row in itertools.product(*axes)
    ]
