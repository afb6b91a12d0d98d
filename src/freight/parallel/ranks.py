"""Ranks: the processes that compute one model together, each some columns of every activation.

Every matrix is cut by its output rows, so each output is summed by one rank over all inputs, in the
order in which one process alone sums it. Columns are gathered where all of them are needed. No sum
is split, so the results for any number of ranks are those of one, bit for bit.

`Ranks` is a value that is handed down with the kernels (`KernelSet.gather`), and never a global.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from freight.parallel.shared import FreightRanks

FREIGHT_OK = 0  # of FreightStatus (csrc/freight.h)
FREIGHT_RANK_LOST = 5
FREIGHT_RANK_FAILED = 6


class Transport(Protocol):
    """How parts of activations get from one rank to the others.

    Every rank makes the same calls in the same order. A call returns once all ranks have made it, or
    on GPUs before: its result counts once `finish` has returned.
    `described` is what the C functions take: they gather without a return to Python where they can.
    """

    rank: int
    size: int
    described: FreightRanks

    def gather(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks side by side, [rows, size * columns].

        part: [rows, columns], of the same shape and dtype on every rank. Raises RankError if
        another rank has ended or does not answer.
        """
        ...

    def finish(self) -> None:
        """Wait until the gathers so far are done. Raises as `gather`, and KernelError if one of them
        was left.
        """
        ...

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for an event of a device that follows gathers. Raises as `finish`."""
        ...

    def close(self) -> None:
        """Release the transport. The other ranks then see this one as ended."""
        ...

    def close_in_child(self) -> None:
        """Release, in a fork of this process, what would keep the rank alive for the others."""
        ...

    def meet(self) -> None:
        """Connect with all the others, which do so as well. Raises RankError if they do not come."""
        ...

    def lost(self) -> str:
        """Say which rank is lost, and how: 'rank 1 has ended'; '' if none is."""
        ...

    def lose(self, rank: int, is_silent: bool = False) -> None:
        """Mark a rank as lost, unless one is lost already. is_silent: it may not have ended."""
        ...

    def failed(self) -> int | None:
        """Return the first rank that has left the step under way, or None."""
        ...

    def fail(self) -> None:
        """Make the other ranks leave the step under way: this one has left it."""
        ...

    def restart(self, times: int) -> None:
        """Begin anew for the `times`-th time, after a step that every rank has left."""
        ...

    def take_interrupt(self) -> BaseException | None:
        """Return what interrupted a gather that C called, once: C cannot raise it."""
        ...


@dataclass(frozen=True)
class Ranks:
    """A rank's number among `size`, and its way to the others; None without others."""

    rank: int
    size: int
    transport: Transport | None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size
        assert (self.transport is None) == (self.size == 1)

    def gather(self, part: Tensor) -> Tensor:
        """Return `Transport.gather`; `part` itself without other ranks."""
        if self.transport is None:
            return part
        return self.transport.gather(part)


ALONE = Ranks(rank=0, size=1, transport=None)
