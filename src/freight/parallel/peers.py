"""Memory of a GPU that the other ranks of its host write into, and where what is in it.

A rank's buffer is three words, flags, and two slots. The words are its own; flags and slots are
written by all ranks (`kernels/triton/push.py`). A page of its host's memory has two words more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

WORD = 8  # bytes of a turn's number, a flag and every other word: int64
TURN = 0  # places of the words before the flags: turns that have ended on this rank
LEAVING = 1  # programs that have ended in the turn under way
LEFT = 2  # what ended a turn early, 0 if nothing did
FLAGS = 16  # place of the first flag
FAILED = 0  # places of the words of the host's page: what the host sets to end all waits
STATUS = 1  # what ended a wait, written by the kernel for the host
PROGRAMS = 256  # most programs of a launch, each with a flag from every rank
_LINE = 256  # slots begin at multiples of it


@dataclass(frozen=True)
class Layout:
    """Where what is in the buffer of each of `size` ranks. slot_bytes: of a matrix of all columns."""

    size: int
    slot_bytes: int

    @property
    def slot_stride(self) -> int:
        """Return the bytes from the first slot to the second."""
        return -(-self.slot_bytes // _LINE) * _LINE

    @property
    def slots(self) -> int:
        """Return the place of the first slot, in bytes."""
        flags = WORD * (FLAGS + PROGRAMS * self.size)
        return -(-flags // _LINE) * _LINE

    @property
    def total(self) -> int:
        """Return the bytes of a buffer."""
        return self.slots + 2 * self.slot_stride


@dataclass(frozen=True)
class Peers:
    """The buffers of all ranks as one of them reaches them.

    own         this rank's buffer, uint8 [Layout.total], zeros before any rank writes into it
    addresses   int64 [size + 1] on the device: of the buffers, by rank, then of `page`
    page        int64 [2] in host memory that the device reaches: FAILED and STATUS
    close       gives the others' buffers back, then its own
    """

    own: Tensor
    addresses: Tensor
    page: Tensor
    close: Callable[[], None]
