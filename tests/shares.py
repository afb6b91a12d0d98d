"""A share of similar cases for `make test`; `make test-all` has them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import settings


def one_in(count: int, cases: Iterable[Sequence[Any]]) -> list[Any]:
    """The cases, of which every `count`-th, from the first on, is tested every time and the others
    are `slow`.
    """
    return [
        pytest.param(*case, marks=[] if index % count == 0 else [pytest.mark.slow])
        for index, case in enumerate(cases)
    ]


def in_pairs(*axes: Sequence[Any]) -> list[Any]:
    """The product of the axes, of which those are tested every time that have each value of an axis
    beside each of every other axis, and the others are `slow`."""
    cases = list(product(*map(range, map(len, axes))))
    missing = {pair for case in cases for pair in combinations(enumerate(case), 2)}
    chosen = set()
    while missing:
        best = max(cases, key=lambda case: len(missing & set(combinations(enumerate(case), 2))))
        missing -= set(combinations(enumerate(best), 2))
        chosen.add(best)
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(axes, case, strict=True)),
            marks=[] if case in chosen else [pytest.mark.slow],
        )
        for case in cases
    ]


def examples(count: int) -> int:
    """For `settings(max_examples=…)`: `count` where all tests run, else the share of them that
    `make test` tries.
    """
    assert settings.default is not None
    return max(min(count, 10), count * settings.default.max_examples // 100)
