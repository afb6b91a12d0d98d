"""Intervals and figures by position, from what is known of each token.

Units (documents; windows, where there is one document) are taken as drawn independently, so one
that repeats an earlier one is counted as part of it (`independent_units`). A mean per token is the
ratio of two sums over units; its interval is Student's, with the linearised standard error of a
ratio (Cochran, Sampling Techniques, §6.4) and n - 1 degrees of freedom. A change between two
settings is the mean of the differences within each unit, so what makes a unit hard for both does
not widen it. `tests/unit/evaluate/test_coverage.py` measures how often an interval of 12, 20 and 58
units holds the true value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freight.lab.evaluate.safety import MIN_UNITS, Interval

Array = NDArray[np.float64]
NORMAL = 1.9599639845400536  # z, the 97.5 % quantile of the normal distribution
# (z³ + z) / 4, (5z⁵ + 16z³ + 3z) / 96, (3z⁷ + 19z⁵ + 17z³ - 15z) / 384 and
# (79z⁹ + 776z⁷ + 1482z⁵ - 1920z³ - 945z) / 92160
TERMS = (2.3722712302985607, 2.8224986157396086, 2.555849679507719, 1.5895340533938196)
RUN = 8  # tokens: runs of this length seldom occur twice in a text, but for what is copied
REPEATED = 0.9  # of a unit's runs that occur in earlier units: from there on it repeats them


def independent_units(token_ids: Sequence[Sequence[int]]) -> list[int]:
    """For the tokens of each unit the number of the unit that it counts as, without gaps, in the
    order of the text.

    A unit of which `REPEATED` of the runs of `RUN` tokens occur earlier says nothing new: it counts
    as the unit that has most of them. Otherwise copies of a text would narrow its intervals.
    """
    first: dict[tuple[int, ...], int] = {}
    numbers: list[int] = []
    for ids in token_ids:
        runs = [tuple(ids[at : at + RUN]) for at in range(max(1, len(ids) - RUN + 1))]
        earlier = Counter(first[run] for run in runs if run in first)
        if earlier.total() >= REPEATED * len(runs):
            numbers.append(earlier.most_common(1)[0][0])
        else:
            numbers.append(max(numbers, default=-1) + 1)
        for run in runs:
            first.setdefault(run, numbers[-1])
    return numbers


def distinct_units(token_ids: Sequence[Sequence[int]]) -> list[int]:
    """Do as `independent_units` for units that share long prompts, or have answers of a few tokens:
    only a unit with all tokens of an earlier one counts as that one.
    """
    numbers: dict[tuple[int, ...], int] = {}
    return [numbers.setdefault(tuple(ids), len(numbers)) for ids in token_ids]


def unit_sums(units: NDArray[np.int64], *values: NDArray[Any]) -> list[Array]:
    """Sums by unit of each of `values`, [num_tokens] as `units`, the number of the unit that a
    token belongs to.
    """
    return [
        np.bincount(units, weights=value.astype(np.float64)).astype(np.float64) for value in values
    ]


def effective_units(counts: Array) -> Array:
    """Return how many units of equal size weigh as much as those of `counts` tokens, [..., units]:
    (Σ c)² / Σ c² (Kish). A last window of a few tokens is hardly one more.
    """
    weight: Array = np.square(counts.sum(-1)) / np.square(counts).sum(-1)
    return weight


def student(degrees: Array | float) -> Array:
    """Return the 97.5 % quantile of Student's t. Abramowitz and Stegun 26.7.5; for 11 degrees and
    more right to 1e-4.
    """
    n = np.asarray(degrees, dtype=np.float64)
    quantile = np.full_like(n, NORMAL)
    for power, term in enumerate(TERMS, 1):
        quantile = quantile + term / n**power
    return quantile


def mean_interval(sums: Array, counts: Array) -> tuple[Array, Array] | None:
    """Return the 95 % interval of the mean per token, from sums and counts by unit, [..., units];
    None where no row has MIN_UNITS (`effective_units`, rounded).
    """
    units = effective_units(counts)
    if np.max(np.round(units)) < MIN_UNITS:
        return None
    total = counts.sum(-1)
    mean = sums.sum(-1) / total
    residual = sums - mean[..., None] * counts
    error = np.sqrt(units / (units - 1) * np.square(residual).sum(-1)) / total
    half = student(units - 1) * error
    return mean - half, mean + half


def interval(sums: Array, counts: Array) -> Interval | None:
    """`mean_interval` of a single row, in Python's floats."""
    ends = mean_interval(sums, counts)
    if ends is None:
        return None
    return float(ends[0]), float(ends[1])


def position_edges(longest: int) -> list[int]:
    """Buckets of positions: 0, 16, 32, 64, … up to `longest`, exclusive."""
    edges = [0]
    step = 16
    while edges[-1] < longest:
        edges.append(min(step, longest))
        step *= 2
    return edges


def by_position(
    positions: NDArray[np.int64], values: NDArray[Any], edges: list[int]
) -> list[float | None]:
    """Return the mean of `values` in each bucket; None where a bucket has no token."""
    bucket = np.searchsorted(np.asarray(edges), positions, side="right") - 1
    size = len(edges) - 1
    count = np.bincount(bucket, minlength=size)
    total = np.bincount(bucket, weights=values.astype(np.float64), minlength=size)
    return [float(t / c) if c else None for t, c in zip(total, count, strict=True)]
