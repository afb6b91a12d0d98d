"""The gather between GPUs, rank by rank in one process: all store, then all wait and copy.

Where there is no GPU that is Triton's interpreter, whose waits could not end otherwise. What the
order of memory operations does to ranks that run at the same time: test_push_model.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from freight.kernels.triton import push
from freight.kernels.triton.push import gathered
from freight.parallel.peers import FAILED, LEAVING, LEFT, STATUS, TURN, WORD, Layout, Peers

DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32)
SHAPES = ((1, 1024), (3, 5), (7, 257), (33, 16), (1, 1), (5, 4099))


def buffers(size: int, device: str, slot_bytes: int = 1 << 20) -> tuple[Layout, list[Peers]]:
    """The buffers of `size` ranks, in the memory of one device. Slots begin as bytes of 0xEE."""
    layout = Layout(size, slot_bytes)
    owns = [torch.zeros(layout.total, dtype=torch.uint8, device=device) for _ in range(size)]
    for own in owns:
        own[layout.slots :] = 0xEE
    ranks = []
    for own in owns:
        page = torch.zeros(2, dtype=torch.int64, pin_memory=device == "cuda")
        addresses = [*(other.data_ptr() for other in owns), page.data_ptr()]
        ranks.append(Peers(own, torch.tensor(addresses, device=device), page, lambda: None))
    return layout, ranks


def words(peers: Peers) -> Tensor:
    return peers.own[: WORD * 16].cpu().view(torch.int64)


def part_of(rank: int, turn: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    width = columns * dtype.itemsize
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randint(256, (rows, width), generator=generator, dtype=torch.uint8).view(dtype)


def same_bytes(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.cpu().view(torch.uint8), y.cpu().view(torch.uint8))


def send(part: Tensor, ranks: list[Peers], layout: Layout, rank: int) -> None:
    push.push(part, ranks[rank], layout, rank, receives=False)


def receive(part: Tensor, ranks: list[Peers], layout: Layout, rank: int) -> Tensor:
    return push.push(part, ranks[rank], layout, rank, sends=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_has_the_columns_of_all(size: int, dtype: torch.dtype, device: str) -> None:
    """In turn after turn, in both slots, by whatever widths of words the sizes allow."""
    layout, ranks = buffers(size, device)
    for turn, (rows, columns) in enumerate(SHAPES):
        parts = [part_of(r, turn, rows, columns, dtype).to(device) for r in range(size)]
        for rank in range(size):
            send(parts[rank], ranks, layout, rank)
        expected = torch.cat([part.cpu().view(torch.uint8) for part in parts], dim=1)
        assert same_bytes(gathered(parts), expected)
        for rank in reversed(range(size)):
            out = receive(parts[rank], ranks, layout, rank)
            assert out.dtype == dtype
            assert same_bytes(out, expected)
            assert words(ranks[rank])[[TURN, LEAVING, LEFT]].tolist() == [turn + 1, 0, 0]


def test_a_rank_may_be_one_turn_ahead(device: str) -> None:
    """Rank 0 stores the columns of the next turn before the others have read this one's."""
    layout, ranks = buffers(2, device)
    parts = [
        [part_of(r, turn, 3, 40, torch.bfloat16).to(device) for r in (0, 1)] for turn in range(6)
    ]
    for rank in (0, 1):
        send(parts[0][rank], ranks, layout, rank)
    for turn in range(5):
        fast = turn % 2
        slow = 1 - fast
        first = receive(parts[turn][fast], ranks, layout, fast)
        send(parts[turn + 1][fast], ranks, layout, fast)
        second = receive(parts[turn][slow], ranks, layout, slow)
        send(parts[turn + 1][slow], ranks, layout, slow)
        assert same_bytes(first, gathered(parts[turn]))
        assert same_bytes(second, gathered(parts[turn]))


def test_many_programs_with_several_tiles_each(device: str, monkeypatch) -> None:
    """A part of more tiles than programs; the last program has fewer than the others."""
    monkeypatch.setattr(push, "TILES", (8, 8))
    monkeypatch.setattr(push, "PROGRAMS", 8)
    layout, ranks = buffers(2, device)
    parts = [part_of(r, 0, 19, 7, torch.float32).to(device) for r in (0, 1)]
    for rank in (0, 1):
        send(parts[rank], ranks, layout, rank)
    for rank in (0, 1):
        assert same_bytes(receive(parts[rank], ranks, layout, rank), gathered(parts))
    assert words(ranks[0])[[TURN, LEAVING]].tolist() == [1, 0]


def test_parts_that_are_views(device: str) -> None:
    """A part that is not contiguous, and one that begins at an odd byte."""
    layout, ranks = buffers(2, device)
    wide = part_of(0, 0, 4, 24, torch.uint8).to(device)
    odd = torch.arange(33, dtype=torch.uint8, device=device)[1:].view(4, 8)
    for rank, part in ((0, wide[:, 8:16]), (1, odd)):
        send(part, ranks, layout, rank)
    expected = gathered([wide[:, 8:16].contiguous(), odd])
    assert same_bytes(receive(wide[:, 8:16], ranks, layout, 0), expected)
    assert same_bytes(receive(odd, ranks, layout, 1), expected)


def test_no_rows(device: str) -> None:
    layout, ranks = buffers(2, device)
    part = torch.empty(0, 8, device=device)
    assert push.push(part, ranks[0], layout, 0).shape == (0, 16)
    assert words(ranks[0])[TURN] == 0


def test_a_rank_that_leaves_ends_the_wait_and_later_turns_store_nothing(device: str) -> None:
    layout, ranks = buffers(2, device)
    parts = [part_of(r, 0, 2, 16, torch.uint8).to(device) for r in (0, 1)]
    ranks[0].page[FAILED] = 7
    push.push(parts[0], ranks[0], layout, 0)  # rank 1 never comes
    assert ranks[0].page[STATUS] == 7
    assert words(ranks[0])[LEFT] == 7
    before = ranks[1].own.clone()
    push.push(parts[1], ranks[0], layout, 0)
    assert torch.equal(ranks[1].own, before)


def test_columns_that_are_there_are_read_although_a_rank_leaves(device: str) -> None:
    """Another rank may have left the step after all had stored this turn's columns."""
    layout, ranks = buffers(2, device)
    parts = [part_of(r, 0, 2, 16, torch.uint8).to(device) for r in (0, 1)]
    for rank in (0, 1):
        send(parts[rank], ranks, layout, rank)
    ranks[0].page[FAILED] = 1
    assert same_bytes(receive(parts[0], ranks, layout, 0), gathered(parts))
    assert ranks[0].page[STATUS] == 0
