"""Intervals, percentiles and figures by position, from what is known of each token.

Intervals are of a paired bootstrap: documents (windows, where there is one document) are drawn with replacement, the
same ones for both settings, so what makes a document hard for both does not widen them. They hold the middle 95 %.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

DRAWS = 2000
SEED = 0
Array = NDArray[np.float64]


def unit_sums(units: NDArray[np.int64], *values: NDArray[Any]) -> list[Array]:
    """Sums by unit of each of `values`, [num_tokens] as `units`, the number of the unit that a token belongs to."""
    return [np.bincount(units, weights=value.astype(np.float64)).astype(np.float64) for value in values]


def bootstrap_means(sums: list[Array], counts: Array) -> list[Array] | None:
    """DRAWS means per token of each of `sums`, from units drawn with replacement; None for a single unit."""
    if len(counts) < 2:
        return None
    drawn = np.random.default_rng(SEED).multinomial(len(counts), np.full(len(counts), 1 / len(counts)), size=DRAWS)
    total = drawn @ counts
    kept = total > 0
    return [(drawn @ one)[kept] / total[kept] for one in sums]


def interval(draws: Array) -> tuple[float, float]:
    low, high = np.percentile(draws, (2.5, 97.5))
    return float(low), float(high)


def position_edges(longest: int) -> list[int]:
    """Buckets of positions: 0, 16, 32, 64, … up to `longest`, exclusive."""
    edges = [0]
    step = 16
    while edges[-1] < longest:
        edges.append(min(step, longest))
        step *= 2
    return edges


def by_position(positions: NDArray[np.int64], values: NDArray[Any], edges: list[int]) -> list[float | None]:
    """The mean of `values` in each bucket; None where a bucket has no token."""
    bucket = np.searchsorted(np.asarray(edges), positions, side="right") - 1
    size = len(edges) - 1
    count = np.bincount(bucket, minlength=size)
    total = np.bincount(bucket, weights=values.astype(np.float64), minlength=size)
    return [float(t / c) if c else None for t, c in zip(total, count, strict=True)]
