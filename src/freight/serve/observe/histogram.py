"""Histograms that are cheap to fill: one bisection per observation, for `count` equal values at
once.

Those of prometheus_client walk through all buckets under a lock for every observation; a server
makes one for every token of every stream.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Buckets:
    """Counts by inclusive upper bound, and the sum of the observations. Written by one thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds))
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (upper bound as text, number of observations up to it) pairs; the last bound is
        "+Inf", as in Prometheus.
        """
        bounds = [str(float(bound)) for bound in self._bounds] + ["+Inf"]
        return [
            (bound, float(count))
            for bound, count in zip(bounds, accumulate(self._counts), strict=True)
        ]
