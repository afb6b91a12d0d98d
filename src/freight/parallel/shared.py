"""The transport between ranks of one machine: memory that all of them map (csrc/ranks.cpp).

The memory has no name, so nothing is left of it when the last rank ends, however that happens. Each
rank holds the writing end of a pipe of its own, and the others its reading end: the system hangs it
up when the rank ends, which shows in every gather that waits for it.

Kernels gather through `SharedMemory.described`, without a return to Python. Imports no torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from freight.errors import ConfigError, RankError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_RANKS = 64  # FREIGHT_MAX_RANKS
# Bytes of a rank's part in one turn: for 512 rows of 32,768 inputs on two ranks. A longer one takes
# several turns, or is copied
CAPACITY = 16 << 20
_LINE = 64  # FREIGHT_CACHE_LINE
_HEADER = (MAX_RANKS + 2) * _LINE  # a line with one number for each rank, then `lost` and `failed`
_LOST = MAX_RANKS  # places of those two
_FAILED = MAX_RANKS + 1


# part, out, rows, part_bytes, status: the address of a FreightStatus
Exchange = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
)


class FreightRanks(ctypes.Structure):
    """The ranks as the C functions take them (csrc/freight.h)."""

    _fields_ = (
        ("shared", ctypes.c_void_p),
        ("alive", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("timeout", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("exchange", Exchange),
    )


@dataclass(frozen=True)
class SharedFiles:
    """File descriptors that ranks meet by: of the memory, and of both ends of each rank's pipe.

    A process gets those that `of_rank` names; the writing ends of others must not stay open in it.
    """

    memory: int
    reading: tuple[int, ...]
    writing: tuple[int, ...]

    @staticmethod
    def create(size: int, capacity: int = CAPACITY) -> SharedFiles:
        """Create the memory and the pipes for `size` ranks. Raises ConfigError for too many."""
        if not 1 <= size <= MAX_RANKS:
            raise ConfigError(f"there may be from 1 to {MAX_RANKS} ranks, not {size}")
        memory = nameless_memory()
        os.ftruncate(memory, _HEADER + 2 * size * capacity)  # committed at the first write
        reading = []
        writing = []
        for _ in range(size):
            end_to_read, end_to_write = os.pipe()
            reading.append(end_to_read)
            writing.append(end_to_write)
        return SharedFiles(memory, tuple(reading), tuple(writing))

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the descriptors that the process of `rank` needs."""
        before = self.reading[:rank]
        after = self.reading[rank + 1 :]
        return (self.memory, self.writing[rank], *before, *after)

    def of_others(self, rank: int) -> list[int]:
        """Return the descriptors that the process of `rank` does not need."""
        return sorted({*self.reading, *self.writing}.difference(self.of_rank(rank)))


def nameless_memory() -> int:
    """Return the descriptor of shared memory that no path leads to."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("freight-ranks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedMemory:
    """The mapping of one rank. `described` is what the C functions take."""

    def __init__(
        self, files: SharedFiles, rank: int, timeout: float, capacity: int = CAPACITY
    ) -> None:
        """timeout: seconds after which a rank that does not answer counts as lost."""
        size = len(files.reading)
        self._files = files
        self.rank = rank
        self.size = size
        self._mapping = mmap.mmap(files.memory, _HEADER + 2 * size * capacity)
        self._alive = (ctypes.c_int32 * size)(*files.reading)
        self._alive[rank] = -1
        self.described = FreightRanks(
            shared=ctypes.addressof(ctypes.c_char.from_buffer(self._mapping)),
            alive=ctypes.addressof(self._alive),
            capacity=capacity,
            timeout=round(1000 * timeout),
            rank=rank,
            size=size,
        )
        words = np.frombuffer(self._mapping, np.uint64, _HEADER // 8)
        self._numbers = words.reshape(-1, _LINE // 8)[:, 0]

    def meet(self) -> None:
        """Do nothing: the memory is there already."""

    def gather(self, part: Tensor) -> Tensor:
        """Raise RankError: only the compiled kernels gather over shared memory."""
        raise RankError("shared memory is for the compiled kernels; others gather over a group")

    def finish(self) -> None:
        """Do nothing: a gather returns when it is done."""

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for an event: gathers before it are done."""
        event.synchronize()

    def close(self) -> None:
        """Let the other ranks see this one as ended. The mapping stays while kernels may use it."""
        for number in self._files.of_rank(self.rank):
            os.close(number)

    def close_in_child(self) -> None:
        """Let a fork of this process not keep the rank alive."""
        self.close()

    def set_timeout(self, seconds: float) -> None:
        """Change the seconds after which a rank that does not answer counts as lost."""
        self.described.timeout = round(1000 * seconds)

    def lost(self) -> str:
        """Say which rank is lost, and how: 'rank 1 has ended'; '' if none is."""
        number = int(self._numbers[_LOST])
        if not number:
            return ""
        silent, rank = divmod(number - 1, MAX_RANKS)
        if silent:
            return f"rank {rank} does not answer"
        return f"rank {rank} has ended"

    def failed(self) -> int | None:
        """Return the rank that has left the step under way, or None."""
        number = int(self._numbers[_FAILED])
        if not number:
            return None
        return number - 1

    def lose(self, rank: int, is_silent: bool = False) -> None:
        """Mark a rank as lost, unless one is lost already. is_silent: it may not have ended."""
        if not self._numbers[_LOST]:
            self._numbers[_LOST] = rank + 1 + MAX_RANKS * is_silent

    def show_life(self, seconds: float) -> None:
        """Write a byte into this rank's pipe every so many seconds, for ever: a rank that is stopped
        writes none, whether steps are computed or not.
        """
        pipe = self._files.writing[self.rank]
        os.set_blocking(pipe, False)
        while True:
            try:
                os.write(pipe, b".")
            except BlockingIOError:  # rank 0 has not read for hours
                pass
            except OSError:  # nobody is left who could read it
                return
            time.sleep(seconds)

    def fail(self) -> None:
        """Make the other ranks leave the step under way: this one has left it."""
        if not self._numbers[_FAILED]:
            self._numbers[_FAILED] = self.rank + 1

    def restart(self, times: int) -> None:
        """Bring all ranks to the same turn after a step that failed. Rank 0 does so for all, once no
        rank computes.
        """
        if self.rank == 0:
            turns = self._numbers[: self.size]
            turns[:] = turns.max()
            self._numbers[_FAILED] = 0

    def take_interrupt(self) -> None:
        """Return None: gathers run in C from begin to end."""


def passed_files(size: int, rank: int, numbers: Sequence[int]) -> SharedFiles:
    """Return the files of `SharedFiles.of_rank` as another process got them, in that order."""
    memory, rank_end, *other_ends = numbers
    reading = list(other_ends)
    reading.insert(rank, -1)
    writing = [-1] * size
    writing[rank] = rank_end
    return SharedFiles(memory, tuple(reading), tuple(writing))
