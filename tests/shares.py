"""A share of similar cases for `make test`; `make test-all` has them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def examples(count: int) -> int:
    """For `settings(max_examples=…)`: `count` where all tests run, else the share of them that
    `make test` tries.
    """
    assert settings.default is not None
    return max(min(count, 10), count * settings.default.max_examples // 100)
