"""An exception at any line of the engine leaves it as if the call had not been made."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.drafters import KINDS, Told
from tests.unit.engine.fakes import VOCAB, check_clean, essence, params_of, prompt_of

from freight import LLM, SamplingParams
from freight.engine import compute

SOURCES = {
    str(Path(compute.__file__).parent / f"{name}.py")
    for name in ("engine", "scheduler", "progress", "compute", "ahead")
}
SOURCES.add(str(Path(compute.__file__).parents[1] / "cache" / "blocks.py"))


class Interrupt(BaseException):
    """What a signal handler raises."""


class Interrupter:
    """Raises Interrupt at the `at`-th line that runs in the engine's sources; counts them
    otherwise.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at, self.count = at, 0

    def __enter__(self) -> Interrupter:
        self._outer = sys.gettrace()  # of coverage.py, which counts on with it
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._outer)

    def _trace(self, frame: Any, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in SOURCES:
            return None
        if event == "line":
            self.count += 1
            if self.count == self.at:
                raise Interrupt
        return self._trace


def scenario(llm: LLM, rng: random.Random) -> Callable[[], Any]:
    """A batch larger than the cache holds at once, so that it preempts."""
    prompts = [prompt_of(rng) for _ in range(7)]
    params = [params_of(rng) for _ in prompts]
    return lambda: llm.generate(prompts, params)


@pytest.mark.parametrize(("seed", "count"), [(2, 14), pytest.param(3, 60, marks=pytest.mark.slow)])
def test_an_exception_at_any_line_leaves_the_engine_as_if_the_call_had_not_been_made(
    new_llm: Callable[..., LLM], seed: int, count: int
):
    """… also for a stream that was under way: it goes on with the same tokens, text and
    log-probabilities.
    """
    limits = {"num_blocks": 12, "budget": 12, "max_model_len": 40}
    run = scenario(new_llm(**limits), random.Random(1))
    expected = essence(run())
    of_stream = SamplingParams(max_tokens=12, seed=4, logprobs=1, n=2, stop="_")
    whole = list(new_llm(**limits).stream([1, 2, 1, 2, 0], of_stream))[-1]

    with Interrupter() as counter:
        scenario(new_llm(**limits), random.Random(1))()
    assert counter.count > 5000
    for at in random.Random(seed).sample(range(1, counter.count + 1), count):
        llm = new_llm(**limits)
        run = scenario(llm, random.Random(1))
        stream = llm.stream([1, 2, 1, 2, 0], of_stream)
        outputs = [next(stream), next(stream)]
        try:
            with Interrupter(at):
                run()
        except Interrupt:
            pass
        llm.engine.release("-")
        assert len(llm.engine.groups) == 1, at  # the stream's
        outputs += stream
        assert essence([outputs[-1]]) == essence([whole]), at
        assert essence(run()) == expected, at
        check_clean(llm)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_at_any_line_of_steps_with_drafts(new_llm: Callable[..., LLM], kind: str):
    limits = {"num_blocks": 12, "budget": 12, "max_model_len": 40}
    expected = scenario(new_llm(**limits), random.Random(1))()

    def drafting() -> Callable[[], Any]:
        llm, rng = new_llm(**limits, most_drafts=6), random.Random(2)

        def drafters(prompt: Any, params: SamplingParams) -> list[Told]:
            answers = [
                one.token_ids
                for request in expected
                if request.prompt_token_ids == list(prompt.token_ids)
                for one in request.outputs
            ]
            return [Told(answers, kind, rng, VOCAB) for _ in range(params.n)]

        llm.engine.drafters = drafters  # type: ignore[assignment,method-assign]
        return scenario(llm, random.Random(1))

    with Interrupter() as counter:
        assert essence(drafting()()) == essence(expected)
    for at in random.Random(3).sample(range(1, counter.count + 1), 12):
        run = drafting()
        try:
            with Interrupter(at):
                run()
        except Interrupt:
            pass
        assert essence(run()) == essence(expected), at


def test_an_exception_while_a_stream_is_read_or_left(new_llm: Callable[..., LLM]):
    params = SamplingParams(max_tokens=9, seed=4, n=2, logprobs=0)
    llm = new_llm()
    expected = essence(llm.generate([[1, 2, 1], [2, 2]], params))
    with Interrupter() as counter:
        list(new_llm().stream([0, 1, 2], params))
    for at in random.Random(5).sample(range(1, counter.count + 1), 60):
        stream = llm.stream([0, 1, 2], params)
        try:
            with Interrupter(at):
                next(stream)
                next(stream)
                stream.close()
        except Interrupt:
            stream.close()
        check_clean(llm)
        assert essence(llm.generate([[1, 2, 1], [2, 2]], params)) == expected
        check_clean(llm)
