"""Covering arrays: a few rows of a cross product in which every pair of values occurs (Cohen et al.
1997, AETG).

`make test` runs the covering array, `make test-all` the full product. FREIGHT_TEST_TENTH=0 to 9 adds
that tenth of the rest, which `.ci/run` does in rotation.
"""

from __future__ import annotations

import heapq
import itertools
import os
import zlib
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import pytest

TENTH = os.environ.get("FREIGHT_TEST_TENTH")


def choose(rows: Sequence[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """Return the places of rows that together have every pair of values that any row has; with a
    `strength` of 1, every value.

    Greedy and deterministic: the next row is the one with the most pairs that no row has yet, the
    first of several. `rows` has what stands for the value on each axis.
    """
    pairs = [
        {*enumerate(row), *itertools.combinations(enumerate(row), strength)} if row else {()}
        for row in rows
    ]
    missing = set().union(*pairs)
    # a row never has more missing pairs than when it was last counted: only the first is counted anew
    counted = [(-len(had), place) for place, had in enumerate(pairs)]
    heapq.heapify(counted)
    found = []
    while missing:
        _, place = counted[0]
        now = (-len(pairs[place] & missing), place)
        if now == heapq.heapreplace(counted, now):
            found.append(place)
            missing -= pairs[place]
    return found


def covered(*axes: Collection[Any]) -> list[Any]:
    """Return the full product for pytest.mark.parametrize: what is not of the covering array is
    `slow`.
    """
    values = [list(axis) for axis in axes]
    places = list(itertools.product(*(range(len(axis)) for axis in values)))
    chosen = {places[one] for one in choose(places)}
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(values, row, strict=True)),
            marks=() if row in chosen or in_rotation(str(row)) else pytest.mark.slow,
        )
        for row in places
    ]


def leave_out(case: pytest.Item) -> None:
    """Mark a case outside the covering array as `slow`, unless FREIGHT_TEST_TENTH has it."""
    if not in_rotation(case.nodeid):
        case.add_marker(pytest.mark.slow)


def in_rotation(name: str) -> bool:
    """Return whether a case outside the covering array runs because of FREIGHT_TEST_TENTH."""
    return TENTH is not None and zlib.crc32(name.encode()) % 10 == int(TENTH) % 10
