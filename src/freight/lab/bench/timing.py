"""How Freight measures: warm up, repeat, report the median and the spread;
memory and its speed.

Guarantees: nothing is measured by a single run, and the speed of the memory, which bounds decoding,
is measured in the same process between the runs that are compared with it, because it drifts on a
machine that others use too.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from freight.base.fields import JsonObject
from freight.settings.device import ROOT, last_level_cache, memory

# bytes, at least: what is samples where the size of the last-level cache is not known
CACHE_SIZE = 2**27
MOST_RUNS = 200  # of a row: more would change its median by less than other work does
MEMORY_SHARE = 0.25  # of what is free, at most: what is compared, and a probe of twice its size


@dataclass(frozen=True)
class Spread:
    """The median of some samples, and their first and third quartile."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(samples: Sequence[float]) -> Spread:
        assert samples
        low = high = samples[0]
        if len(samples) > 1:
            low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
        return Spread(statistics.median(samples), low, high, len(samples))


def medians(figures: Mapping[str, Spread]) -> JsonObject:
    """Return each figure's median, and as `spread` all that is known of it, as --json prints them."""
    fields: dict[str, Any] = {}
    spreads = {}
    for name, spread in figures.items():
        fields[name] = spread.median
        spreads[name] = asdict(spread)
    return {**fields, "spread": spreads}


def seconds_of(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def time_in_rotation(
    calls: Sequence[Callable[[], object]], seconds: float, least: int = 5
) -> Spread:
    """Time `calls`, which do the same on different memory, as long as `sampled`.

    They are called one after the other, so that with enough of them nothing is found in a cache.
    Each runs once beforehand, and does not count.
    """
    for call in calls:
        call()
    rotation = itertools.cycle(calls)
    return sampled(lambda: seconds_of(next(rotation)), seconds, least)


def sampled(sample: Callable[[], float], seconds: float, least: int) -> Spread:
    """Take samples of a time until they are `seconds` together and at least `least`, at most
    `MOST_RUNS`.
    """
    samples: list[float] = []
    while len(samples) < least or (sum(samples) < seconds and len(samples) < MOST_RUNS):
        samples.append(sample())
    return Spread.of(samples)


def bytes_beyond_caches(root: Path = ROOT) -> int:
    """Return bytes of which no cache keeps anything until their turn comes again: twice the
    last-level cache.

    No more than MEMORY_SHARE of the free memory: where that is not enough, figures are partly a
    cache's.
    """
    size = max(CACHE_SIZE, 2 * (last_level_cache(root) or 0))
    return min(size, int(memory(root)[1] * MEMORY_SHARE))


class MemoryProbe:
    """Reads the device's memory, a CPU's with all of torch's threads; `sample` before and after
    what is compared.
    """

    def __init__(self, size: int | None = None, device: str = "cpu") -> None:
        """`size` in bytes: much more than any cache; a GPU's is read so fast that it takes more."""
        size = size or (2 * bytes_beyond_caches() if device == "cpu" else 2**31)
        # made by numpy, which asks for huge pages; torch does not
        self._buffer = torch.from_numpy(np.ones(size // 4, np.float32)).to(device)
        self._samples: list[float] = []

    def _read(self) -> None:
        self._buffer.sum()
        if self._buffer.is_cuda:
            torch.cuda.synchronize()

    def sample(self) -> float:
        """Measure bytes per second now: the best of three readings."""
        self._samples.append(max(self.reading() for _ in range(3)))
        return self._samples[-1]

    def reading(self) -> float:
        """Measure bytes per second of a single reading, which is no sample."""
        return self._buffer.nbytes / seconds_of(self._read)

    def bandwidth(self) -> Spread:
        """Return bytes per second, of the samples so far."""
        return Spread.of(self._samples)


def peak_rss_bytes() -> int:
    """Return the most memory that this process has held so far."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
