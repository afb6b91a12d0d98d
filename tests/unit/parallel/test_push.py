"""The transport that pushes columns: how ranks agree on it, and how they leave a step.

Ranks are threads, and their buffers tensors of one process. A function takes the place of the kernel,
which is tested in tests/kernels/triton/.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from freight.errors import KernelError, RankError
from freight.parallel.distributed import Distributed
from freight.parallel.peers import FAILED, FLAGS, LEFT, STATUS, TURN, WORD, Layout, Peers
from freight.parallel.push import _TRIED, Pushed

CPU = torch.device("cpu")
SLOT_BYTES = 3 * 64 * 512


class Group:
    """`Distributed` as far as it is used, among threads."""

    described = None

    def __init__(self, rank: int, shared: dict[str, Any]) -> None:
        self.rank, self.shared, self.gathers, self.times = rank, shared, 0, 0

    def meet(self) -> None:
        pass

    def gather(self, part: Tensor) -> Tensor:
        self.gathers += 1
        return part

    def lost(self) -> str:
        return self.shared.get("lost", "")

    def lose(self, rank: int, is_silent: bool = False) -> None:
        self.shared["lost"] = f"rank {rank} has ended"

    def failed(self) -> int | None:
        return self.shared.get(f"failed {self.times}")

    def fail(self) -> None:
        self.shared.setdefault(f"failed {self.times}", self.rank)

    def restart(self, times: int) -> None:
        self.times = times

    def close(self) -> None:
        pass


class Memory:
    """The buffers of all ranks of a test."""

    def __init__(self, size: int) -> None:
        self.layout = Layout(size, SLOT_BYTES)
        self.owns = [torch.zeros(self.layout.total, dtype=torch.uint8) for _ in range(size)]
        self.closed = 0

    def open(self, rank: int, layout: Layout, device: torch.device, exchange: Any) -> Peers:
        assert exchange(b"%d" % rank) == [b"%d" % other for other in range(layout.size)]
        page = torch.zeros(2, dtype=torch.int64)
        return Peers(self.owns[rank], torch.zeros(0), page, self._close)

    def _close(self) -> None:
        self.closed += 1

    def push(self, part: Tensor, peers: Peers, layout: Layout, rank: int) -> Tensor:
        """The kernel's protocol, with one program."""
        words = peers.own[: WORD * FLAGS].view(torch.int64)
        out = torch.empty(len(part), layout.size, part.nbytes // len(part), dtype=torch.uint8)
        if words[LEFT]:
            return out
        turn = int(words[TURN]) + 1
        place = layout.slots + turn % 2 * layout.slot_stride
        for own in self.owns:
            own[place : place + out.nbytes].view(out.shape)[:, rank] = part.view(torch.uint8)
            _flags(own, layout)[rank] = turn
        while bool((_flags(peers.own, layout) < turn).any()):
            if peers.page[FAILED]:
                words[LEFT] = peers.page[STATUS] = peers.page[FAILED]
                return out
            time.sleep(0.001)
        out.copy_(peers.own[place : place + out.nbytes].view(out.shape))
        words[TURN] = turn
        return out.view(len(part), -1).view(part.dtype)


def _flags(own: Tensor, layout: Layout) -> Tensor:
    return own[WORD * FLAGS : WORD * (FLAGS + layout.size)].view(torch.int64)


def in_threads(size: int, call: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(call, range(size)))


def met(
    size: int, timeout: float = 10, **changed: Callable[..., Any]
) -> tuple[list[Pushed], Memory]:
    """Ranks that have met. changed: another `push` or `open_peers` for rank 1, which takes the test's
    Memory first.
    """
    store, memory, shared = HashStore(), Memory(size), {}
    ranks = []
    for rank in range(size):
        given: dict[str, Any] = {"push": memory.push, "open_peers": memory.open}
        if rank == 1:
            given |= {name: partial(call, memory) for name, call in changed.items()}
        group: Any = Group(rank, shared)
        ranks.append(Pushed(store, rank, size, CPU, SLOT_BYTES, timeout, group=group, **given))
    in_threads(size, lambda rank: ranks[rank].meet())
    return ranks, memory


def part_of(rank: int) -> Tensor:
    return torch.arange(12, dtype=torch.float32).view(3, 4) + 100 * rank


def gathers(rank: Pushed) -> int:
    return rank._group.gathers


@pytest.mark.parametrize("size", [2, 3])
def test_all_push(size: int) -> None:
    ranks, memory = met(size)
    assert [rank.refused for rank in ranks] == [""] * size
    expected = torch.cat([part_of(rank) for rank in range(size)], dim=1)
    for _ in range(3):
        found = in_threads(size, lambda rank: ranks[rank].gather(part_of(rank)))
        assert all(torch.equal(out, expected) for out in found)
    assert [gathers(rank) for rank in ranks] == [0] * size
    for rank in ranks:
        rank.close()
    assert memory.closed == size


def test_what_a_slot_does_not_hold_is_gathered_by_the_group() -> None:
    ranks, _ = met(2)
    part = torch.zeros(1, SLOT_BYTES // 2 + 1, dtype=torch.uint8)
    assert ranks[0].gather(part) is part
    assert gathers(ranks[0]) == 1
    in_threads(2, lambda rank: ranks[rank].gather(part[:, 1:]))
    assert gathers(ranks[0]) == 1


def refuse(memory: Memory, rank: int, layout: Layout, device: torch.device, exchange: Any) -> Peers:
    memory.open(rank, layout, device, exchange)
    raise RankError("GPU 1 does not reach the memory of GPU 0")


def test_a_rank_that_cannot_open_a_buffer_makes_all_gather_by_the_group() -> None:
    ranks, memory = met(3, open_peers=refuse)
    assert {rank.refused for rank in ranks} == {"rank 1: GPU 1 does not reach the memory of GPU 0"}
    assert memory.closed == 2
    part = part_of(0)
    assert ranks[0].gather(part) is part


def change_a_byte_of_the_last(
    memory: Memory, part: Tensor, peers: Peers, layout: Layout, rank: int
) -> Tensor:
    out = memory.push(part, peers, layout, rank)
    turn = peers.own[: WORD * FLAGS].view(torch.int64)[TURN]
    if turn == len(_TRIED):
        out[-1, -1] += 1
    return out


def test_wrong_bytes_on_one_rank_make_all_gather_by_the_group() -> None:
    ranks, memory = met(2, push=change_a_byte_of_the_last)
    reason = "rank 1: a gather of 1 rows of 256 bytes had wrong bytes"
    assert [rank.refused for rank in ranks] == [reason] * 2
    assert memory.closed == 2


def test_a_rank_that_leaves_a_step_ends_the_waits_of_others_and_all_begin_anew() -> None:
    ranks, memory = met(2)

    def step(rank: int) -> None:
        if rank == 1:
            ranks[1].fail()
        else:
            ranks[0].gather(part_of(0))

    in_threads(2, step)
    with pytest.raises(KernelError, match="has left the step"):
        ranks[0].check()
    with pytest.raises(KernelError):
        ranks[0].gather(part_of(0))
    assert ranks[0].failed() == 1
    for rank in ranks:
        rank.restart(1)
    found = in_threads(2, lambda rank: ranks[rank].gather(part_of(rank)))
    assert torch.equal(found[0], torch.cat([part_of(0), part_of(1)], dim=1))
    assert torch.equal(found[0], found[1])
    words = memory.owns[0][: WORD * FLAGS].view(torch.int64)
    assert words[TURN] == (1 << 40) + 1
    for rank in ranks:
        rank.check()


def test_ranks_that_push_need_not_meet_to_leave_a_step() -> None:
    """Their group has not met since they began anew: the rank that leaves waits for nobody."""
    store, memory = HashStore(), Memory(2)
    given: dict[str, Any] = {"push": memory.push, "open_peers": memory.open}
    ranks = []
    for rank in range(2):
        group = Distributed(store, rank, 2, 20.0, "127.0.0.1")
        ranks.append(Pushed(store, rank, 2, CPU, SLOT_BYTES, 20.0, group=group, **given))
    in_threads(2, lambda rank: ranks[rank].meet())
    expected = torch.cat([part_of(0), part_of(1)], dim=1)
    long = torch.zeros(1, SLOT_BYTES // 2 + 1, dtype=torch.uint8)
    began = time.monotonic()
    for times in (1, 2, 3):
        for one in ranks:
            one.restart(times)
        found = in_threads(2, lambda rank: ranks[rank].gather(part_of(rank)))
        assert all(torch.equal(out, expected) for out in found)
        if times == 2:  # some gathers are the group's
            in_threads(2, lambda rank: ranks[rank].gather(long))
        ranks[1].fail()
        ranks[0].gather(part_of(0))  # returns, as its wait is ended
        with pytest.raises(KernelError):
            ranks[0].finish()
        ranks[0].fail()
    assert time.monotonic() - began < 5
    assert [one.grouped for one in ranks] == [1, 1]
    for one in ranks:
        one.close()


def test_a_lost_rank_ends_waits() -> None:
    ranks, _ = met(2)
    threading.Timer(0.1, lambda: ranks[0].lose(1)).start()
    ranks[0].gather(part_of(0))
    with pytest.raises(RankError, match="rank 1 has ended"):
        ranks[0].check()
    with pytest.raises(RankError, match="rank 1 has ended"):
        ranks[0].gather(part_of(0))


def test_results_that_do_not_come_end_waits() -> None:
    class Never:
        def query(self) -> bool:
            return False

    ranks, _ = met(2, timeout=0.5)
    never: Any = Never()
    with pytest.raises(KernelError, match=r"waited 0\.5 seconds for others"):
        ranks[0].wait(never)
    ranks[0].gather(part_of(0))  # ends, as the host's page says so
    with pytest.raises(KernelError):
        ranks[0].check()
