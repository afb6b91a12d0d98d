"""Ctrl-C at any moment: an alarm whose handler raises, at random times over adding, generating and
streaming.

Whatever it hits, the LLM is as if that call had not been made, and the next answer is the same to
the bit.
"""

from __future__ import annotations

import gc
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from freight import LLM, SamplingParams

pytestmark = pytest.mark.clock

BASE = Path(__file__).parents[1] / "fixtures" / "base_bf16"
SHORT = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, ignore_eos=True, detokenize=False)


class Alarm(BaseException):
    pass


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """alarm(seconds): raises Alarm in this thread then; 0 takes it back.

    Without what hypothesis has the garbage collector call: Python drops an Alarm that is raised in
    there.
    """

    def ring(signum: int, frame: object) -> None:
        raise Alarm

    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    before = signal.signal(signal.SIGALRM, ring)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    gc.callbacks[:] = callbacks


def new_llm() -> LLM:
    """A cache that the batch below outgrows, so that requests are preempted."""
    return LLM(
        str(BASE),
        skip_tokenizer_init=True,
        kv_cache_memory="88KiB",
        max_model_len=40,
        max_num_seqs=6,
        block_size=8,
    )


def prompts(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(3, 60) for _ in range(rng.randint(1, 24))] for _ in range(8)]


def essence(outputs: list[Any]) -> list[Any]:
    return [(output.outputs, output.finished) for output in outputs]


@pytest.mark.parametrize("count", [40, pytest.param(5000, marks=pytest.mark.slow)])
def test_alarms_at_random_moments(alarm: Callable[[float], None], count: int):
    rng = random.Random(count)
    llm = new_llm()
    batch = prompts(rng)
    longer = [
        SamplingParams(temperature=0.0, max_tokens=14, seed=i, n=1 + i % 2, detokenize=False)
        for i in range(8)
    ]
    preemptions = []
    preempt = llm.engine.scheduler.preempt_latest
    llm.engine.scheduler.preempt_latest = lambda: preemptions.append(preempt()) or preemptions[-1]  # type: ignore[method-assign]

    def generate() -> object:
        return essence(llm.generate(batch, longer))

    def two_streams() -> object:
        pair = [llm.stream(prompt, SHORT) for prompt in batch[:2]]
        return [essence(list(outputs))[-1] for outputs in zip(*pair, strict=True)]

    def generate_short() -> object:
        return essence(llm.generate(batch, SHORT))

    calls = [generate, two_streams, generate_short]
    expected = [call() for call in calls]
    lengths = []
    for call in calls:
        begin = time.perf_counter()
        call()
        lengths.append(time.perf_counter() - begin)
    assert preemptions
    hits = 0
    kept = llm.stream(batch[3], longer[0])  # lives through it all, a token at a time
    alive = [next(kept)]
    for index in range(count):
        which = rng.randrange(len(calls))
        try:
            begin = time.perf_counter()
            alarm(max(1e-6, rng.random() * lengths[which] * 1.1))
            result = calls[which]()
            alarm(0)
            lengths[which] = time.perf_counter() - begin  # the machine's speed changes
            assert result == expected[which]
        except Alarm:
            hits += 1
        alarm(0)
        if index % 8 == 0:
            alive += [output for output in [next(kept, None)] if output]
        assert llm._turns._queue == []
        check = rng.randrange(len(calls))
        if index % 4 == 0:
            assert calls[check]() == expected[check]
            engine = llm.engine
            assert len(engine.groups) <= 1
            assert engine.cache.num_held <= -(-40 // 8)
    alive += list(kept)
    assert hits > count / 3
    assert essence(alive)[-1] == essence(llm.generate([batch[3]], longer[0]))[0]
    # a stream that an alarm cut short ends when it is collected; a traceback may keep it until now
    gc.collect()
    assert not llm.engine.groups
    assert llm.engine.cache.num_held == 0
