"""Covering arrays: a few rows of a cross product in which every pair of values occurs (Cohen et al.
1997, AETG).

`make test` runs the covering array, or a share of cases that are alike, `make test-all` the full
product. FREIGHT_TEST_TENTH=0 to 9 adds that tenth of the rest, which `.ci/run` does in rotation.
"""

from __future__ import annotations

import heapq
import itertools
import os
import zlib
from collections.abc import Collection, Hashable, Mapping, Sequence
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


def share(cases: Mapping[str, Sequence[Hashable]], count: int) -> list[str]:
    """Return the names of one in `count` cases, in the order of their names' checksums. Of an axis that
    has no more values than that, every value is among them, if it takes more cases.
    """
    number = -(-len(cases) // count)
    names = sorted(cases, key=lambda name: zlib.crc32(name.encode()))
    values = [set(axis) for axis in zip(*cases.values(), strict=True)]
    short = [
        [value for value, axis in zip(cases[name], values, strict=True) if len(axis) <= number]
        for name in names
    ]
    chosen = [names[place] for place in choose(short, 1)]
    others = [name for name in names if name not in chosen]
    return chosen + others[: max(0, number - len(chosen))]


def leave_out(case: pytest.Item) -> None:
    """Mark a case outside the covering array as `slow`, unless FREIGHT_TEST_TENTH has it."""
    if not in_rotation(case.nodeid):
        case.add_marker(pytest.mark.slow)


def in_rotation(name: str) -> bool:
    """Return whether a case outside the covering array runs because of FREIGHT_TEST_TENTH."""
    return TENTH is not None and zlib.crc32(name.encode()) % 10 == int(TENTH) % 10
