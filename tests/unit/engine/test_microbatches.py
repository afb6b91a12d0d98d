"""Several steps under way at once, each of a part of the requests, as devices that divide the layers
need them: the same tokens, and no device waits for another's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.engine.fakes import FakeRunner, check_clean, essence, prompt_of
from tests.unit.engine.test_ahead import look_at, plain_params, runner_of

from freight import LLM, SamplingParams
from freight.engine import ahead
from freight.engine.ahead import Launched
from freight.engine.prepare import SequenceSlice
from freight.engine.step import Mode

LONG = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("seed", range(12))
def test_microbatches_have_the_same_tokens_and_leave_nothing_behind(
    new_llm: Callable[..., LLM], seed: int
) -> None:
    """Also where a microbatch preempts requests of another, whose step is under way."""
    preemptions = []
    found = []
    for mode, number in ((Mode.REPEATABLE, 1), (Mode.OVERLAPPED, 2), (Mode.OVERLAPPED, 4)):
        rng = random.Random(seed)
        llm = new_llm(
            num_blocks=rng.choice([12, 16, 24]),
            max_num_seqs=rng.choice([4, 7]),
            budget=rng.choice([8, 16]),
            max_model_len=40,
            mode=mode,
            num_microbatches=number,
        )
        prompts = [prompt_of(rng) for _ in range(12)]
        params = [plain_params(rng) for _ in prompts]
        first = llm.generate(prompts, params)
        longer = [[*one.prompt_token_ids, *one.outputs[0].token_ids][:30] for one in first]
        found.append([essence(first), essence(llm.generate(longer, params))])
        check_clean(llm)
        preemptions.append(llm.engine.stats().preemptions)
    assert found[0] == found[1] == found[2]
    assert max(preemptions) > 0


def test_requests_are_divided_evenly(new_llm: Callable[..., LLM]) -> None:
    engine = new_llm(
        mode=Mode.OVERLAPPED, num_microbatches=3, max_num_seqs=8, num_blocks=100
    ).engine
    for index in range(8):
        engine.add(str(index), engine.accept([1, 2, index % 3], LONG), LONG)
    for _ in range(3):
        engine.step()
    sizes = [0, 0, 0]
    for group in engine.groups.values():
        sizes[group.completions[0].request.microbatch] += 1
    assert sorted(sizes) == [2, 3, 3]


def test_a_request_alone_waits_for_nobody(new_llm: Callable[..., LLM]) -> None:
    """It has a token in each step, as with one microbatch."""
    llm = new_llm(mode=Mode.OVERLAPPED, num_microbatches=4)
    engine = llm.engine
    engine.add("0", engine.accept([1, 2, 0], LONG), LONG)
    steps = 0
    while engine.has_unfinished:
        assert engine.step()
        steps += 1
    assert steps == LONG.max_tokens


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_step_of_every_other_microbatch_is_queued_behind_the_one_that_is_waited_for(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """When tokens are read, so many steps of others are queued that a pipeline of as many stages
    has work for each: this step's, and one of each other microbatch before this one's next.
    """
    behind: list[int] = []
    read = Launched.read

    def logged_read(launched: Launched) -> Any:
        waiting = [lookahead._launched for lookahead in engine._lookaheads]
        behind.append(sum(other is not None and other is not launched for other in waiting))
        return read(launched)

    monkeypatch.setattr(Launched, "read", logged_read)
    llm = new_llm(mode=Mode.OVERLAPPED, num_microbatches=number, max_num_seqs=6, num_blocks=100)
    engine = llm.engine
    llm.generate([[1, 2, index % 3] for index in range(6)], LONG)
    assert runner_of(engine).num_ahead > 10
    middle = behind[3 * number : -3 * number]
    assert set(middle) == {number - 1}


def test_prompts_of_all_microbatches_are_launched_before_one_is_waited_for(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what follows a prompt, before its first token is known."""
    happened: list[str] = []
    run, read = FakeRunner.run, Launched.read

    def logged_run(self: Any, slices: Sequence[SequenceSlice], tokens: Any = None) -> Any:
        happened.append("prompt" if len(slices[0].token_ids) > 1 else "token")
        return run(self, slices, tokens)

    def logged_read(launched: Launched) -> Any:
        happened.append("read")
        return read(launched)

    monkeypatch.setattr(FakeRunner, "run", logged_run)
    monkeypatch.setattr(Launched, "read", logged_read)
    llm = new_llm(mode=Mode.OVERLAPPED, num_microbatches=2, budget=64)
    llm.generate([[1, 2, 0], [1, 2, 1]], LONG)
    assert happened[:8] == ["prompt", "prompt", "token", "read", "token", "read", "token", "read"]


def test_a_prompt_whose_draw_may_have_to_be_repeated_is_computed_once(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a nucleus only so much is looked at; a token is computed again for it, a prompt is not."""
    look_at(monkeypatch, 1)
    llm = new_llm(mode=Mode.OVERLAPPED, num_microbatches=2)
    params = SamplingParams(temperature=1.0, top_p=0.99, max_tokens=1, seed=1)
    llm.generate([[1, 2, 0], [1, 2, 1]], params)
    assert len(runner_of(llm.engine).sizes) == 2


class Line:
    """Devices in a row, each of which takes a second for a step, in the time of a clock of their own.
    A launched step waits for the tokens that it takes, and the host for those that it reads.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_devices: int) -> None:
        self.host = 0.0
        self.free = [0.0] * num_devices
        self.num_steps = 0
        self.ends: dict[int, float] = {}  # by the id of a step that was launched
        self._kept: list[Launched] = []
        launch, read = ahead._launch, Launched.read

        def timed_launch(runner: Any, step: Any, before: Launched | None) -> Launched:
            launched = launch(runner, step, before)
            given = 0.0 if before is None else self.ends[id(before)]
            self._kept.append(launched)
            self.ends[id(launched)] = self.run(max(self.host, given))
            return launched

        def timed_read(launched: Launched) -> Any:
            self.host = max(self.host, self.ends[id(launched)])
            return read(launched)

        monkeypatch.setattr(ahead, "_launch", timed_launch)
        monkeypatch.setattr(Launched, "read", timed_read)

    def run(self, at: float) -> float:
        """Return the time at which a step that may begin at `at` ends."""
        self.num_steps += 1
        for index, free in enumerate(self.free):
            at = max(at, free) + 1.0
            self.free[index] = at
        return at


@pytest.mark.parametrize(
    ("devices", "microbatches", "least", "most"),
    [(1, 1, 0.99, 1.0), (2, 1, 0.49, 0.51), (2, 2, 0.97, 1.0), (4, 4, 0.9, 1.0)],
)
def test_devices_do_not_wait_for_each_other(
    new_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    devices: int,
    microbatches: int,
    least: float,
    most: float,
) -> None:
    """The share of the time in which each of them computes."""
    line = Line(monkeypatch, devices)
    limits = {"max_num_seqs": 8, "num_blocks": 400, "budget": 64, "max_model_len": 160}
    llm = new_llm(mode=Mode.OVERLAPPED, num_microbatches=microbatches, **limits)
    params = replace(LONG, max_tokens=150)
    llm.generate([[1, 2, index % 3] for index in range(8)], params)
    assert least <= line.num_steps / line.host <= most


def test_a_chunk_of_a_prompt_that_goes_on_takes_no_token_of_the_requests_behind_it(
    new_llm: Callable[..., LLM],
) -> None:
    """A request that comes before others by its priority has its prompt cut, while they have tokens."""
    late = replace(LONG, priority=-1)
    found = []
    for mode, number in ((Mode.REPEATABLE, 1), (Mode.OVERLAPPED, 2)):
        llm = new_llm(mode=mode, num_microbatches=number, budget=8, num_blocks=100)
        engine = llm.engine
        engine.intake = replace(engine.intake, priorities=True)
        prompts = {"0": [1, 2, 0], "1": [1, 2, 1], "late": list(range(3, 33)), "2": [1, 2, 2]}
        params = dict.fromkeys(prompts, LONG) | {"late": late}
        for name in ("0", "1"):
            engine.add(name, engine.accept(prompts[name], params[name]), params[name])
        for _ in range(4):
            engine.step()
        for name in ("late", "2"):
            engine.add(name, engine.accept(prompts[name], params[name]), params[name])
        while engine.has_unfinished:
            engine.step()
        found.append({name: engine.output(name).outputs[0].token_ids for name in prompts})
    assert found[0] == found[1]


def test_a_request_that_was_preempted_has_its_steps_launched_ahead(
    new_llm: Callable[..., LLM],
) -> None:
    """What is launched for it after that is wanted."""
    llm = new_llm(mode=Mode.OVERLAPPED, num_microbatches=1, num_blocks=100)
    engine = llm.engine
    engine.add("0", engine.accept([1, 2, 0], LONG), LONG)
    engine.step()
    engine.scheduler.preempt_latest()
    while engine.has_unfinished:
        engine.step()
    assert engine.stats().preemptions == 1
    assert len(runner_of(engine).sizes) == LONG.max_tokens  # none was computed again
