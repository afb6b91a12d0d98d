"""Prefill and decode speed of every setting, alternating, so that what else the machine does slows
all of them.

A decode step of one sequence is timed at a few contexts. Its time depends on how many keys are read
and not on what they are, so the cache is filled with zeros instead of being computed: a context of
32,768 tokens costs no prefill.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freight.base.terminal import OnProgress, unseen
from freight.cache.pages import empty_on
from freight.engine.build import captured_steps
from freight.engine.prepare import Logits, SequenceSlice
from freight.engine.runner import ModelRunner
from freight.lab.evaluate.measure import SettingRun, now
from freight.lab.evaluate.report import pool_for
from freight.model.open import OpenModel
from freight.settings.engine import EngineConfig

REPEATS = 5
MEMORY = 2**28  # bytes of the largest cache: a longer context is not timed
FASTER = 0.99  # of the other's time, at most


@dataclass(frozen=True)
class Speed:
    """Tokens per second: of a prefill, and of one sequence's decode steps by
    context.
    """

    prefill: float
    contexts: tuple[int, ...]
    decode: Sequence[float]


def contexts_for(max_model_len: int, bytes_per_token: int) -> tuple[int, ...]:
    """Up to five contexts, by factors of 4, the longest that the model and MEMORY allow the last."""
    longest = max(1, min(max_model_len, MEMORY // max(1, bytes_per_token)))
    contexts = [longest]
    while len(contexts) < 5 and contexts[0] // 4 >= 16:
        contexts.insert(0, contexts[0] // 4)
    return tuple(contexts)


def contexts_of(opened: OpenModel, plain: EngineConfig) -> tuple[int, ...]:
    """`contexts_for` the cache of 16 bits, the largest: others are timed up to the same length."""
    return contexts_for(plain.max_model_len, opened.cache_spec(plain).bytes_per_token)


def time_settings(
    opened: OpenModel, runs: Sequence[SettingRun], on_progress: OnProgress = unseen
) -> list[Speed]:
    """Return the speed of each of `runs`. Their caches and counts stay as they are.
    `on_progress(done, total)` counts the prefill and the contexts.
    """
    contexts = contexts_of(opened, runs[0].config)
    runners = [_runner(opened, run, contexts[-1]) for run in runs]
    count = min(runs[0].config.max_num_batched_tokens, contexts[-1], 512)
    steps = [(0, count, REPEATS // 2)]  # (position, tokens, repeats)
    steps += [(context - 1, 1, REPEATS) for context in contexts]
    rates = []
    for done, step in enumerate(steps):
        on_progress(done, len(steps))
        rates.append(_in_turns(runners, *step))
    on_progress(len(steps), len(steps))
    return [Speed(prefill, contexts, decode) for prefill, *decode in zip(*rates, strict=True)]


def faster_from(speed: Speed, reference: Speed) -> int | None:
    """Return the context from which on every timed one decodes faster than the reference; None if
    there is none.
    """
    start = None
    for context, rate, base in zip(speed.contexts, speed.decode, reference.decode, strict=True):
        if 1 / rate > FASTER / base:
            start = None
        elif start is None:
            start = context
    return start


def _runner(opened: OpenModel, run: SettingRun, context: int) -> ModelRunner:
    config = run.config
    model = run.runner.model
    empty = empty_on(config.device)

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        """Write them, so that each page of memory is one of its own."""
        tensor = empty(*shape, dtype=dtype)
        tensor.view(torch.uint8).zero_()
        return tensor

    pool = pool_for(opened, model, config, context, empty=zeros)
    kernels = opened.kernels(config)
    captured = captured_steps(model, pool, kernels, replace(config, max_model_len=context))
    return ModelRunner(model, pool, config.device, captured)


def _in_turns(runners: Sequence[ModelRunner], start: int, count: int, repeats: int) -> list[float]:
    """Return tokens per second of each runner, for a step of `count` tokens at `start`: those of the
    round that other work on the machine disturbed least.

    The first round, which captures and warms up, does not count.
    """
    least = [math.inf] * len(runners)
    for turn in range(repeats + 1):
        for index, runner in enumerate(runners):
            step = SequenceSlice([0] * count, start, runner.pool.whole, Logits.LAST)
            begin = now(runner.device)
            runner.run([step]).all_logits()
            if turn:
                least[index] = min(least[index], now(runner.device) - begin)
    return [count / seconds for seconds in least]
