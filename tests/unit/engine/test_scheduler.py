"""Scheduler: chunks and budget, how requests end, what is refused, preemption, abort."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from freight.cache.manager import NOTHING
from freight.engine.request import RequestState
from freight.engine.scheduler import Scheduler
from freight.errors import CapacityError, RequestError
from freight.outputs import FinishReason
from freight.pooling import PoolingParams

NewRig = Callable[..., Any]  # makes a Rig of conftest.py


# ------------------------------------------------------------------------------------------------
# chunks and budget


def test_prompt_is_cut_at_the_budget_and_samples_at_its_end_only(new_rig: NewRig) -> None:
    rig = new_rig(budget=10)
    rig.add("a", range(25), max_tokens=2)
    assert [rig.shape(step) for step in rig.run()] == [
        [("a", 0, 10, False)],
        [("a", 10, 10, False)],
        [("a", 20, 5, True)],
        [("a", 25, 1, True)],
    ]


@pytest.mark.parametrize("length", [9, 10, 11])
def test_prompt_around_the_budget(new_rig: NewRig, length: int) -> None:
    rig = new_rig(budget=10)
    rig.add("a", range(length), max_tokens=1)
    chunks = [chunk for step in rig.run() for chunk in step.chunks]
    assert [chunk.num_tokens for chunk in chunks] == ([length] if length <= 10 else [10, 1])
    assert [chunk.samples for chunk in chunks] == ([True] if length <= 10 else [False, True])


def test_a_prompt_that_is_computed_whole_waits_for_a_step_that_has_room(new_rig: NewRig) -> None:
    """And the pace of steps, which is in tokens, does not cut it."""
    rig = new_rig(budget=64, max_model_len=64, caching=False)
    rig.scheduler = Scheduler(rig.cache, 8, 64, 64, whole_prompts=True)
    for name, length in (("a", 40), ("b", 24), ("c", 30), ("d", 40)):
        rig.add(name, range(length), max_tokens=0, pooling=PoolingParams())
    shapes = []
    for _ in range(3):
        step = rig.scheduler.schedule(1)
        shapes.append(
            [(chunk.request.request_id, chunk.start, chunk.num_tokens) for chunk in step.chunks]
        )
        rig.scheduler.apply(step, {})
    assert shapes == [[("a", 0, 40), ("b", 0, 24)], [("c", 0, 30)], [("d", 0, 40)]]


def test_budget_goes_to_running_requests_first_then_first_come_first_served(
    new_rig: NewRig,
) -> None:
    rig = new_rig(budget=10)
    rig.add("a", range(4), max_tokens=8)
    rig.step()
    rig.add("b", range(20, 26), max_tokens=8)
    rig.add("c", range(30, 36), max_tokens=8)
    rig.add("d", range(40, 46), max_tokens=8)
    assert rig.shape(rig.step()) == [("a", 4, 1, True), ("b", 0, 6, True), ("c", 0, 3, False)]
    assert rig.shape(rig.step()) == [
        ("a", 5, 1, True),
        ("b", 6, 1, True),
        ("c", 3, 3, True),
        ("d", 0, 5, False),
    ]


def test_no_more_than_max_num_seqs_run(new_rig: NewRig) -> None:
    rig = new_rig(max_num_seqs=2)
    for name in "abc":
        rig.add(name, [1, 2], max_tokens=3)
    assert [c.request.request_id for c in rig.step().chunks] == ["a", "b"]
    assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (2, 1)
    rig.run()
    rig.check_all_done()


def test_budget_below_the_number_of_requests_serves_them_all(new_rig: NewRig) -> None:
    rig = new_rig(budget=1)
    for name in "abc":
        rig.add(name, [1, 2, 3], max_tokens=3)
    rig.run()
    rig.check_all_done()


def test_decode_never_waits_behind_the_prefill_of_an_earlier_request(new_rig: NewRig) -> None:
    rig = new_rig(budget=8)
    rig.add("leader", range(17), group="g", max_tokens=20)
    rig.add("sibling", range(17), group="g", index=1, max_tokens=20)
    rig.step()
    rig.step()
    rig.add("late", [1, 2], max_tokens=20)
    assert rig.shape(rig.step()) == [("leader", 16, 1, True), ("late", 0, 2, True)]
    # The leader leaves, everything cached is evicted, and the sibling, earlier than `late`, starts
    # from nothing.
    rig.scheduler.abort("leader")
    held = rig.allocator.allocate(rig.allocator.num_available)
    assert held is not None
    rig.allocator.release(held)
    assert rig.shape(rig.step()) == [("late", 2, 1, True), ("sibling", 0, 7, False)]
    assert rig.shape(rig.step()) == [("sibling", 7, 7, False), ("late", 3, 1, True)]
    assert rig.shape(rig.step()) == [("sibling", 14, 3, True), ("late", 4, 1, True)]


# ---------------------------------------------------------------------------------------------------------
# finishing


def first_tokens(new_rig: NewRig, prompt: Sequence[int], count: int) -> list[int]:
    rig = new_rig()
    rig.add("probe", prompt, max_tokens=count)
    rig.run()
    return list(rig.requests["probe"].output_token_ids)


def test_max_tokens_ends_with_length(new_rig: NewRig) -> None:
    rig = new_rig()
    request = rig.add("a", [1, 2], max_tokens=5)
    rig.run()
    assert (len(request.output_token_ids), request.finish_reason, request.stop_reason) == (
        5,
        FinishReason.LENGTH,
        None,
    )


@pytest.mark.parametrize("max_tokens", [None, 500])
def test_end_of_context_ends_with_length(new_rig: NewRig, max_tokens: int | None) -> None:
    rig = new_rig(max_model_len=12)
    request = rig.add("a", [1, 2], max_tokens=max_tokens)
    rig.run()
    assert (request.num_tokens, request.finish_reason) == (12, FinishReason.LENGTH)


def test_eos_ends_without_a_stop_reason_and_stays_in_the_output(new_rig: NewRig) -> None:
    tokens = first_tokens(new_rig, [1, 2], 3)
    rig = new_rig()
    request = rig.add("a", [1, 2], eos=[tokens[2]], max_tokens=9)
    rig.run()
    assert request.output_token_ids == tokens
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, None)


def test_named_stop_id_is_the_stop_reason_and_wins_over_the_length(new_rig: NewRig) -> None:
    tokens = first_tokens(new_rig, [1, 2], 3)
    rig = new_rig()
    request = rig.add("a", [1, 2], stop_token_ids=[tokens[2]], max_tokens=3)
    rig.run()
    assert request.output_token_ids == tokens
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, tokens[2])


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_id_that_is_also_the_models_own_is_no_stop_reason(
    new_rig: NewRig, ignore_eos: bool
) -> None:
    """The model ended by itself, whatever the request names; with ignore_eos only the request did."""
    tokens = first_tokens(new_rig, [1, 2], 3)
    rig = new_rig()
    named = {"stop_token_ids": [tokens[2]], "ignore_eos": ignore_eos}
    request = rig.add("a", [1, 2], eos=[tokens[2]], max_tokens=9, **named)
    rig.run()
    reason = tokens[2] if ignore_eos else None
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, reason)


@pytest.mark.parametrize(("min_tokens", "length"), [(0, 3), (3, 3), (4, 6)])
def test_stop_ids_count_only_once_min_tokens_are_generated(
    new_rig: NewRig, min_tokens: int, length: int
) -> None:
    tokens = first_tokens(new_rig, [1, 2], 3)
    rig = new_rig()
    request = rig.add("a", [1, 2], eos=[tokens[2]], max_tokens=6, min_tokens=min_tokens)
    rig.run()
    assert len(request.output_token_ids) == length


def test_finish_from_outside_frees_the_blocks_and_says_why(new_rig: NewRig) -> None:
    rig = new_rig()
    request = rig.add("a", range(10), max_tokens=9)
    rig.step()
    rig.scheduler.finish("a", FinishReason.STOP, "END")
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "END")
    assert rig.allocator.num_held == 0
    assert not rig.scheduler.has_unfinished


def test_apply_returns_the_requests_that_got_a_token(new_rig: NewRig) -> None:
    rig = new_rig(budget=8)
    a = rig.add("a", range(4), max_tokens=1)
    b = rig.add("b", range(9), max_tokens=2)
    step = rig.schedule()
    assert rig.scheduler.apply(step, rig.model(step)) == [a]
    step = rig.schedule()
    assert rig.scheduler.apply(step, rig.model(step)) == [b]


def test_several_tokens_of_one_step_end_at_the_one_that_ends_the_request(new_rig: NewRig) -> None:
    rig = new_rig()
    a, b = rig.add("a", [1, 2, 3], eos=[7], max_tokens=9), rig.add("b", [4], max_tokens=3)
    assert rig.scheduler.apply(rig.schedule(), {"a": [5, 6, 7, 8], "b": [1, 2, 3, 4]}) == [a, b]
    assert (a.output_token_ids, a.finish_reason) == ([5, 6, 7], FinishReason.STOP)
    assert (b.output_token_ids, b.finish_reason) == ([1, 2, 3], FinishReason.LENGTH)
    assert rig.allocator.num_held == 0


def test_a_prompt_can_be_computed_without_a_token_behind_it(new_rig: NewRig) -> None:
    rig = new_rig(budget=8, max_model_len=12)
    request = rig.add("a", range(12), max_tokens=0, prompt_logprobs=0)
    assert rig.shape(rig.step()) == [("a", 0, 8, False)]
    assert rig.shape(rig.step()) == [("a", 8, 4, False)]
    assert (request.output_token_ids, request.finish_reason) == ([], FinishReason.LENGTH)
    with pytest.raises(RequestError, match="13 tokens"):
        rig.add("b", range(13), max_tokens=0, prompt_logprobs=0)


def test_nobody_takes_up_the_blocks_of_a_request_that_failed(new_rig: NewRig) -> None:
    rig = new_rig(budget=32)
    a, b = (rig.add(name, range(12), max_tokens=9) for name in "ab")
    rig.step()
    rig.step()
    rig.scheduler.fail("a", "broken")
    rig.scheduler.fail("a", "again")  # a finished one is left alone
    assert (a.finish_reason, a.error, a.held) == (FinishReason.ERROR, "broken", NOTHING)
    c = rig.add("c", range(12), max_tokens=2)
    rig.run()
    assert (b.finish_reason, c.num_cached_tokens) == (FinishReason.LENGTH, 0)
    rig.check_all_done(failed={"a"})


def test_rebuilding_loses_no_token(new_rig: NewRig) -> None:
    """At any moment, as after an exception: the tokens decide, not what was half done."""
    rng = random.Random(3)
    for _ in range(20):
        rig = new_rig(num_blocks=16, budget=12, max_model_len=40)
        for index in range(6):
            rig.add(
                str(index),
                [rng.randrange(9) for _ in range(rng.randint(1, 20))],
                eos=[3],
                max_tokens=8,
            )
        for _ in range(rng.randint(1, 12)):
            if rig.scheduler.has_unfinished:
                rig.step()
        victim = rig.requests[str(rng.randrange(6))]
        if not victim.is_finished:  # torn between its fields and the queues
            victim.num_computed_tokens += 3
            victim.held = NOTHING
        rig.allocator._references = [9] * 16
        rig.scheduler.rebuild(rig.requests.values())
        assert rig.allocator.num_free == 16
        rig.run()
        rig.check_all_done()


# -----------------------------------------------------------------------------------------------------------
# refusal


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], {}, RequestError, "empty"),
        (range(64), {}, RequestError, "64 tokens.*max_model_len 64.*63"),
        (range(20), {"max_tokens": 13}, CapacityError, "33 tokens.*20 of prompt.*32"),
        (range(20), {"max_tokens": None}, CapacityError, "64 tokens.*32"),
    ],
)
def test_impossible_requests_are_refused_with_the_numbers(
    new_rig: NewRig,
    prompt: Sequence[int],
    params: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    rig = new_rig(num_blocks=8, block_size=4, max_model_len=64)
    with pytest.raises(error, match=message):
        rig.add("a", prompt, **params)
    assert not rig.scheduler.has_unfinished
    rig.add("a", range(20), max_tokens=12)
    rig.run()
    rig.check_all_done()


def test_an_id_is_unique_among_unfinished_requests(new_rig: NewRig) -> None:
    rig = new_rig()
    rig.add("a", [1], max_tokens=1)
    with pytest.raises(RequestError, match="'a' is in use"):
        rig.add("a", [2])
    rig.run()
    rig.add("a", [2], max_tokens=1)
    rig.run()
    rig.check_all_done()


# -------------------------------------------------------------------------------------------------------
# preemption


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_takes_the_latest_and_recomputes_the_same_tokens(
    new_rig: NewRig, caching: bool
) -> None:
    rig = new_rig(num_blocks=8, block_size=4, caching=caching, max_model_len=32)
    a = rig.add("a", range(8), max_tokens=20)
    b = rig.add("b", range(20, 28), max_tokens=20)
    c = rig.add("c", [5], max_tokens=20)
    victims = []
    while rig.scheduler.has_unfinished:
        step = rig.schedule()
        victims += [request.request_id for request in step.preempted]
        for request in step.preempted:
            assert (request.state, request.num_computed_tokens, request.held) == (
                RequestState.WAITING,
                0,
                NOTHING,
            )
        rig.scheduler.apply(step, rig.model(step))
    assert a.num_preemptions == 0
    assert victims.count("b") == b.num_preemptions > 0
    assert victims.count("c") == c.num_preemptions
    rig.check_all_done()


def test_readmitted_request_finds_its_own_blocks(new_rig: NewRig) -> None:
    rig = new_rig(num_blocks=7, block_size=4, max_model_len=28)
    rig.add("a", range(4), max_tokens=20)
    b = rig.add("b", range(20, 30), max_tokens=10)
    starts: list[int] = []
    while rig.scheduler.has_unfinished:
        was_preempted = b.num_preemptions > 0 and b.state is RequestState.WAITING
        step = rig.step()
        starts += [chunk.start for chunk in step.chunks if chunk.request is b and was_preempted]
    assert starts
    assert min(starts) > 0
    assert b.num_cached_tokens == 0  # says what the first admission found
    rig.check_all_done()


def test_preempted_request_comes_before_those_that_arrived_later(new_rig: NewRig) -> None:
    rig = new_rig(num_blocks=6, block_size=4, max_num_seqs=2, max_model_len=24)
    rig.add("a", range(8), max_tokens=12)
    b = rig.add("b", range(20, 28), max_tokens=12)
    c = rig.add("c", [1], max_tokens=2)
    while not b.num_preemptions:
        rig.step()
    while b.state is RequestState.WAITING:  # `c` would fit, and waits
        assert c.state is RequestState.WAITING
        rig.step()
    rig.run()
    rig.check_all_done()


def test_request_is_admitted_only_with_room_to_grow(new_rig: NewRig) -> None:
    rig = new_rig(num_blocks=4, block_size=4, max_model_len=16)
    rig.add("a", range(7), max_tokens=5)
    rig.add("b", range(20, 27), max_tokens=5)
    assert [chunk.request.request_id for chunk in rig.step().chunks] == ["a"]
    rig.run()
    assert rig.num_preemptions == 0
    rig.check_all_done()


# --------------------------------------------------------------------------------------------------------------
# abort


def while_waiting(rig: Any) -> None:
    assert rig.requests["a"].state is RequestState.WAITING


def in_prefill(rig: Any) -> None:
    rig.step()
    assert 0 < rig.requests["a"].num_computed_tokens < 20


def in_decode(rig: Any) -> None:
    while len(rig.requests["a"].output_token_ids) < 3:
        rig.step()


@pytest.mark.parametrize("stage", [while_waiting, in_prefill, in_decode])
@pytest.mark.parametrize("between", [False, True])
def test_abort_returns_every_block(
    new_rig: NewRig, stage: Callable[[Any], None], between: bool
) -> None:
    rig = new_rig(budget=16)
    request = rig.add("a", range(20), max_tokens=20)
    stage(rig)
    generated = len(request.output_token_ids)
    if between:
        step = rig.schedule()
        rig.scheduler.abort("a")
        assert rig.scheduler.apply(step, rig.model(step)) == []
    else:
        rig.scheduler.abort("a")
    assert (request.state, request.finish_reason) == (RequestState.FINISHED, FinishReason.ABORT)
    assert len(request.output_token_ids) == generated
    assert not rig.scheduler.has_unfinished
    rig.check_all_done()


def test_abort_of_a_preempted_request(new_rig: NewRig) -> None:
    rig = new_rig(num_blocks=6, block_size=4, max_model_len=24)
    rig.add("a", range(8), max_tokens=12)
    b = rig.add("b", range(20, 28), max_tokens=12)
    while not b.num_preemptions:
        rig.step()
    assert b.state is RequestState.WAITING
    rig.scheduler.abort("b")
    rig.run()
    rig.check_all_done()


def test_ending_what_is_finished_or_unknown_changes_nothing(new_rig: NewRig) -> None:
    rig = new_rig()
    request = rig.add("a", [1], max_tokens=1)
    rig.run()
    rig.scheduler.abort("a")
    rig.scheduler.finish("a", FinishReason.STOP, "x")
    rig.scheduler.abort("nobody")
    assert (request.finish_reason, request.stop_reason) == (FinishReason.LENGTH, None)


def test_id_reused_before_the_old_step_is_applied(new_rig: NewRig) -> None:
    rig = new_rig()
    rig.add("a", [1, 2, 3], max_tokens=5)
    step = rig.schedule()
    tokens = rig.model(step)
    rig.scheduler.abort("a")
    again = rig.add("a", [4, 5, 6], max_tokens=5)
    rig.scheduler.apply(step, tokens)
    assert again.output_token_ids == []
    rig.run()
    rig.check_all_done()


def test_a_request_that_a_window_has_no_room_for_is_refused(new_rig: NewRig) -> None:
    rig = new_rig([64, 9], block_size=16, budget=64, max_model_len=512, windows=(None, 40))
    rig.add("fits", range(80), max_tokens=64)
    with pytest.raises(CapacityError) as error:
        rig.add("b", range(100), max_tokens=100)
    for figure in (
        "grow to 200 tokens",
        "(100 of prompt)",
        "holds 144 of the 176",
        "window of 40 tokens",
    ):
        assert figure in str(error.value)
    rig.run()
    rig.check_all_done()


# ------------------------------------------------------------------------------------------------
# priorities


def test_lower_priorities_are_admitted_first_and_equal_ones_by_arrival(new_rig: NewRig) -> None:
    rig = new_rig(max_num_seqs=1)
    priorities = {"a": 0, "b": 5, "c": -1, "d": 5, "e": 0}
    for index, (name, priority) in enumerate(priorities.items()):
        rig.add(name, range(10 * index, 10 * index + 4), max_tokens=1, priority=priority)
    first = [step.chunks[0].request.request_id for step in rig.run()]
    assert first == ["c", "a", "e", "b", "d"]


def test_one_that_waits_preempts_nobody_whatever_its_priority(new_rig: NewRig) -> None:
    rig = new_rig(max_num_seqs=1)
    rig.add("a", range(4), max_tokens=3)
    rig.step()
    rig.add("b", range(10, 14), max_tokens=1, priority=-9)
    assert [rig.shape(step)[0][0] for step in rig.run()] == ["a", "a", "b"]
    assert rig.num_preemptions == 0


def test_preemption_takes_the_last_in_order(new_rig: NewRig) -> None:
    """The first that came has the highest number, so it gives up its blocks."""
    rig = new_rig(num_blocks=8, block_size=4)
    late = rig.add("low", range(8), max_tokens=20, priority=3)
    rig.step()
    early = rig.add("high", range(20, 28), max_tokens=16, priority=1)
    rig.run()
    assert late.num_preemptions > 0
    assert early.num_preemptions == 0


def test_priorities_change_no_token(new_rig: NewRig) -> None:
    rng = random.Random(3)
    outputs = []
    priorities = [rng.choice([-3, 0, 0, 2, 7]) for _ in range(24)]
    for given in ([0] * 24, priorities):
        rig = new_rig(num_blocks=24, budget=12, max_num_seqs=4)
        rng = random.Random(4)
        for index, priority in enumerate(given):
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
            rig.add(f"{index}", prompt, max_tokens=rng.randint(1, 12), priority=priority)
            if rng.random() < 0.5:
                rig.step()
        rig.run()
        outputs.append([request.output_token_ids for request in rig.requests.values()])
    assert outputs[0] == outputs[1]


def test_a_rebuild_keeps_the_order(new_rig: NewRig) -> None:
    rig = new_rig(max_num_seqs=1)
    rig.add("a", range(4), max_tokens=3, priority=2)
    rig.step()
    rig.add("b", range(10, 14), max_tokens=1, priority=1)
    rig.scheduler.rebuild(list(rig.requests.values()))
    assert [chunk.request.request_id for chunk in rig.scheduler.schedule().chunks] == ["b"]
