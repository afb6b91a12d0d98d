"""Pace: within its bounds for any times, right for costs that are linear, well again after a step
that took long.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.engine.fakes import Clock, new_engine

from freight import SamplingParams
from freight.engine.pace import MIN_PROMPT_TOKENS, ROWS, Pace

SECONDS = st.floats(0.0, 1e6)
TARGET, MOST = 0.5, 2048


def run(pace: Pace, base: float, per_token: float, num_decoding: int, steps: int = 60) -> int:
    """Steps that cost `base` and `per_token` for each prompt token, of which every fourth has none.
    The last tokens.
    """
    for step in range(steps):
        prompt = 0 if step % 4 == 0 else pace.tokens(num_decoding) - num_decoding
        pace.note(base + per_token * prompt, prompt)
    return pace.tokens(num_decoding) - num_decoding


def wanted(base: float, per_token: float) -> float:
    return min(max(TARGET - base, base) / per_token, MOST)


def within_a_tile(tokens: int, base: float, per_token: float) -> bool:
    ideal = wanted(base, per_token)
    return ideal * 0.98 - 2 * ROWS <= tokens <= max(ideal * 1.02 + 1, MIN_PROMPT_TOKENS + ROWS)


@given(
    st.lists(st.tuples(SECONDS, st.integers(0, 3000))),
    st.integers(1, 100),
    st.integers(1, 5000),
    SECONDS,
)
def test_any_times_leave_prompts_their_least_and_steps_their_most(
    steps, num_decoding, most, target
):
    pace = Pace(target + 1e-3, most)
    for seconds, prompt in steps:
        pace.note(seconds, prompt)
        tokens = pace.tokens(num_decoding)
        assert min(num_decoding + MIN_PROMPT_TOKENS, most) <= tokens <= most
        assert tokens % ROWS == 0 or tokens == most
        assert pace.tokens(0) == most
        assert math.isfinite(pace.base)
        assert math.isfinite(pace.per_token)


@given(st.floats(1e-3, 3.0), st.floats(1e-5, 0.05), st.integers(1, 64))
def test_linear_costs_are_found(base, per_token, num_decoding):
    assert within_a_tile(run(Pace(TARGET, MOST), base, per_token, num_decoding), base, per_token)


@given(
    st.floats(1e-3, 3.0),
    st.floats(1e-5, 0.05),
    st.floats(1.0, 1e4),
    st.integers(0, MOST),
    st.integers(1, 64),
)
def test_one_step_that_took_long_is_forgotten(base, per_token, seconds, prompt, num_decoding):
    pace = Pace(TARGET, MOST)
    before = run(pace, base, per_token, num_decoding)
    pace.note(seconds, prompt)
    assert pace.tokens(num_decoding) - num_decoding >= min(before // 4, MIN_PROMPT_TOKENS)
    assert within_a_tile(run(pace, base, per_token, num_decoding), base, per_token)


@pytest.mark.parametrize("prompt", [0, 64])
def test_however_long_one_step_takes_the_next_one_has_a_third_of_the_tokens_and_no_more_than_before(
    prompt,
):
    pace = Pace(TARGET, MOST)
    before = run(pace, base=0.1, per_token=1e-3, num_decoding=8)
    pace.note(1e6, prompt)
    assert before / 3 < pace.tokens(8) - 8 <= before


@example(base=0.19921875, per_token=0.0018567746721833936, num_decoding=1, stale=0.0)
@given(st.floats(1e-3, 0.2), st.floats(1e-4, 0.002), st.integers(1, 64), st.floats(0.0, 0.2))
def test_steps_take_the_time_even_where_what_decoding_costs_is_out_of_date(
    base, per_token, num_decoding, stale
):
    """No step without prompts comes any more: prompt tokens are then taken to cost what is missing.

    So a step grows by another tile of rows where that fits at what each of its tokens takes now,
    base included.
    """
    pace = Pace(TARGET, MOST)
    pace.note(stale, 0)
    seconds = 0.0
    for _ in range(80):
        prompt = pace.tokens(num_decoding) - num_decoding
        seconds = base + per_token * prompt
        pace.note(seconds, prompt)
    assert seconds <= TARGET + (ROWS + 1) * per_token
    assert seconds * (prompt + ROWS) >= 0.99 * TARGET * prompt or prompt == MOST - num_decoding


def test_where_decoding_alone_takes_too_long_prompts_get_as_long_again():
    tokens = run(Pace(TARGET, MOST), base=2.0, per_token=0.01, num_decoding=8)
    assert 200 - 2 * ROWS <= tokens <= 200


def test_before_a_prompt_was_measured_a_step_takes_few():
    assert Pace(TARGET, MOST).tokens(1) == 2 * ROWS


@pytest.mark.parametrize("paced", [True, False])
def test_a_long_prompt_beside_a_request_that_decodes(paced):
    """The clock moves by 0.01 s a token: a step takes 0.64 s, and 1.28 s without a pace."""
    engine = new_engine(num_blocks=300, max_num_seqs=4, budget=128, max_model_len=512)
    engine.pace = Pace(0.7, 128) if paced else None
    clock, steps = Clock(), []
    engine.clock = clock
    run_model = engine.runner.run

    def run(slices: Any, tokens: Any = None) -> Any:
        count = sum(len(part.token_ids) for part in slices)
        steps.append((count, len(slices)))
        clock.now += 0.01 * count
        return run_model(slices, tokens)

    engine.runner.run = run  # type: ignore[method-assign]
    for name, prompt in (("a", [1, 2]), ("b", [1, 2] * 100)):
        params = SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False)
        engine.add(name, engine.accept(prompt, params), params)
        engine.step()
    while engine.has_unfinished:
        engine.step()
    beside = [count for count, sequences in steps if sequences == 2 and count > 2]
    assert sum(beside) == 200 + len(beside)
    assert max(beside) == (64 if paced else 128)
