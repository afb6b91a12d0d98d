"""The rule of what is recommended, over figures of every kind."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.cli.kv_choice import choice_facts, choice_sentences
from freight.lab.evaluate.safety import MIN_TOKENS, MIN_UNITS, Interval, Sample, Verdict, judge
from freight.quantizer.budget import Budget, BudgetKind
from freight.quantizer.kv_budget import KVChoice

ENOUGH = Sample(58, "windows", 59032, 16.9, 4096)
GOOD = ((1.001, (0.999, 1.003)), (0.0016, (0.0015, 0.0017)), (0.976, (0.974, 0.978)), 0.0001)
any_float = st.floats(allow_nan=True, allow_infinity=True)


@st.composite
def measured(draw: st.DrawFn, good: tuple[float, Interval]) -> tuple[float, Interval | None]:
    """The good figure, one near it, or anything."""
    value = draw(st.just(good[0]) | st.floats(good[0] - 0.005, good[0] + 0.005) | any_float)
    below, above = draw(st.just((0.0, 0.0)) | st.tuples(st.floats(0, 0.01), st.floats(0, 0.01)))
    return value, draw(st.sampled_from([good[1], (value - below, value + above), None]))


samples = st.just(ENOUGH) | st.builds(
    Sample,
    num_units=st.integers(1, 100),
    units=st.sampled_from(["windows", "documents"]),
    num_tokens=st.integers(2, 100_000),
    perplexity=st.floats(1, 20_000) | any_float,
    vocab_size=st.sampled_from([64, 4096, 151_936]),
)


figures = (
    *map(measured, GOOD[:3]),
    st.just(0.0) | st.floats(0, 0.003) | st.floats(0, 1) | any_float,
    samples,
)


@given(*figures)
def test_nothing_that_breaks_an_answer_is_safe(
    ratio: tuple[float, Interval | None],
    kl: tuple[float, Interval | None],
    same_top: tuple[float, Interval | None],
    clipped: float,
    sample: Sample,
):
    found = judge(ratio, kl, same_top, clipped, sample)
    assert (found.verdict is Verdict.SAFE) == (not found.reasons)
    if found.verdict is not Verdict.SAFE:
        return
    assert same_top[0] >= 0.9
    assert clipped <= 0.01
    assert kl[0] <= 0.005
    assert 1 / 1.005 <= ratio[0] <= 1.005
    assert None not in (ratio[1], kl[1], same_top[1])
    assert sample.num_units >= 12
    assert sample.perplexity < sample.vocab_size / 2


def test_figures_of_all_verdicts_are_drawn():
    """What is drawn above is safe often enough for the test to mean something."""
    found = []

    @settings(max_examples=250, database=None, derandomize=True)
    @given(st.tuples(*figures))
    def drawn(one: Any) -> None:
        found.append(judge(*one).verdict)

    drawn()
    assert min(found.count(verdict) for verdict in Verdict) >= 5


def test_good_figures_on_enough_text_are_safe():
    assert judge(*GOOD, ENOUGH).verdict is Verdict.SAFE


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (
            0,
            (0.95, (0.94, 0.96)),
            "ratio of perplexities is 0.9500",
        ),  # lower perplexity is a change, too
        (0, (1.05, (1.04, 1.06)), "ratio of perplexities"),
        (1, (1.64, (1.5, 1.8)), "mean KL is 1.64"),
        (1, (1.64, None), "mean KL is 1.64"),
        (1, (math.nan, (math.nan, math.nan)), "mean KL is nan"),
        (2, (0.255, (0.2, 0.3)), "same top is 25.50%"),
        (2, (0.255, None), "same top is 25.50%"),
        (3, 0.33, "clipped keys and values is 33.000%"),
        (3, 0.011, "clipped"),
    ],
)
def test_one_bad_figure_is_named(place: int, value: object, says: str):
    figures: list[object] = list(GOOD)
    figures[place] = value
    found = judge(*figures, ENOUGH)  # type: ignore[arg-type]
    assert found.verdict is Verdict.NOT_SAFE
    assert len(found.reasons) == 1
    assert says in found.reasons[0]


def test_what_is_unsettled_says_how_much_more_text_would_settle_it():
    found = judge((1.001, (0.993, 1.009)), *GOOD[1:], ENOUGH)
    assert found.verdict is Verdict.CANNOT_BE_SAID
    assert (
        "about 174 more windows" in found.reasons[0]
    )  # half of 0.008 has to become 0.004: four times the windows
    near = judge((1.00499, (0.99, 1.02)), *GOOD[1:], ENOUGH)
    assert "too near the bound" in near.reasons[0]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, (1.001, (0.999, 1.006))),
        (0, (0.999, (0.994, 1.001))),
        (1, (0.004, (0.003, 0.006))),
        (1, (0.006, (0.005, 0.007))),  # a bound is itself allowed
        (2, (0.96, (0.94, 0.97))),
        (2, (0.94, (0.93, 0.95))),
    ],
)
def test_an_interval_with_one_end_beyond_a_bound_settles_nothing(
    place: int, value: tuple[float, Any]
):
    figures: list[Any] = list(GOOD)
    figures[place] = value
    found = judge(*figures, ENOUGH)
    assert (found.verdict, len(found.reasons)) == (Verdict.CANNOT_BE_SAID, 1)
    assert "more windows would say it" in found.reasons[0]


def test_the_least_sample_is_enough():
    assert (
        judge(*GOOD, Sample(MIN_UNITS, "windows", MIN_TOKENS, 44.0, 4096)).verdict is Verdict.SAFE
    )
    for sample in (
        Sample(MIN_UNITS - 1, "windows", MIN_TOKENS, 44.0, 4096),
        Sample(MIN_UNITS, "w", 1999, 44.0, 4096),
    ):
        assert judge(*GOOD, sample).verdict is Verdict.CANNOT_BE_SAID


def test_too_little_text_says_what_is_missing():
    found = judge(
        *((value, None) for value, _ in GOOD[:3]), 0.0, Sample(2, "windows", 1136, 44.0, 4096)
    )
    assert found.verdict is Verdict.CANNOT_BE_SAID
    assert "10 more" in found.reasons[0]
    assert "864 more" in found.reasons[1]
    unknown = judge(*GOOD, Sample(58, "windows", 59032, 808_077.0, 4096))
    assert unknown.verdict is Verdict.CANNOT_BE_SAID
    assert "perplexity 808,077" in unknown.reasons[0]


def test_a_cache_chosen_by_kl_alone_may_fail_and_never_passes():
    for kl, verdict in ((0.004, Verdict.CANNOT_BE_SAID), (0.006, Verdict.NOT_SAFE)):
        choice = KVChoice(
            Budget(BudgetKind.KL, 0.01), (None,), 1, 2, 8.0, kl, kl, kl, 10, 10, ({},)
        )
        assert choice_facts(choice)["verdict"] == verdict
        assert any(str(verdict) in line for line in choice_sentences(choice))
