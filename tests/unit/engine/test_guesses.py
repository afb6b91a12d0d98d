"""How many drafts a head is asked for, and which rows it has seen."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.engine.guesses import ASSUMED, FIRST_ROW, KINDS, PAUSES, Guesses


class Rows(list[int]):
    """Features, each a number: the row's position, and 1000 more for each time it was computed."""

    def __getitem__(self, rows: slice) -> Rows:  # type: ignore[override]
        return Rows(super().__getitem__(rows))


def asked(cost: float, is_right: bool, num_tokens: int, chance: float = 0.9) -> int:
    """How often a head is asked by a request of so many tokens, whose first draft always or never comes
    true.
    """
    guesses = Guesses(cost)
    count = 0
    output: list[int] = []
    while len(output) < num_tokens:
        if guesses.wants(len(output)):
            count += 1
            guesses.propose([1], [guesses.kind_of(chance)], len(output))
        output += [1, 2] if is_right else [2]
        guesses.note(output, 5, 0, 5 + len(output))
    return count


@pytest.mark.parametrize("cost", [0.02, 0.2, 0.4])
def test_a_head_that_is_right_is_asked_at_every_step(cost: float) -> None:
    assert asked(cost, True, 1000) == 500


@pytest.mark.parametrize("cost", [0.02, 0.2, 0.4])
def test_one_that_is_never_right_is_asked_a_few_times_and_given_up(cost: float) -> None:
    count = asked(cost, False, 1000)
    assert asked(cost, False, 5000) == count
    # each of three tries ends once first drafts come true too rarely for their cost
    assert 3 <= count <= 3 * 14


def test_one_that_costs_too_much_is_never_asked() -> None:
    assert asked(ASSUMED - FIRST_ROW + 0.01, True, 1000) == 0


def test_it_rests_for_longer_each_time() -> None:
    guesses = Guesses(0.3)
    asks = []
    for num_output in range(sum(PAUSES) + 100):
        if guesses.wants(num_output):
            asks.append(num_output)
            guesses.propose([], [], num_output)  # the head gave none
    assert guesses.is_given_up
    rests = [after - before for before, after in pairwise(asks) if after > before + 1]
    assert len(rests) == len(PAUSES)
    assert rests[0] > PAUSES[0]
    assert rests[1] > PAUSES[1]


def test_drafts_that_are_likely_go_on_and_others_do_not() -> None:
    guesses = Guesses(0.1)
    likely = guesses.kind_of(0.99)
    assert guesses.goes_on([likely])
    assert guesses.goes_on([likely] * 4)
    assert not guesses.goes_on([guesses.kind_of(0.01)])
    depth = 1
    while guesses.goes_on([likely] * depth):
        depth += 1
    assert depth < 60  # each costs a pass, and is less likely than the one before


def test_a_kind_of_drafts_is_as_likely_as_it_came_true() -> None:
    guesses = Guesses(0.02)
    kind = guesses.kind_of(0.3)
    output: list[int] = []
    for step in range(200):
        guesses.propose([1], [kind], len(output))
        output.append(1 if step % 5 else 2)
        guesses.note(output, 5, 0, 5 + len(output))
    assert guesses.likely([kind]) == pytest.approx(0.8, abs=0.05)
    assert guesses.likely([KINDS - 1]) == pytest.approx(1 - 0.5 / KINDS)


def test_what_a_second_model_has_of_wrong_drafts_does_not_count() -> None:
    guesses = Guesses(0.1)
    guesses.note([], 10, 0, 0)
    guesses.num_filled = 11  # the prompt, and the first token
    output = [7]
    guesses.propose([3, 4, 5], [0, 0, 0], len(output))
    guesses.num_filled = 13  # with the first two drafts
    output += [3, 9]  # one was right
    guesses.note(output, 10, 0, 12)
    assert guesses.num_filled == 12
    guesses.note(output, 10, 1, 4)  # preempted, and four tokens were found
    assert guesses.num_filled == 4


def test_a_request_that_begins_again_has_no_rows_of_before() -> None:
    """Its blocks were given up before a token of it counted, so it was not preempted."""
    guesses = Guesses(0.1)
    guesses.note([], 10, 0, 0)
    guesses.num_filled = 10
    guesses.keep(0, Rows(range(10)))
    guesses.note([], 10, 0, 0)
    assert guesses.num_filled == 0
    assert guesses.kept == []


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6), st.booleans()), max_size=12))
def test_rows_are_taken_once_each_in_their_order(steps: Sequence[tuple[int, int, bool]]) -> None:
    """Each step computes rows, of which the last ones may be drafts that were wrong."""
    guesses = Guesses(0.1)
    guesses.note([], 100, 0, 0)
    start = 0
    taken: list[int] = []
    for number, (count, num_wrong, takes) in enumerate(steps):
        if takes:
            for part in guesses.take_kept(start):
                assert isinstance(part, Rows)
                taken += part
            guesses.num_filled = start
        known = max(1, count - num_wrong)
        guesses.keep(start, Rows([start + row + 1000 * number for row in range(count)]))
        start += known
    for part in guesses.take_kept(start):
        assert isinstance(part, Rows)
        taken += part
    assert [row % 1000 for row in taken] == list(range(start))
    assert sorted(taken, key=lambda row: row // 1000) == taken


@pytest.mark.parametrize("likeliest", [True, False])
def test_what_comes_true_more_often_is_drafted(likeliest: bool) -> None:
    guesses = Guesses(0.02)
    assert not guesses.takes_likeliest  # before anything was seen
    output: list[int] = []
    for step in range(40):
        guesses.propose([1], [0], len(output), firsts=(1, 2))
        is_first = step % 4 == 0
        output.append(1 if is_first == likeliest else 2)
        guesses.note(output, 5, 0, 5 + len(output))
    assert guesses.takes_likeliest is likeliest


def test_one_that_is_given_up_keeps_nothing() -> None:
    guesses = Guesses(ASSUMED)
    for num_output in range(sum(PAUSES) + 2):
        guesses.keep(num_output, Rows([num_output]))
        assert not guesses.wants(num_output)
    assert guesses.is_given_up
    assert guesses.kept == []
