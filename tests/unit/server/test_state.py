"""The engine for the page: shares, rates, and no negative rate when an engine starts anew."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import hypothesis.strategies as st
from hypothesis import given

from freight.outputs import EngineStats
from freight.serve.observe.state import CacheFacts, engine_state

FACTS = CacheFacts("fp8_e4m3", "head", "checkpoint", 16, 64, 1024, 512)
COUNTS = st.integers(0, 2**40)
STATS = st.builds(EngineStats, *[COUNTS] * (len(fields(EngineStats)) - 1))  # all but `store`


def test_the_shape_that_the_page_reads() -> None:
    before = EngineStats(1, 0, 1024, 0, 0, 0, 0, 100, 50, 0, 0, 0, 0, 0, 0)
    now = EngineStats(3, 2, 1024, 256, 128, 80, 20, 150, 90, 4, 1, 5, 6, 8, 7)
    assert engine_state(now, before, 2.0, FACTS) == {
        "running": 3,
        "waiting": 2,
        "cache": {
            "format": "fp8_e4m3",
            "capacity_tokens": 1024,
            "held_tokens": 256,
            "reusable_tokens": 128,
            "equivalent_16bit_tokens": 512,
        },
        "prefix_hit_rate": 0.25,
        "prompt_tokens_per_s": 25.0,
        "generated_tokens_per_s": 20.0,
        "saturated_values": 6,
        "nan_values": 5,
        "preemptions": 4,
    }


@given(STATS, st.none() | STATS, st.floats(0, 1e6))
def test_any_two_readings_give_finite_rates_that_are_not_negative(
    now: EngineStats, before: EngineStats | None, seconds: float
) -> None:
    state = engine_state(now, before, seconds, FACTS)
    json.dumps(state)
    assert (
        min(state["prompt_tokens_per_s"], state["generated_tokens_per_s"], state["prefix_hit_rate"])
        >= 0
    )


def test_an_engine_that_starts_anew_counts_from_zero_and_the_first_reading_has_no_rate() -> None:
    old = EngineStats(*[1000] * 15)  # the counts
    assert (
        engine_state(replace(old, generated=30), old, 10.0, FACTS)["generated_tokens_per_s"] == 3.0
    )
    assert engine_state(old, None, 10.0, FACTS)["generated_tokens_per_s"] == 0.0
    assert engine_state(old, old, 0.0, FACTS)["generated_tokens_per_s"] == 0.0
