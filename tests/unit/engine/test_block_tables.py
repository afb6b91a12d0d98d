"""Updated block tables are those written from nothing, on the host and on a device with memory of
its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from freight.engine.block_tables import BlockTables

ROWS, WIDTH, GROUPS = 5, 7, 2
Table = tuple[tuple[int, ...], ...]  # of one sequence, by group

blocks = st.integers(1, 99)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    return tuple(tuple(draw(st.lists(blocks, min_size=1, max_size=WIDTH))) for _ in range(GROUPS))


@st.composite
def steps(draw: st.DrawFn) -> list[list[Table]]:
    """What happens to sequences between steps, in any order: the tables of each step."""
    now: list[Table] = []
    found = []
    for _ in range(draw(st.integers(1, 12))):
        for _ in range(draw(st.integers(0, 3))):
            row = draw(st.integers(0, ROWS - 1))
            match draw(st.sampled_from(["join", "leave", "grow", "swap", "preempt", "give back"])):
                case "join" if len(now) < ROWS:
                    now = [*now[:row], draw(tables()), *now[row:]]
                case "leave":
                    now = now[:row] + now[row + 1 :]
                case "grow" if row < len(now):
                    more = draw(st.lists(blocks, min_size=1, max_size=3))
                    now[row] = tuple((*table, *more)[:WIDTH] for table in now[row])
                case "swap":
                    now = [*now[row:], *now[:row]]
                case "preempt" if row < len(now):
                    now[row] = draw(tables())  # it comes back with other blocks
                case "give back" if row < len(now):
                    first = draw(st.integers(1, WIDTH))
                    now[row] = (now[row][0], (0,) * len(now[row][1][:first]) + now[row][1][first:])
        found.append(list(now))
    return found


def from_nothing(step: Sequence[Table], group: int) -> list[list[int]]:
    return [[*one[group], *[0] * (WIDTH - len(one[group]))] for one in step]


def check(found: BlockTables, step: Sequence[Table]) -> None:
    for group in range(GROUPS):
        expected = from_nothing(step, group)
        assert found.on_device[group][: len(step)].tolist() == expected
        assert found.on_host[group][: len(step)].tolist() == expected


@given(steps(), st.booleans())
def test_updated_tables_are_those_written_from_nothing(all_steps, apart):
    found = BlockTables(ROWS, (WIDTH,) * GROUPS, "cpu", apart)
    for step in all_steps:
        found.update(step)
        check(found, step)


@given(steps(), steps(), st.integers(0, ROWS), st.integers(0, GROUPS - 1))
def test_an_interrupted_update_does_no_harm(before, after, row, group):
    found = BlockTables(ROWS, (WIDTH,) * GROUPS, "cpu", apart=True)
    for step in before:
        found.update(step)
    bad: Table = tuple(
        (1, 2**40) if at == group else (1,) for at in range(GROUPS)
    )  # too large: raises half way
    broken = [*before[-1][:row], bad, *before[-1][row:]][:ROWS]
    if bad in broken:
        with pytest.raises(OverflowError):
            found.update(broken)
    for step in [before[-1], *after]:
        found.update(step)
        check(found, step)


def copied(monkeypatch: pytest.MonkeyPatch, found: BlockTables, step: Sequence[Table]) -> int:
    """The entries that an update copies to the device; single ones count as three, two for the
    place.
    """
    copies: list[int] = []
    original = Tensor.copy_

    def copy(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        copies.append(source.numel())
        return original(into, source, non_blocking)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "copy_", copy)
        found.update(step)
    for row, one in enumerate(step):
        assert found.on_device[0][row, : len(one[0])].tolist() == list(one[0])
    return sum(copies)


def test_only_what_is_new_is_copied(monkeypatch):
    found = BlockTables(16, (512,), "cpu", apart=True)
    step: list[Table] = [(tuple(range(600 * row, 600 * row + 200)),) for row in range(16)]
    assert copied(monkeypatch, found, step) == 16 * 512
    assert copied(monkeypatch, found, step) == 0
    step[3], step[9] = ((*step[3][0], 7),), ((*step[9][0], 8),)
    assert copied(monkeypatch, found, step) == 2 * 3
    joined = [*step[:15], (tuple(range(300)),)]
    assert copied(monkeypatch, found, joined) == 512  # its row
    assert copied(monkeypatch, found, joined[:12]) == 0  # the last ones left
    assert copied(monkeypatch, found, joined[:12]) == 0
    left = joined[:10] + joined[11:12]
    assert copied(monkeypatch, found, left) == 512  # the row that moved up


def test_tables_begin_at_multiples_of_16_bytes():
    for table in BlockTables(3, (5, 7, 5), "cpu").on_device:
        assert table.data_ptr() % 16 == torch.zeros(4).data_ptr() % 16 == 0
