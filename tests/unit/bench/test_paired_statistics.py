"""benchmarks/questions/paired.py: the examples of the papers, exact coverage, and what the verdicts say."""

from __future__ import annotations

import math
import random

import pytest
from questions.paired import (
    Interval,
    Pairs,
    count_pairs,
    is_outside,
    is_within,
    mcnemar_p,
    questions_needed,
    tango_interval,
    tango_statistic,
    verdict,
    wilson_interval,
)
from tests.refusals import assert_names


def test_the_examples_of_tango() -> None:
    """Tango 1998, sections 6.1 (contact lenses) and 6.2 (difficulties of sleeping)."""
    assert tango_statistic(0, 1, 44, -0.1) == pytest.approx(1.709, abs=5e-4)
    assert tango_interval(0, 1, 44, 0.90).low == pytest.approx(-0.096, abs=5e-4)
    interval = tango_interval(9, 3, 32, 0.95)
    assert interval.low == pytest.approx(-0.027, abs=5e-4)
    assert interval.high == pytest.approx(0.390, abs=5e-4)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611), (1, 29, 0.0061, 0.1718)],
)  # fmt: skip
def test_the_examples_of_wilsons_interval(right: int, count: int, low: float, high: float) -> None:
    """Table I of Newcombe 1998, "Two-sided confidence intervals for the single proportion"."""
    interval = wilson_interval(right, count, 0.95)
    assert interval.low == pytest.approx(low, abs=5e-5)
    assert interval.high == pytest.approx(high, abs=5e-5)


def test_mcnemars_exact_p() -> None:
    assert mcnemar_p(1, 7) == pytest.approx(18 / 256)
    # the example of statsmodels' mcnemar
    assert mcnemar_p(59, 121) == pytest.approx(4.434444926375551e-06)
    assert mcnemar_p(0, 0) == 1
    assert mcnemar_p(5, 5) == 1
    assert 0 < mcnemar_p(2000, 2400) < 1e-8  # 2 ** 4400 is beyond the floats


def test_without_a_difference_tangos_statistic_is_mcnemars() -> None:
    for only_b, only_a in ((9, 3), (1, 0), (4, 17)):
        expected = (only_b - only_a) / math.sqrt(only_b + only_a)
        assert tango_statistic(only_b, only_a, 100, 0.0) == pytest.approx(expected)


def test_the_statistic_maximizes_the_likelihood() -> None:
    """Tango's closed form beside a search for the most likely probability."""
    only_b, only_a, count, difference = 6, 11, 80, 0.03
    best = max(
        (i / 100_000 for i in range(1, 48_000)),
        key=lambda p: (
            only_b * math.log(p + difference)
            + only_a * math.log(p)
            + (count - only_a - only_b) * math.log(1 - 2 * p - difference)
        ),
    )
    variance = count * (2 * best + difference * (1 - difference))
    expected = (only_b - only_a - count * difference) / math.sqrt(variance)
    assert tango_statistic(only_b, only_a, count, difference) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("p_b", "p_a"), [(0.05, 0.05), (0.08, 0.04), (0.02, 0.12)])
def test_intervals_cover_as_often_as_they_say(p_b: float, p_a: float) -> None:
    """Over all outcomes of 60 questions, weighted by their probability."""
    count = 60
    covered = 0.0
    for only_b in range(30):
        for only_a in range(30):
            rest = count - only_b - only_a
            chance = math.comb(count, only_b) * math.comb(count - only_b, only_a)
            weight = chance * p_b**only_b * p_a**only_a * (1 - p_a - p_b) ** rest
            if weight < 1e-6:
                continue
            interval = tango_interval(only_b, only_a, count, 0.90)
            covered += weight * (interval.low <= p_b - p_a <= interval.high)
    assert 0.87 < covered < 0.93


def test_equivalence_is_claimed_wrongly_in_one_of_twenty() -> None:
    """At a true difference of exactly the margin, over drawn outcomes."""
    rng = random.Random(0)
    count = 500
    num_drawn = 400
    wrong = 0
    for _ in range(num_drawn):
        draws = rng.choices(("b", "a", "same"), (0.02, 0.04, 0.94), k=count)
        interval = tango_interval(draws.count("b"), draws.count("a"), count, 0.90)
        wrong += is_within(interval, 0.02)
    assert wrong / num_drawn < 0.05 + 3 * math.sqrt(0.05 * 0.95 / num_drawn)


def test_an_interval_contains_the_difference_and_mirrors() -> None:
    for only_b, only_a, count in ((0, 0, 10), (3, 0, 3), (0, 5, 9), (7, 2, 1319)):
        interval = tango_interval(only_b, only_a, count, 0.95)
        assert -1 <= interval.low <= (only_b - only_a) / count <= interval.high <= 1
        mirrored = tango_interval(only_a, only_b, count, 0.95)
        assert mirrored.low == pytest.approx(-interval.high)
        assert mirrored.high == pytest.approx(-interval.low)


def test_pairs_are_counted() -> None:
    pairs = count_pairs([True, True, False, False, True], [True, False, True, False, True])
    assert pairs == Pairs(both=2, only_a=1, only_b=1, neither=1)
    assert pairs.share_a == pairs.share_b == 0.6
    assert Pairs(50, 10, 5, 35).difference == -0.05
    with pytest.raises(ValueError):
        count_pairs([True], [])


def test_the_verdicts() -> None:
    close = Pairs(both=900, only_a=12, only_b=8, neither=399)
    assert_names(verdict(close, "fp8", "16 bits"), "fp8 is within 2 points of 16 bits", "n = 1,319")
    assert_names(verdict(close, "fp8", "16 bits"), "difference -0.3 points")
    far = Pairs(both=700, only_a=200, only_b=20, neither=399)
    assert_names(verdict(far, "unit", "16 bits"), "unit is not within 2 points of 16 bits")
    few = Pairs(both=100, only_a=4, only_b=3, neither=57)
    assert_names(verdict(few, "fp8", "16 bits"), "cannot be said yet", "more questions", "n = 164")
    assert_names(verdict(Pairs(0, 0, 0, 0), "fp8", "16 bits"), "fp8", "no question")


@pytest.mark.parametrize("pairs", [Pairs(100, 4, 3, 57), Pairs(80, 9, 2, 73), Pairs(30, 0, 0, 4)])
def test_so_many_questions_decide(pairs: Pairs) -> None:
    needed = questions_needed(pairs, 0.02)
    assert needed is not None
    assert needed > pairs.num_questions
    for count, decides in ((needed + 1, True), (needed - 2, False)):
        factor = count / pairs.num_questions
        interval = tango_interval(pairs.only_b * factor, pairs.only_a * factor, count, 0.90)
        assert (is_within(interval, 0.02) or is_outside(interval, 0.02)) is decides


def test_at_the_margin_no_count_decides() -> None:
    pairs = Pairs(both=90, only_a=4, only_b=2, neither=4)
    assert questions_needed(pairs, 0.02) is None
    assert "more than 1,000,000" in verdict(pairs, "fp8", "16 bits")


def test_within_and_outside_exclude_each_other() -> None:
    assert is_within(Interval(-0.01, 0.019), 0.02)
    assert not is_within(Interval(-0.021, 0.01), 0.02)
    assert not is_within(Interval(-0.02, 0.01), 0.02)
    assert not is_within(Interval(-0.01, 0.02), 0.02)
    assert is_outside(Interval(0.021, 0.05), 0.02)
    assert not is_outside(Interval(0.01, 0.05), 0.02)
