"""Ranks one after another in one process: Triton's interpreter runs one launch at a time.

Each rank computes several times. What another one has not given yet is its own part in the other's
place, so after as many times as there are gathers, and once more, all have what ranks give each
other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from freight.parallel.ranks import Ranks


class Replayed:
    """The transport of a rank: what `given` has of the others, by the number of the gather."""

    def __init__(self, rank: int, size: int, given: dict[tuple[int, int], Tensor]) -> None:
        self.rank = rank
        self.size = size
        self.given = given
        self.calls = 0

    def gather(self, part: Tensor) -> Tensor:
        self.given[self.calls, self.rank] = part.clone()
        parts = [self.given.get((self.calls, rank), part) for rank in range(self.size)]
        self.calls += 1
        return torch.cat(parts, 1)


def of_ranks(size: int, gathers: int, compute: Callable[[Ranks], Tensor]) -> list[Tensor]:
    """What each of `size` ranks computes with `gathers` gathers."""
    given: dict[tuple[int, int], Tensor] = {}
    results: list[Tensor] = []
    for _ in range(gathers + 1):
        transports: list[Any] = [Replayed(rank, size, given) for rank in range(size)]
        results = [
            compute(Ranks(rank, size, transport)) for rank, transport in enumerate(transports)
        ]
        assert all(transport.calls == gathers for transport in transports)
    return results
