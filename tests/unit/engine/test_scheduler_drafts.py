"""Drafts in the scheduler: whose they are, what they take, and that they change nothing else."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.drafters import KINDS, Told
from tests.unit.engine.conftest import VOCAB, expected_tokens
from tests.unit.engine.test_scheduler_sharing import drive

from freight.cache.groups import Pages

NewRig = Callable[..., Any]


def drafting(new_rig: NewRig, kind: str, most_drafts: int, rng: Random, **limits: Any) -> Any:
    """A rig whose requests have drafters that know what is drawn."""
    rig: Any

    def drafter(request: Any) -> Told:
        answer = expected_tokens(request, rig.max_model_len, rig.windows)
        return Told([answer], kind, rng, VOCAB)

    rig = new_rig(most_drafts=most_drafts, drafter=drafter, **limits)
    return rig


def shapes(rig: Any) -> list[list[tuple[str, int, int]]]:
    """By step: request, first position, and how many tokens are drafted."""
    return [
        [(c.request.request_id, c.start, len(c.drafts)) for c in step.chunks] for step in rig.run()
    ]


def test_drafts_that_come_true_shorten_a_request(new_rig: NewRig) -> None:
    rig = drafting(new_rig, "right", 4, Random(1))
    rig.add("a", [1, 2, 3], max_tokens=12)
    assert shapes(rig) == [[("a", 0, 0)], [("a", 3, 4)], [("a", 8, 4)], [("a", 13, 0)]]
    rig.check_all_done()
    assert (rig.scheduler.totals.drafted, rig.scheduler.totals.accepted) == (8, 8)
    assert rig.scheduler.totals.drafted_by == rig.scheduler.totals.accepted_by == {"text": 8}
    assert rig.scheduler.totals.generated == 12


def test_drafts_that_do_not_cost_no_step(new_rig: NewRig) -> None:
    rig = drafting(new_rig, "wrong", 4, Random(1))
    rig.add("a", [1, 2, 3], max_tokens=6)
    assert [step[0][1] for step in shapes(rig)] == [0, 3, 4, 5, 6, 7]
    rig.check_all_done()
    assert rig.scheduler.totals.accepted == 0


def test_drafts_end_with_the_tile_of_the_known_token(new_rig: NewRig) -> None:
    rig = drafting(new_rig, "right", 8, Random(1), draft_tile=16)
    rig.add("a", [1, 2, 3], max_tokens=30)
    assert shapes(rig) == [
        [("a", 0, 0)],
        [("a", 3, 8)],
        [("a", 12, 3)],
        [("a", 16, 8)],
        [("a", 25, 6)],
    ]
    rig.check_all_done()


def test_behind_the_last_token_of_a_tile_there_are_no_drafts(new_rig: NewRig) -> None:
    rig = drafting(new_rig, "wrong", 8, Random(1), draft_tile=16)
    rig.add("a", [1, 2, 3], max_tokens=40)
    for step in shapes(rig):
        for _, start, count in step:
            assert count == 0 or start // 16 == (start + count) // 16
            if start % 16 == 15:
                assert count == 0
    rig.check_all_done()


@pytest.mark.parametrize(("max_tokens", "drafted"), [(2, 0), (3, 1), (4, 2), (9, 4)])
def test_never_beyond_max_tokens(new_rig: NewRig, max_tokens: int, drafted: int) -> None:
    rig = drafting(new_rig, "right", 4, Random(1))
    rig.add("a", [1, 2, 3], max_tokens=max_tokens)
    assert shapes(rig)[1] == [("a", 3, drafted)]
    rig.check_all_done()


def test_never_beyond_the_context_or_the_tokens_of_a_step(new_rig: NewRig) -> None:
    rig = drafting(new_rig, "right", 8, Random(1), max_model_len=9, budget=5)
    rig.add("a", [1, 2, 3, 4], max_tokens=None)
    assert shapes(rig)[1] == [("a", 4, 3)]
    rig = drafting(new_rig, "right", 8, Random(1), budget=5)
    rig.add("a", [1, 2, 3, 4], max_tokens=9)
    assert shapes(rig)[1] == [("a", 4, 4)]


def test_none_beside_a_prompt_nor_in_a_large_step(new_rig: NewRig) -> None:
    rig = drafting(new_rig, "right", 3, Random(1), budget=16)
    rig.add("a", [1, 2, 3], max_tokens=20)
    rig.step()
    rig.add("b", [4, 5, 6, 7], max_tokens=20)
    assert [len(c.drafts) for c in rig.step().chunks] == [0, 0]  # b's prompt
    assert [len(c.drafts) for c in rig.step().chunks] == [1, 1]  # shared
    for name in "cd":
        rig.add(name, [8, 9], max_tokens=20)
    rig.step()
    assert [len(c.drafts) for c in rig.step().chunks] == [0, 0, 0, 0]
    rig.run()
    rig.check_all_done()


def test_blocks_of_drafts_are_given_back_before_others_need_them(new_rig: NewRig) -> None:
    """Four blocks of four tokens: drafts may take the last ones, and preempt nobody."""
    for kind in ("right", "wrong"):
        rig = drafting(new_rig, kind, 6, Random(1), num_blocks=4, max_model_len=16)
        rig.add("a", [1, 2, 3], max_tokens=4)
        rig.add("b", [4, 5, 6], max_tokens=4)
        rig.run()
        rig.check_all_done()
        assert rig.num_preemptions == 0


def test_only_what_was_drawn_is_indexed(new_rig: NewRig) -> None:
    """The block of wrong drafts is found by nobody; that of right ones is, once they are drawn."""
    for kind, found in (("wrong", 0), ("right", 1)):
        rig = drafting(new_rig, kind, 8, Random(1), block_size=4)
        request = rig.add("a", [1, 2, 3], max_tokens=20)
        rig.step()
        step = rig.schedule()
        assert len(step.chunks[0].drafts) == 8
        allocator = rig.allocator
        before = len(allocator._index)
        rig.apply(step, rig.model(step))
        assert (len(allocator._index) - before) == {0: 1, 1: 3}[found]
        assert len(allocator._index) == request.num_computed_tokens // 4


@settings(max_examples=60)
@given(
    rng=st.randoms(use_true_random=False),
    kind=st.sampled_from(KINDS),
    most_drafts=st.integers(1, 12),
    block_size=st.sampled_from([1, 2, 4]),
    max_model_len=st.integers(8, 40),
    spare_blocks=st.integers(0, 8),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(1, 24),
    caching=st.booleans(),
)
def test_any_traffic_ends_with_the_same_tokens(
    new_rig: NewRig,
    rng: Random,
    kind: str,
    most_drafts: int,
    block_size: int,
    max_model_len: int,
    spare_blocks: int,
    max_num_seqs: int,
    budget: int,
    caching: bool,
) -> None:
    """Shared prefixes, salts, siblings, stops, preemption and aborts, in caches that are just large
    enough.
    """
    rig = drafting(
        new_rig,
        kind,
        most_drafts,
        rng,
        num_blocks=-(-max_model_len // block_size) + spare_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        budget=budget,
        max_model_len=max_model_len,
        caching=caching,
    )
    drive(rig, rng)


@settings(max_examples=10)
@given(
    rng=st.randoms(use_true_random=False),
    kind=st.sampled_from(KINDS),
    windows=st.sampled_from([(2,), (70,), (None, 3), (None, 30, 90)]),
    budget=st.integers(9, 100),
)
def test_windows(
    new_rig: NewRig, rng: Random, kind: str, windows: tuple[int | None, ...], budget: int
) -> None:
    groups = [Pages((index,), 1, window, 8) for index, window in enumerate(windows)]
    num_blocks = [group.most_blocks(150, budget) + 2 for group in groups]
    limits = {"num_blocks": num_blocks, "block_size": 8, "max_model_len": 150, "windows": windows}
    drive(drafting(new_rig, kind, 8, rng, budget=budget, **limits), rng, steps=15)
