"""Forked processes as ranks, for tests of what they share."""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.parallel.ranks import Ranks
from freight.parallel.shared import SharedFiles, SharedMemory

T = TypeVar("T")
_DEADLINE = 60.0  # seconds for all ranks together


class KilledError(Exception):
    """A rank ended without a result."""


def in_ranks(
    size: int, body: Callable[[int], T], forked: Callable[[], None] = lambda: None
) -> list[T | Exception]:
    """Run body(rank) in `size` forked processes, and return what each returned or raised.

    `forked` is called here once all of them run. A rank that ended by a signal has `KilledError`.
    All of them are gone at the end, one that hangs too.
    """
    ends, children = [], []
    for rank in range(size):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _run(rank, body, writing)
        os.close(writing)
        ends.append(reading)
        children.append(child)
    try:
        forked()
        return [_result(end, time.monotonic() + _DEADLINE) for end in ends]
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for end in ends:
            os.close(end)


def over_memory(
    size: int, body: Callable[[SharedMemory, CpuKernels], object], **options: float
) -> list[object]:
    """`in_ranks` with the shared memory of each, and kernels that gather over it."""
    capacity = int(options.pop("capacity", 1 << 14))
    files = SharedFiles.create(size, capacity)

    def in_rank(rank: int) -> object:
        close(files.of_others(rank))
        memory = SharedMemory(files, rank, options.get("timeout", 30.0), capacity)
        return body(memory, CpuKernels(library.load(), ranks=Ranks(rank, size, memory)))

    def close(numbers: Iterable[int]) -> None:
        for number in numbers:
            os.close(number)

    try:  # a writing end that stays open here would keep a rank alive for the others
        return in_ranks(size, in_rank, forked=lambda: close(files.writing))
    finally:
        close((files.memory, *files.reading))


def _run(rank: int, body: Callable[[int], Any], writing: int) -> None:
    """Run the body of a forked rank and leave, without what pytest does at an exit."""
    status = 1
    torch.set_num_threads(1)  # a fork has none of the threads that there were
    try:
        try:
            result = body(rank)
        except Exception as error:
            traceback.print_exc()
            result = error
        with os.fdopen(writing, "wb") as stream:
            stream.write(pickle.dumps(result))
        status = 0
    finally:
        os._exit(status)


def _result(end: int, deadline: float) -> Any:
    """Read what a rank returned, until it closes its pipe."""
    data = b""
    while True:
        ready, _, _ = select.select([end], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, "a rank hangs"
        more = os.read(end, 1 << 16)
        if not more:
            return pickle.loads(data) if data else KilledError()
        data += more
