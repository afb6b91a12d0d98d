"""Ranks as forked processes: what they gather, over shared memory and gloo, and what they see of a
rank that ends, hangs or leaves a step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from tests.forked_ranks import KilledError, in_ranks, over_memory
from tests.refusals import refuses
from torch import Tensor
from torch.distributed import HashStore

from freight.errors import ConfigError, KernelError, RankError
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.cpu.ranks import gather
from freight.kernels.cpu.recording import Arena, record
from freight.kernels.reference_set import ReferenceKernels
from freight.parallel.distributed import Distributed, host_store, reach_store
from freight.parallel.messages import Kind, receive, send
from freight.parallel.ranks import ALONE, Ranks
from freight.parallel.shared import SharedFiles, SharedMemory, passed_files

LIBRARY = library.load()
PARTS = [
    (rows, columns, dtype)
    for rows, columns in ((1, 1024), (3, 5), (100, 257), (1000, 16))
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn)
]


def part_of(rank: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + rows)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def bytes_of(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("size", [2, 3])
def test_both_transports_put_the_parts_side_by_side(size: int) -> None:
    """A part of 100 x 257 float32 takes several turns of 16 KiB."""
    expected = [
        bytes_of(torch.cat([part_of(r, *kind).view(torch.uint8) for r in range(size)], dim=1))
        for kind in PARTS
    ]
    port = free_port()

    def gathered(memory: SharedMemory, kernels: CpuKernels) -> list[bytes]:
        parts = [part_of(memory.rank, *kind) for kind in PARTS]
        group = group_of(memory.rank, size, port)
        of_group = Ranks(memory.rank, size, group)
        sets = (kernels, ReferenceKernels(ranks=of_group), CpuKernels(LIBRARY, ranks=of_group))
        found = [bytes_of(one.gather(part)) for one in sets for part in parts]
        group.close()
        return found

    assert over_memory(size, gathered) == [expected * 3] * size


def test_a_row_may_be_longer_than_a_slot() -> None:
    kinds = [(3, 1000, torch.float32), (2, 1, torch.float32), (2, 257, torch.bfloat16)]
    expected = [
        bytes_of(torch.cat([part_of(r, *kind).view(torch.uint8) for r in range(2)], dim=1))
        for kind in kinds
    ]

    def gathered(memory: SharedMemory, kernels: CpuKernels) -> list[bytes]:
        return [bytes_of(kernels.gather(part_of(memory.rank, *kind))) for kind in kinds]

    assert over_memory(2, gathered, capacity=512) == [expected] * 2


@pytest.mark.parametrize("length", [100, 1 << 20])
def test_an_interrupt_leaves_no_message_half_sent(length: int) -> None:
    """The other end reads nothing until the interrupt, so a long message is under way then."""
    ours, theirs = socket.socketpair()
    read: list[tuple[Kind, bytes]] = []

    def read_late() -> None:
        time.sleep(0.1)
        read.extend(receive(theirs) for _ in range(2))

    def send_long() -> None:
        send(ours, Kind.RUN, bytes(length))
        time.sleep(5)

    reader = threading.Thread(target=read_late)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        reader.start()
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            send_long()
        send(ours, Kind.LOGITS, b"rows")
        reader.join()
    finally:
        signal.signal(signal.SIGALRM, before)
        ours.close()
        theirs.close()
    assert read == [(Kind.RUN, bytes(length)), (Kind.LOGITS, b"rows")]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_one_rank_gathers_nothing() -> None:
    x = torch.ones(2, 3)
    assert CpuKernels(LIBRARY).gather(x) is x
    assert ReferenceKernels().gather(x) is x
    assert ALONE.gather(x) is x


def test_a_recording_gathers_what_its_inputs_hold() -> None:
    def replayed(memory: SharedMemory, kernels: CpuKernels) -> list[list[float]]:
        x = torch.full((2, 4), float(memory.rank))

        def run(recording: library.Library) -> Tensor:
            return CpuKernels(recording, ranks=kernels.ranks).gather(x)

        recorded = record(LIBRARY, Arena(2), run)
        assert recorded.recording is not None, recorded.obstacle
        found = [recorded.output[0].tolist()]
        for step in range(3):
            x.fill_(10.0 * step + memory.rank)
            found.append(recorded.recording.replay()[1].tolist())
        return found

    expected = [[step] * 4 + [step + 1] * 4 for step in (0.0, 0.0, 10.0, 20.0)]
    assert over_memory(2, replayed) == [expected, expected]


def test_what_is_for_the_first_rank_alone_changes_nothing_else() -> None:
    def body(memory: SharedMemory, kernels: CpuKernels) -> list[list[float]]:
        found = []
        for step in range(40):
            x = torch.full((1, 1), step + 0.5 * memory.rank)
            first = step % 4 < 3
            out = kernels.gather(x, first=first)
            if not first or memory.rank == 0:
                found.append(out[0].tolist())
        return found

    every = [[float(step), step + 0.5] for step in range(40)]
    assert over_memory(2, body) == [every, every[3::4]]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def group_of(rank: int, size: int, port: int, timeout: float = 30.0) -> Distributed:
    """A rank of a group over gloo, whose store rank 0 has at `port`."""
    if rank == 0:
        store = host_store(socket.create_server(("127.0.0.1", port)))
    else:
        deadline = time.monotonic() + 30
        while True:
            try:
                store = reach_store("127.0.0.1", port)
                break
            except RankError:
                assert time.monotonic() < deadline
    # the timeout counts from here: a rank that starts late on a busy machine is not a lost one
    store.set(f"started {rank}", "1")
    store.wait([f"started {other}" for other in range(size)])
    return Distributed(store, rank, size, timeout, "127.0.0.1")


def test_a_rank_that_is_killed_ends_the_gathers_of_others_within_a_second() -> None:
    def body(memory: SharedMemory, kernels: CpuKernels) -> tuple[float, str]:
        for _ in range(3):
            told = kernels.gather(torch.tensor([[time.monotonic()]], dtype=torch.float64))
        if memory.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RankError, match="another rank has ended"):
            kernels.gather(told)
        with pytest.raises(RankError):  # and from now on every gather
            kernels.gather(told)
        return time.monotonic() - float(told[0, 1]), memory.lost()

    first, killed, third = over_memory(3, body)
    assert isinstance(killed, KilledError)
    for seconds, lost in (first, third):
        assert lost == "rank 1 has ended"
        assert seconds < 1.0


def test_a_rank_that_ends_is_seen_over_gloo() -> None:
    port = free_port()

    def body(rank: int) -> float:
        group = group_of(rank, 3, port)
        kernels = CpuKernels(LIBRARY, ranks=Ranks(rank, 3, group))
        told = kernels.gather(torch.tensor([[time.monotonic()]], dtype=torch.float64))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with refuses(KernelError, "another rank", "left the step"):
            kernels.gather(told)
        group.fail()
        return time.monotonic() - float(told[0, 1])

    first, killed, third = in_ranks(3, body)
    assert isinstance(killed, KilledError)
    for seconds in (first, third):
        assert isinstance(seconds, float)
        assert seconds < 1.0


def test_a_rank_that_hangs_ends_the_gathers_of_a_group() -> None:
    port = free_port()

    def body(rank: int) -> str:
        group = group_of(rank, 2, port, timeout=3.0)
        group.meet()
        if rank == 1:
            time.sleep(6)
            return ""
        with pytest.raises(KernelError, match="does not answer") as raised:
            group.gather(torch.ones(1, 1))
        return str(raised.value)

    assert in_ranks(2, body)[0]


@pytest.mark.parametrize("before", [True, False])
def test_ranks_of_a_group_leave_a_step_and_begin_anew(before: bool) -> None:
    """Rank 2 leaves it before its first gather, or after one, and all know which it was."""
    port = free_port()

    def body(rank: int) -> tuple[int | None, list[float]]:
        group = group_of(rank, 3, port)
        kernels = CpuKernels(LIBRARY, ranks=Ranks(rank, 3, group))
        x = torch.full((1, 1), float(rank))
        if not before:
            kernels.gather(x)
        if rank == 2:
            group.fail()
        else:
            with refuses(KernelError, "another rank", "left the step"):
                kernels.gather(x)
            group.fail()
        failed = group.failed()
        group.restart(1)
        return failed, kernels.gather(x)[0].tolist()

    assert in_ranks(3, body) == [(2, [0.0, 1.0, 2.0])] * 3


def test_a_rank_that_leaves_before_all_have_come_waits_for_nobody() -> None:
    """Rank 2 never comes: those who wait to connect are told, and the one that left goes on."""
    port = free_port()

    def body(rank: int) -> float:
        group = group_of(rank, 3, port, timeout=20.0)
        began = time.monotonic()
        if rank == 0:
            time.sleep(0.2)
            group.fail()
        elif rank == 1:
            with refuses(KernelError, "another rank", "left the step"):
                group.meet()
            group.fail()
        seconds = time.monotonic() - began
        time.sleep(1)  # the store is rank 0's
        return seconds

    assert all(isinstance(seconds, float) and seconds < 2 for seconds in in_ranks(3, body))


def test_an_interrupt_between_coming_and_connecting_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All have come then, so the others connect, and the rank that leaves has to, too."""
    port = free_port()

    def body(rank: int) -> float:
        group = group_of(rank, 2, port, timeout=20.0)
        began = time.monotonic()
        if rank == 0:
            group.gather(torch.ones(1, 1))
            return time.monotonic() - began
        connect = group._connect
        with monkeypatch.context() as patch:
            patch.setattr(group, "_connect", interrupt)
            with pytest.raises(KeyboardInterrupt):
                group.meet()
        group._connect = connect  # type: ignore[method-assign]
        group.fail()
        return time.monotonic() - began

    first, second = in_ranks(2, body)
    assert isinstance(first, KernelError)
    assert isinstance(second, float)
    assert second < 5


def test_an_interrupt_in_a_gather_that_c_called_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Distributed(HashStore(), 0, 1, 5.0, "127.0.0.1")
    monkeypatch.setattr(group, "meet", interrupt)
    with pytest.raises(KernelError):
        gather(LIBRARY, group, torch.ones(1, 1))
    assert isinstance(group.take_interrupt(), KeyboardInterrupt)
    assert group.take_interrupt() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_gather_that_an_interrupt_kept_from_beginning_has_not_been_made() -> None:
    """A signal that comes while C computes is handled at the entry of the function that C calls.
    ctypes writes the exception to stderr, and returns to C.
    """
    group = Distributed(HashStore(), 0, 1, 5.0, "127.0.0.1")

    def at_entry(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "exchange":
            raise KeyboardInterrupt

    sys.setprofile(at_entry)
    try:
        with pytest.raises(KeyboardInterrupt, match="a signal interrupted a gather"):
            gather(LIBRARY, group, torch.ones(1, 1))
    finally:
        sys.setprofile(None)


def test_a_group_that_is_left_is_no_other_of_the_program() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        group = Distributed(HashStore(), 0, 1, 5.0, "127.0.0.1")
        group.meet()
        group.close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_rank_that_hangs_is_named() -> None:
    def body(memory: SharedMemory, kernels: CpuKernels) -> str:
        if memory.rank == 1:
            with contextlib.suppress(BrokenPipeError):
                time.sleep(1)
            return ""
        with pytest.raises(RankError):
            kernels.gather(torch.ones(1, 1))
        return memory.lost()

    assert over_memory(2, body, timeout=0.2)[0] == "rank 1 does not answer"


def test_a_rank_that_leaves_a_step_takes_the_others_with_it() -> None:
    """Then all begin again, in the same turn."""

    def body(memory: SharedMemory, kernels: CpuKernels) -> list[float]:
        x = torch.full((1, 1), float(memory.rank))
        kernels.gather(x)
        if memory.rank == 1:
            memory.fail()
            while memory.failed() is not None:
                time.sleep(0.001)
        else:
            with refuses(KernelError, "another rank", "left the step"):
                kernels.gather(x)
            assert memory.failed() == 1
            memory.restart(1)
        return kernels.gather(x)[0].tolist()

    assert over_memory(2, body) == [[0.0, 1.0], [0.0, 1.0]]


def test_the_memory_has_no_name(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()
    files = SharedFiles.create(2)
    assert (set(Path("/dev/shm").iterdir()) if before else set()) <= before
    for number in {files.memory, *files.reading, *files.writing}:
        os.close(number)


def test_another_process_gets_its_files_in_order() -> None:
    files = SharedFiles.create(3)
    passed = passed_files(3, 1, files.of_rank(1))
    assert passed.of_rank(1) == files.of_rank(1)
    for number in {files.memory, *files.reading, *files.writing}:
        os.close(number)


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="from 1 to 64 ranks, not 65"):
        SharedFiles.create(65)
