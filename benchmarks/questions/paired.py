"""Two systems on the same questions, each right or wrong: how far they differ, and whether that is within
a margin that was declared beforehand.

Counts of a pair of systems (A the reference, B the other) over n questions:

    both         both right
    only_a       A right, B wrong
    only_b       B right, A wrong
    neither      both wrong

The difference is that of the shares of right answers, B minus A: (only_b - only_a) / n. Its interval is
Tango's score interval (Tango 1998, "Equivalence test and confidence interval for the difference in
proportions for the paired-sample design", Statistics in Medicine 17:891-908): all differences that a
score test does not reject. Equivalence is shown by two one-sided tests at 5 %, which is the same as a
90 % interval within the margin (Schuirmann 1987).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

MARGIN = 0.02  # of the share of right answers: 2 points
LEVEL = 0.90  # of the interval that decides: two one-sided tests at 5 % each
MOST_QUESTIONS = 1_000_000  # beyond these no count is named


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True)
class Pairs:
    """Counts of questions that both systems answered."""

    both: int
    only_a: int
    only_b: int
    neither: int

    @property
    def num_questions(self) -> int:
        return self.both + self.only_a + self.only_b + self.neither

    @property
    def share_a(self) -> float:
        return (self.both + self.only_a) / self.num_questions

    @property
    def share_b(self) -> float:
        return (self.both + self.only_b) / self.num_questions

    @property
    def difference(self) -> float:
        return (self.only_b - self.only_a) / self.num_questions

    def interval(self, level: float) -> Interval:
        """Tango's, of the difference."""
        return tango_interval(self.only_b, self.only_a, self.num_questions, level)


def count_pairs(a: Sequence[bool], b: Sequence[bool]) -> Pairs:
    """a, b: whether each question was answered rightly, in one order. Raises ValueError for lists of
    different lengths.
    """
    results = list(zip(a, b, strict=True))
    return Pairs(
        results.count((True, True)),
        results.count((True, False)),
        results.count((False, True)),
        results.count((False, False)),
    )


def wilson_interval(right: int, count: int, level: float) -> Interval:
    """Of a share, from 0 to 1 (Wilson 1927, "Probable inference, the law of succession, and
    statistical inference"). count is above 0.
    """
    z = _normal_quantile(level)
    share = right / count
    center = (share + z * z / (2 * count)) / (1 + z * z / count)
    root = math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    half = z * root / (1 + z * z / count)
    return Interval(max(0.0, center - half), min(1.0, center + half))


def mcnemar_p(only_a: int, only_b: int) -> float:
    """The exact two-sided p that both systems are right equally often (McNemar 1947): twice the
    binomial tail of the discordant questions, at most 1.
    """
    count = only_a + only_b
    tail = sum(math.comb(count, i) for i in range(min(only_a, only_b) + 1))
    # integers: their quotient is exact, though 2 to this power may be beyond the floats
    return min(1.0, 2 * tail / (1 << count))


def tango_statistic(only_b: float, only_a: float, count: float, difference: float) -> float:
    """Tango's score statistic, normal with variance 1 if the true difference is `difference`, which is
    strictly between -1 and 1. The counts may be fractions.
    """
    # the likelihood's maximum of the probability of `only_a`, under that difference
    a = 2 * count
    b = (2 * count - only_b + only_a) * difference - only_b - only_a
    c = -only_a * difference * (1 - difference)
    estimate = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
    variance = count * (2 * estimate + difference * (1 - difference))
    numerator = only_b - only_a - count * difference
    if variance <= 0:
        return math.copysign(math.inf, numerator) if numerator else 0.0
    return numerator / math.sqrt(variance)


def tango_interval(only_b: float, only_a: float, count: float, level: float) -> Interval:
    """The differences whose statistic is within the normal quantiles of `level`."""
    z = _normal_quantile(level)
    middle = (only_b - only_a) / count

    def bound(outer: float) -> float:
        inner = middle
        for _ in range(60):
            between = (inner + outer) / 2
            if abs(tango_statistic(only_b, only_a, count, between)) <= z:
                inner = between
            else:
                outer = between
        return inner

    return Interval(bound(-1.0), bound(1.0))


def is_within(interval: Interval, margin: float) -> bool:
    return -margin < interval.low and interval.high < margin


def is_outside(interval: Interval, margin: float) -> bool:
    return interval.high < -margin or interval.low > margin


def questions_needed(pairs: Pairs, margin: float, level: float = LEVEL) -> int | None:
    """How many questions in all would decide, if the shares stay as observed. None: more than
    MOST_QUESTIONS, as where the difference is the margin.
    """
    count = pairs.num_questions
    low = 1.0  # a factor that does not decide, by assumption
    high = 1.0
    while not _decides(pairs, high, margin, level):
        low = high
        high *= 2
        if high * count > 2 * MOST_QUESTIONS:
            return None
    while (high - low) * count > 0.5:
        middle = (low + high) / 2
        if _decides(pairs, middle, margin, level):
            high = middle
        else:
            low = middle
    needed = math.ceil(high * count)
    return needed if needed <= MOST_QUESTIONS else None


def _decides(pairs: Pairs, factor: float, margin: float, level: float) -> bool:
    interval = tango_interval(
        pairs.only_b * factor, pairs.only_a * factor, pairs.num_questions * factor, level
    )
    return is_within(interval, margin) or is_outside(interval, margin)


def verdict(pairs: Pairs, name: str, reference: str, margin: float = MARGIN) -> str:
    """A sentence: whether `name` is within the margin of `reference`, and from which figures."""
    count = pairs.num_questions
    if not count:
        return f"{name} beside {reference}: no question is answered by both"
    interval = pairs.interval(LEVEL)
    points = f"{100 * margin:g} points"
    figures = (
        f"difference {100 * pairs.difference:+.1f} points, {100 * LEVEL:.0f} % interval "
        f"{100 * interval.low:+.1f} to {100 * interval.high:+.1f}, n = {count:,}"
    )
    if is_within(interval, margin):
        return f"{name} is within {points} of {reference} ({figures})"
    if is_outside(interval, margin):
        return f"{name} is not within {points} of {reference} ({figures})"
    needed = questions_needed(pairs, margin)
    more = f"more than {MOST_QUESTIONS:,} questions"
    if needed is not None:
        more = f"about {_rounded(needed - count):,} more questions"
    return (
        f"whether {name} is within {points} of {reference} cannot be said yet: {more} would decide, "
        f"if the shares stay as they are ({figures})"
    )


def _rounded(count: int) -> int:
    """Two significant digits, upwards: it is an estimate."""
    unit = int(10 ** max(0, len(str(count)) - 2))
    return math.ceil(count / unit) * unit


def _normal_quantile(level: float) -> float:
    """Two-sided: of 0.95, 1.96."""
    return NormalDist().inv_cdf(0.5 + level / 2)
