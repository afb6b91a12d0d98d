"""Drafts are what a plain search finds, and how many there are follows from how often they are right."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.engine import drafts
from freight.engine.drafts import (
    ASSUMED,
    GAIN,
    LEAST,
    LENGTHS,
    LONGEST,
    MEMORY,
    MOST_TIMES,
    WEIGHT,
    Drafter,
    Forced,
)


def guess(tokens: Sequence[int], context: Sequence[int]) -> tuple[int, int] | None:
    """What followed `context` in `tokens` when it occurred last, and how many times more in a row it
    was the same.
    """
    length = len(context)
    followed = [
        tokens[place]
        for place in range(length, len(tokens))
        if tokens[place - length : place] == context
    ]
    if not followed:
        return None
    times = 0
    while times + 1 < len(followed) and followed[-2 - times] == followed[-1]:
        times += 1
    return followed[-1], min(times, MOST_TIMES)


def plain(tokens: list[int], most: int) -> tuple[int, ...]:
    """`Drafter.propose` by its definition, in quadratic time: looks through the whole text for each
    token.
    """
    right: dict[tuple[int, int], float] = {}
    every: dict[tuple[int, int], float] = {}
    for length, rate in zip(LENGTHS, ASSUMED, strict=True):
        for times in range(MOST_TIMES + 1):
            right[length, times], every[length, times] = rate * WEIGHT, WEIGHT
    for end in range(len(tokens)):
        for length in LENGTHS:
            found = guess(tokens[:end], tokens[end - length : end]) if end >= length else None
            if found is not None:
                kind = length, found[1]
                if every[kind] >= MEMORY:
                    right[kind], every[kind] = right[kind] / 2, every[kind] / 2
                every[kind] += 1
                right[kind] += found[0] == tokens[end]
    text, likely, gain = list(tokens), 1.0, 0.0
    while len(text) < len(tokens) + most:
        best = (0.0, 0)
        for length in LENGTHS:
            found = guess(tokens, text[-length:]) if len(text) >= length else None
            if found is not None:
                rate = right[length, found[1]] / every[length, found[1]]
                best = max(best, (rate, found[0]), key=lambda one: one[0])
        likely *= best[0]
        if likely < LEAST:
            break
        gain += likely
        text.append(best[1])
    return tuple(text[len(tokens) :]) if gain >= GAIN else ()


@given(
    tokens=st.lists(st.integers(0, 3), max_size=24) | st.lists(st.integers(0, 1), max_size=24),
    repeats=st.integers(1, 3),
    num_prompt=st.integers(0, 40),
    most=st.integers(1, 12),
    steps=st.lists(st.integers(1, 9), max_size=4),
    at_once=st.sampled_from([3, 2048]),
)
def test_drafts_are_those_of_the_definition(
    tokens: list[int], repeats: int, num_prompt: int, most: int, steps: list[int], at_once: int
) -> None:
    """Whatever the prompt, and however many tokens the output grows by."""
    text = tokens * repeats
    drafter, end = Drafter(text[:num_prompt]), num_prompt
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafts, "AT_ONCE", at_once)
        for step in steps:
            end = min(end + step, len(text))
            for _ in range(len(text) // at_once):  # until all is taken in
                drafter.propose(text[num_prompt:end], most)
            assert drafter.propose(text[num_prompt:end], most) == plain(text[:end], most)


def test_a_copy_of_the_prompt_is_drafted_as_far_as_asked_for() -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(1000) for _ in range(200)]
    drafter = Drafter(prompt + prompt[:20])
    for index in range(20, 60, 8):
        assert drafter.propose(prompt[20:index], 8) == tuple(prompt[index : index + 8])


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    assert Drafter([1, 2, 3] * 40).propose([1], 8) == (2, 3, 1, 2, 3, 1, 2, 3)


@pytest.mark.parametrize("seed", range(3))
def test_text_without_repetition_has_hardly_any_drafts(seed: int) -> None:
    rng = random.Random(seed)
    text = [rng.randrange(50) for _ in range(4000)]  # 2,500 pairs: most occur again, by chance
    drafter = Drafter(text[:2000])
    drafted = [len(drafter.propose(text[2000:end], 8)) for end in range(2000, 4000)]
    assert sum(drafted[200:]) < 0.01 * len(drafted)


def test_the_answer_that_is_expected_is_drafted_from_the_first_token_on() -> None:
    rng = random.Random(2)
    prompt, answer = ([rng.randrange(1000) for _ in range(50)] for _ in range(2))
    drafter = Drafter(prompt, answer)
    assert drafter.propose([], 4) == tuple(answer[:3])  # as sure as of any text at first
    assert drafter.propose(answer[:30], 4) == tuple(answer[30:34])
    changed = [*answer[:30], 5000, *answer[31:34]]
    assert drafter.propose(changed, 4) == tuple(answer[34:38])


def test_a_long_prompt_is_taken_in_over_several_steps() -> None:
    drafter = Drafter([1, 2, 3, 4] * 500)
    calls = [drafter.propose([], 4) for _ in range(4)]
    assert calls == [(), (), (), (1, 2, 3, 4)]


def test_of_a_very_long_prompt_the_end_is_taken_in() -> None:
    drafter = Drafter([*range(100, 200)] * 400)
    calls = [drafter.propose([], 4) for _ in range(LONGEST // drafts.AT_ONCE)]
    assert calls[-2:] == [(), (100, 101, 102, 103)]


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    """Counted as lines run would be slow: the time of the second half against that of the first."""
    text = [index * 7919 % 5000 for index in range(40000)]
    drafter, seconds = Drafter(()), []
    for half in (text[:20000], text[20000:]):
        began = time.process_time()
        for token in half:
            drafter._take(token)
        seconds.append(time.process_time() - began)
    assert seconds[1] < 5 * seconds[0]


class Grammar:
    """A matcher of which one text is left, in these tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.asked = tokens, 0

    def forced(self, output: Sequence[int]) -> tuple[int, ...]:
        self.asked += 1
        return tuple(self.tokens[len(output) :])


def test_a_forced_text_is_asked_for_once() -> None:
    grammar = Grammar(list(range(3000)))
    drafts, output = Forced(cast(Any, grammar)), []
    while len(output) < 3000:
        proposed = drafts.propose(output, 8)
        assert proposed == tuple(range(len(output), min(len(output) + 8, 3000)))
        output += [*proposed, *range(len(output) + 8, len(output) + 9)]
    assert grammar.asked == 1


def test_a_forced_text_that_the_model_writes_otherwise_is_not_drafted_for_long() -> None:
    grammar = Grammar([1] * 400)
    drafts = Forced(cast(Any, grammar))
    proposed = [bool(drafts.propose([2] * length, 8)) for length in range(100)]
    assert proposed[0]
    assert sum(proposed) < 20
    assert not any(proposed[30:])
    # and again once it does
    output = [2] * 100
    found = []
    for _ in range(200):
        found.append(drafts.propose(output, 8))
        output.append(1)
    assert found[-1] == (1,) * 8
