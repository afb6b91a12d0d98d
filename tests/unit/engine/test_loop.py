"""The server's loop tells tokens at a pace: everything, nothing twice, first tokens and ends at
once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.engine.fakes import params_of, prompt_of

from freight import LLM, SamplingParams
from freight.engine import loop
from freight.engine.loop import Loop
from freight.engine.messages import (
    Abort,
    Accepted,
    Action,
    Add,
    Change,
    Changed,
    Command,
    Event,
    Stepped,
    Stop,
)
from freight.outputs import RequestDelta, StoreStats

STEP = 0.25  # seconds of the fake clock that every step takes


class Run:
    """A loop over the fake engine. `commands` by the number of steps that were computed before
    them.
    """

    def __init__(
        self, llm: LLM, events_per_second: float, commands: dict[int, list[Command]]
    ) -> None:
        self.engine: Any = llm.engine
        self.events: list[tuple[float, Event]] = []
        self.commands: SimpleQueue[Command] = SimpleQueue()
        self._later = dict(commands)
        self._clock = self.engine.clock
        self._steps = 0
        self._put()
        runner = self.engine.runner
        runner.fails = lambda slices: self._stepped()
        Loop(self.engine, self.commands, self._emit, self._clock, events_per_second).run()

    def _put(self) -> None:
        for command in self._later.pop(self._steps, []):
            self.commands.put(command)

    def _stepped(self) -> None:
        self._steps += 1
        self._clock.now += STEP
        self._put()

    def _emit(self, event: Event) -> None:
        self.events.append((self._clock.now, event))
        if not self.engine.has_unfinished and not self._later:
            self.commands.put(Stop())

    @property
    def told(self) -> list[tuple[float, RequestDelta]]:
        return [
            (at, delta)
            for at, event in self.events
            if isinstance(event, Stepped)
            for delta in event.deltas
        ]

    @property
    def ends(self) -> list[tuple[float, str]]:
        """When the end of each request was told, in order."""
        return sorted((at, delta.request_id) for at, delta in self.told if delta.finished)

    @property
    def texts(self) -> dict[tuple[str, int], tuple[Any, ...]]:
        """All that deltas say of each completion."""
        said: dict[tuple[str, int], tuple[Any, ...]] = {}
        for _, delta in self.told:
            for one in delta.outputs:
                ids, text, scores, _ = said.get((delta.request_id, one.index), ([], "", [], None))
                new = (
                    ids + one.token_ids,
                    text + one.text,
                    scores + (one.logprobs or []),
                    one.finish_reason,
                )
                said[delta.request_id, one.index] = new
        return said


def add(name: str, prompt: list[int], params: SamplingParams) -> Add:
    return Add(name, None, tuple(prompt), params)


def test_what_is_told_is_the_same_at_any_pace(new_llm: Callable[..., LLM]):
    rng = random.Random(3)
    for _ in range(20):
        requests = [(prompt_of(rng), params_of(rng)) for _ in range(6)]
        commands: dict[int, list[Command]] = {}
        for number, (prompt, params) in enumerate(requests):
            at = 0 if number == 0 else rng.randrange(4)
            commands.setdefault(at, []).append(add(str(number), prompt, params))
        every = Run(new_llm(), 0.0, commands)
        paced = Run(new_llm(), 1.0, commands)
        assert paced.texts == every.texts
        assert paced.ends == every.ends
        for run in (every, paced):
            steps = [
                step
                for _, event in run.events
                if isinstance(event, Stepped)
                for step in event.steps
            ]
            assert sum(tokens for _, tokens in steps) == run.engine.num_computed_tokens
            assert all(seconds == STEP for seconds, _ in steps)


def alone(
    new_llm: Callable[..., LLM], pace: float, *others: tuple[int, Command]
) -> list[tuple[float, int]]:
    """When tokens of a request of 20 tokens were told, and how many at once."""
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    commands: dict[int, list[Command]] = {0: [add("a", [1, 2], params)]}
    for at, command in others:
        commands.setdefault(at, []).append(command)
    run = Run(new_llm(), pace, commands)
    return [
        (at, len(delta.outputs[0].token_ids)) for at, delta in run.told if delta.request_id == "a"
    ]


def test_the_first_token_and_the_end_come_at_once_and_what_lies_between_at_the_pace(
    new_llm: Callable[..., LLM],
):
    assert alone(new_llm, 1.0) == [(0.25, 1), (1.25, 4), (2.25, 4), (3.25, 4), (4.25, 4), (5.0, 3)]


def test_without_a_pace_every_step_is_told(new_llm: Callable[..., LLM]):
    assert alone(new_llm, 0.0) == [(STEP * (n + 1), 1) for n in range(20)]


def test_a_new_request_may_take_a_long_step_so_what_is_known_is_told_before(
    new_llm: Callable[..., LLM],
):
    other = add("b", [1] * 20, SamplingParams(max_tokens=1))
    told = alone(new_llm, 0.2, (3, other))
    assert told[:2] == [(0.25, 1), (0.75, 2)]


def short(name: str, max_tokens: int = 3) -> Add:
    return add(
        name, [1, 2], SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    )


def test_an_end_tells_of_its_request_alone_and_delays_no_other(new_llm: Callable[..., LLM]):
    others = (0, short("b", 2)), (0, short("c", 3)), (0, short("d", 7))
    assert alone(new_llm, 1.0, *others) == alone(new_llm, 1.0)


def test_an_end_tells_everybody_if_a_request_that_waits_may_begin(new_llm: Callable[..., LLM]):
    two = partial(new_llm, max_num_seqs=2)
    told = alone(two, 1.0, (0, short("b")), (0, short("c")))
    assert told[:3] == [(0.25, 1), (0.75, 2), (1.75, 4)]


def test_requests_that_come_together_are_accepted_together(new_llm: Callable[..., LLM]):
    run = Run(new_llm(), 1.0, {0: [short("a"), short("b")], 1: [short("c")]})
    accepted = [event for _, event in run.events if isinstance(event, Accepted)]
    assert accepted == [Accepted(["a", "b"]), Accepted(["c"])]


def test_nothing_is_told_of_a_request_that_was_aborted(new_llm: Callable[..., LLM]):
    assert alone(new_llm, 0.2, (3, Abort("a"))) == [(0.25, 1)]
    run = Run(new_llm(), 1.0, {0: [add("a", [1], SamplingParams(max_tokens=1))]})
    assert [event for _, event in run.events if isinstance(event, Accepted)] == [Accepted(["a"])]


def test_what_a_store_does_while_nothing_runs_is_reported(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loop, "STATS_EVERY", 0.01)
    engine: Any = new_llm().engine
    stored = [0, 0, 4096]  # bytes whenever the loop asks
    engine.store = SimpleNamespace(
        stats=lambda: StoreStats(disk_bytes=stored.pop(0) if len(stored) > 1 else stored[0])
    )
    commands: SimpleQueue[Command] = SimpleQueue()
    told: list[int] = []

    def emit(event: Any) -> None:
        told.append(event.store.disk_bytes)
        if told[-1]:
            commands.put(Stop())

    Loop(engine, commands, emit).run()
    assert told == [0, 4096]  # and nothing while nothing changes


def test_a_request_that_a_change_ends_at_once_was_accepted_before(new_llm: Callable[..., LLM]):
    commands: SimpleQueue[Command] = SimpleQueue()
    for command in (
        add("a", [1, 2], SamplingParams(max_tokens=5)),
        Change("1", Action.END_ALL, ""),
        Stop(),
    ):
        commands.put(command)
    events: list[Event] = []
    renewal: Any = SimpleNamespace(fingerprint=lambda: "fp", level=0)
    Loop(new_llm().engine, commands, events.append, renewal=renewal).run()
    kinds = []
    for event in events:
        if isinstance(event, Accepted) or (isinstance(event, Stepped) and event.deltas):
            kinds.append(type(event))
    assert kinds == [Accepted, Stepped]


def test_a_change_that_fails_in_a_way_nobody_foresaw_is_an_error_of_that_change(
    new_llm: Callable[..., LLM],
):
    commands: SimpleQueue[Command] = SimpleQueue()
    commands.put(Change("1", Action.UPDATE, "x" * 5000))
    commands.put(Change("2", Action.END_ALL, ""))
    commands.put(Stop())

    def update(model: str) -> None:
        raise OSError("File name too long")

    events: list[Event] = []
    renewal: Any = SimpleNamespace(fingerprint=lambda: "fp", level=0, update=update)
    Loop(new_llm().engine, commands, events.append, renewal=renewal).run()
    errors = [event.error for event in events if isinstance(event, Changed)]
    assert str(errors[0]) == "it failed: OSError: 'File name too long'"
    assert errors[1] is None
