"""Places: the processors of each rank. Imports no torch.

A rank belongs on a memory node (NUMA) of its own, where its threads read near memory alone. On one
node ranks gain nothing: they do the work of one process, and wait for each other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from freight.errors import ConfigError

MOST_PROCESSORS = 1 << 16  # numbers above are typing errors: Linux has at most 8,192


@dataclass(frozen=True)
class Place:
    """Where a rank computes. `processors` None: wherever the system puts its threads, of which it
    has at most `cores`.
    """

    processors: frozenset[int] | None
    cores: int

    @property
    def listed(self) -> tuple[int, ...] | None:
        """The processors in order, as messages have them."""
        if self.processors is None:
            return None
        return tuple(sorted(self.processors))

    def take(self) -> Callable[[], None]:
        """Bind the calling thread, and those that it starts, to the processors. What is returned
        lets that thread run again where it could before.
        """
        if self.processors is None:
            return lambda: None
        before = os.sched_getaffinity(0)
        thread = threading.current_thread()
        os.sched_setaffinity(0, self.processors)

        def undo() -> None:
            if thread.is_alive() and thread.native_id is not None:
                os.sched_setaffinity(thread.native_id, before)

        return undo


def places(
    size: int, rank_cpus: str | None, nodes: Sequence[frozenset[int]], cores: int
) -> tuple[Place, ...]:
    """Return the places of `size` ranks.

    rank_cpus: processors of each rank, '0-31|32-63'; None: its memory node, of `nodes`, or where
    there are too few, an even share of the `cores` that this process may use. Raises ConfigError
    for processors that do not exist, are named twice or are for another number of ranks.
    """
    if rank_cpus is not None:
        named = parse_rank_cpus(rank_cpus, size)
        _require_usable(rank_cpus, named)
        return tuple(Place(processors, len(processors)) for processors in named)
    if len(nodes) < 2 or len(nodes) % size:
        return (Place(None, max(1, cores // size)),) * size
    each = len(nodes) // size
    of_rank = []
    for begin in range(0, len(nodes), each):
        of_rank.append(frozenset[int]().union(*nodes[begin : begin + each]))
    total = sum(map(len, of_rank))
    share = total
    if cores < total:  # a CPU quota may allow fewer cores than there are processors
        share = max(1, cores // size)
    return tuple(Place(processors, min(len(processors), share)) for processors in of_rank)


def parse_rank_cpus(value: str, size: int) -> tuple[frozenset[int], ...]:
    """Return the processors of each rank. Raises ConfigError for a value that does not name some for
    each of `size` ranks, or names one twice.
    """
    example = '"0-31|32-63" for two ranks'
    try:
        named = tuple(frozenset(_listed(part)) for part in value.split("|"))
    except ValueError:
        raise ConfigError(
            f"--rank-cpus {value!r} is no list of processors; write {example}"
        ) from None
    if len(named) != size or not all(named):
        raise ConfigError(
            f"--rank-cpus {value!r} names processors for {sum(map(bool, named))} ranks, but there are {size}; "
            f"write {example}"
        )
    if sum(map(len, named)) != len(frozenset[int]().union(*named)):
        raise ConfigError(f"--rank-cpus {value!r} gives a processor to two ranks; write {example}")
    return named


def _listed(text: str) -> Iterator[int]:
    """Yield the numbers of '0-3,8'. Raises ValueError for a range that is empty or too long."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        begin = int(first)
        end = int(last or first)
        if not begin <= end < MOST_PROCESSORS:
            raise ValueError(part)
        yield from range(begin, end + 1)


def _require_usable(value: str, named: Sequence[frozenset[int]]) -> None:
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError(f"--rank-cpus {value!r}: processors can be chosen on Linux only; omit it")
    missing = sorted(frozenset[int]().union(*named) - os.sched_getaffinity(0))
    if missing:
        raise ConfigError(
            f"--rank-cpus {value!r}: this process may not use processor {missing[0]}; `freight env` shows which it may"
        )
