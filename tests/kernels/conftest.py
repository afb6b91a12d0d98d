"""A test of every build runs as a covering array of its other values, on the best build that runs
here and on the reference, where that is one of its kernels. A quarter of that runs on the other
builds in turn. All else is `slow`: `make test-all` has it, and FREIGHT_TEST_TENTH a tenth of it
(tests/covering.py)."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest
import torch
from tests.covering import choose, leave_out

from freight.kernels.cpu import library

Cases = dict[tuple[str, ...], dict[str, pytest.Item]]  # by other values, then by build
SHARE = 4  # of the cases of the best build, those that another build has too


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Tests may set the number of threads: it is what it was behind each."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    functions: dict[str, Cases] = {}
    builds = library.runnable()
    for item in items:
        callspec = getattr(item, "callspec", None)
        params = {} if callspec is None else callspec.params
        named = [
            name
            for name, value in params.items()
            if isinstance(value, str) and value in (*builds, "reference")
        ]
        if len(named) == 1:
            row = values_of(
                item, {name: value for name, value in params.items() if name != named[0]}
            )
            cases = functions.setdefault(item.nodeid.partition("[")[0], defaultdict(dict))
            cases[row][params[named[0]]] = item
    for name, cases in functions.items():
        mark_slow(zlib.crc32(name.encode()), cases, builds)


def values_of(item: pytest.Item, params: dict[str, object]) -> tuple[str, ...]:
    """Return what stands for the values of each axis. Arguments that one mark gives together are
    one axis: a format with its scales.
    """
    left, row = dict(params), []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.split(",") if isinstance(names, str) else names
        together = [repr(left.pop(name.strip())) for name in names if name.strip() in left]
        if together:
            row.append(", ".join(together))
    return (*row, *map(repr, left.values()))


def mark_slow(offset: int, cases: Cases, builds: Sequence[str]) -> None:
    """Mark as `slow` what is not of the covering array of one function. `offset` says with which
    build and which case the turns begin, so that functions of few cases do not all begin alike.
    """
    rows = list(cases)
    chosen = sorted(choose(rows))
    wanted = {(place, kernels) for place in chosen for kernels in (*builds[:1], "reference")}
    if others := builds[1:]:
        of_others = [place for place in chosen if (place + offset) % SHARE == 0]
        for turn, place in enumerate(of_others, offset):
            wanted.add((place, others[turn % len(others)]))
    for place, row in enumerate(rows):
        for build, item in cases[row].items():
            if (place, build) not in wanted:
                leave_out(item)
