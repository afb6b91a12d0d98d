"""Scheduler: steps that follow one under way, prefix hits, siblings, and traffic in which all
happens at once.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tests.shares import examples

from freight.cache.groups import Pages
from freight.engine.request import Request

VOCAB = 50  # of the model in conftest.py
NewRig = Callable[..., Any]  # makes a Rig of conftest.py


def test_a_step_follows_only_where_no_request_could_be_admitted_instead(new_rig: NewRig) -> None:
    rig = new_rig(max_num_seqs=2)
    rig.add("a", [1, 2], max_tokens=9)
    rig.step()
    step = rig.schedule()
    assert rig.shape(rig.scheduler.follow(step)) == [("a", 3, 1, True)]
    rig.add("b", [3, 4], max_tokens=9)
    assert rig.scheduler.follow(step) is None
    rig.scheduler.apply(step, rig.model(step))
    rig.step()
    step = rig.schedule()
    rig.add("c", [5, 6], max_tokens=9)
    assert rig.shape(rig.scheduler.follow(step)) == [
        ("a", 5, 1, True),
        ("b", 3, 1, True),
    ]  # "c" has to wait anyway
    rig.scheduler.abort("b")
    assert rig.scheduler.follow(step) is None


# -----------------------------------------------------------------------------------------------------
# prefix caching


@pytest.mark.parametrize(("length", "hits"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_cached_prompt_recomputes_at_least_its_last_token(
    new_rig: NewRig, length: int, hits: int
) -> None:
    rig = new_rig(block_size=4)
    rig.add("a", range(length), max_tokens=6)
    rig.run()
    b = rig.add("b", range(length), max_tokens=6)
    assert rig.shape(rig.step()) == [("b", hits, length - hits, True)]
    assert b.num_cached_tokens == hits
    rig.run()
    rig.check_all_done()


def test_generated_tokens_are_hits_of_the_next_turn(new_rig: NewRig) -> None:
    rig = new_rig(block_size=4)
    a = rig.add("a", range(6), max_tokens=7)
    rig.run()
    turn = [*a.prompt_token_ids, *a.output_token_ids, 1, 2, 3]
    b = rig.add("b", turn, max_tokens=2)
    rig.run()
    assert b.num_cached_tokens == 12  # of 13 tokens of the first turn, the last was never computed
    rig.check_all_done()


def test_running_requests_share_computed_blocks(new_rig: NewRig) -> None:
    rig = new_rig(block_size=4)
    a = rig.add("a", range(10), max_tokens=20)
    rig.step()
    b = rig.add("b", range(10), max_tokens=20)
    rig.step()
    assert b.held.block_ids[0][:2] == a.held.block_ids[0][:2]
    assert b.held.block_ids[0][2] != a.held.block_ids[0][2]
    rig.run()
    rig.check_all_done()


def test_blocks_are_no_hits_before_they_are_computed(new_rig: NewRig) -> None:
    rig = new_rig(block_size=4)
    rig.add("a", range(8), max_tokens=2)
    rig.add("b", range(8), max_tokens=2)
    assert rig.shape(rig.step()) == [("a", 0, 8, True), ("b", 0, 8, True)]
    rig.run()
    rig.check_all_done()


def test_salts_do_not_share(new_rig: NewRig) -> None:
    rig = new_rig()
    found = []
    for name, salt in enumerate([None, "x", "y", "x", None]):
        request = rig.add(str(name), range(9), max_tokens=1, cache_salt=salt)
        rig.run()
        found.append(request.num_cached_tokens)
    assert found == [0, 0, 0, 8, 8]


def test_prompt_logprobs_take_no_hits_and_give_some(new_rig: NewRig) -> None:
    rig = new_rig()
    for name in "ab":
        request = rig.add(name, range(9), max_tokens=1, prompt_logprobs=0)
        rig.run()
        assert request.num_cached_tokens == 0
    request = rig.add("c", range(9), max_tokens=1)
    rig.run()
    assert request.num_cached_tokens == 8


def test_without_caching_there_are_no_hits(new_rig: NewRig) -> None:
    rig = new_rig(caching=False)
    for name in "ab":
        request = rig.add(name, range(9), max_tokens=3)
        rig.run()
        assert request.num_cached_tokens == 0
    rig.check_all_done()


def test_a_window_needs_no_block_before_it_for_a_hit(new_rig: NewRig) -> None:
    rig = new_rig([64, 12], block_size=16, budget=64, max_model_len=512, windows=(None, 20))
    rig.add("a", range(400), max_tokens=2)
    rig.run()
    held = rig.cache.allocators[1].allocate(8)  # evicts what was given back first
    assert held is not None
    rig.cache.allocators[1].release(held)
    b = rig.add("b", range(400), max_tokens=2)
    rig.run()
    assert b.num_cached_tokens == 384
    c = rig.add(
        "c", range(200), max_tokens=2
    )  # its window is gone, so nothing of the other group helps
    rig.run()
    assert c.num_cached_tokens == 0
    rig.check_all_done()


# -----------------------------------------------------------------------------------------------------------
# siblings


def add_group(rig: Any, length: int, **params: Any) -> list[Request]:
    return [
        rig.add(f"g{i}", range(length), group="g", index=i, max_tokens=4, **params)
        for i in range(3)
    ]


def test_siblings_wait_for_the_prompt_and_share_its_blocks(new_rig: NewRig) -> None:
    rig = new_rig(budget=8)
    group = add_group(rig, 17)
    rig.add("other", range(30, 34), max_tokens=2)
    assert rig.shape(rig.step()) == [("g0", 0, 8, False)]
    assert rig.shape(rig.step()) == [("g0", 8, 8, False)]
    assert rig.shape(rig.step()) == [
        ("g0", 16, 1, True),
        ("other", 0, 4, True),
    ]  # later requests do not wait
    assert rig.shape(rig.step()) == [
        ("g0", 17, 1, True),
        ("other", 4, 1, True),
        ("g1", 16, 1, True),
        ("g2", 16, 1, True),
    ]
    assert group[1].held.block_ids[0][:4] == group[0].held.block_ids[0][:4]
    rig.run()
    assert [request.num_cached_tokens for request in group] == [0, 16, 16]
    rig.check_all_done()


@pytest.mark.parametrize("how", [{"caching": False}, {"length": 4}, {"prompt_logprobs": 1}])
def test_siblings_with_nothing_to_share_do_not_wait(new_rig: NewRig, how: dict[str, Any]) -> None:
    rig = new_rig(budget=64, caching=how.pop("caching", True))
    add_group(rig, how.pop("length", 9), **how)
    assert len(rig.step().chunks) == 3


def test_siblings_still_wait_when_one_of_them_leaves(new_rig: NewRig) -> None:
    rig = new_rig(budget=10)
    add_group(rig, 17)
    rig.step()
    rig.scheduler.abort("g1")
    assert rig.shape(rig.step()) == [("g0", 10, 7, True)]
    rig.run()
    assert rig.requests["g2"].num_cached_tokens == 16
    rig.check_all_done()


def test_siblings_go_on_when_the_first_leaves(new_rig: NewRig) -> None:
    rig = new_rig(budget=8)
    add_group(rig, 17)
    rig.step()
    rig.scheduler.abort("g0")
    rig.run()
    rig.check_all_done()


# ---------------------------------------------------------------------------------------------------------
# simulation


def add_random_group(rig: Any, rng: Random) -> None:
    """One to three completions of a prompt that begins as many others do."""
    name = str(len(rig.requests))
    prompt = [7] * rng.randint(0, rig.max_model_len) + [rng.randrange(VOCAB)] * rng.randint(1, 4)
    max_tokens = rng.choice([1, 5, 20, None])
    for index in range(rng.choice([1, 1, 3])):
        rig.add(
            f"{name}.{index}",
            prompt[-(rig.max_model_len - 1) :],
            group=name,
            index=index,
            eos=range(45, VOCAB),
            stop_token_ids=rng.choice([[], [44, 45]]),
            ignore_eos=rng.random() < 0.5,
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens or 4),
            cache_salt=rng.choice([None, None, "s"]),
            prompt_logprobs=rng.choice([None, None, None, 0]),
        )


@settings(max_examples=examples(100))
@given(
    rng=st.randoms(use_true_random=False),
    block_size=st.sampled_from([1, 2, 4]),
    max_model_len=st.integers(8, 40),
    spare_blocks=st.integers(0, 8),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(1, 24),
    caching=st.booleans(),
)
def test_any_traffic_ends_with_the_same_tokens_and_no_block_held(
    new_rig: NewRig,
    rng: Random,
    block_size: int,
    max_model_len: int,
    spare_blocks: int,
    max_num_seqs: int,
    budget: int,
    caching: bool,
) -> None:
    """Random limits, prompts that share prefixes, salts, siblings, aborts anywhere."""
    num_blocks = -(-max_model_len // block_size) + spare_blocks
    drive(new_rig(num_blocks, block_size, max_num_seqs, budget, max_model_len, caching), rng)


@settings(max_examples=10)
@given(
    rng=st.randoms(use_true_random=False),
    block_size=st.sampled_from([8, 16, 64, 128]),
    windows=st.sampled_from([(2,), (70,), (None, 3), (None, 30, 90)]),
    spare_blocks=st.integers(0, 8),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(6, 100),
    caching=st.booleans(),
)
def test_windows_give_blocks_back_and_change_no_token(
    new_rig: NewRig,
    rng: Random,
    block_size: int,
    windows: tuple[int | None, ...],
    spare_blocks: int,
    max_num_seqs: int,
    budget: int,
    caching: bool,
) -> None:
    """The same traffic over windows, in caches that just hold one request of the greatest length."""
    groups = [Pages((index,), 1, window, block_size) for index, window in enumerate(windows)]
    num_blocks = [group.most_blocks(150, budget) + spare_blocks for group in groups]
    drive(
        new_rig(num_blocks, block_size, max_num_seqs, budget, 150, caching, windows), rng, steps=15
    )


def drive(rig: Any, rng: Random, steps: int = 60) -> None:
    for _ in range(steps):
        if rng.random() < 0.2:
            add_random_group(rig, rng)
        step = rig.schedule()
        tokens = rig.model(step)
        if rig.requests and rng.random() < 0.05:
            rig.scheduler.abort(rng.choice(list(rig.requests)))
        rig.apply(step, tokens)
        if rig.requests and rng.random() < 0.05:
            rig.scheduler.abort(rng.choice(list(rig.requests)))
    rig.run()
    rig.check_all_done()
