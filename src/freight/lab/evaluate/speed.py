"""Prefill and decode speed of every setting, alternating, so that what else the machine does slows
all of them.

A decode step of one sequence is timed at a few contexts. Its time depends on how many keys are read
and not on what they are, so the cache is filled with zeros instead of being computed: a context of
32,768 tokens costs no prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from freight.base.terminal import OnProgress, unseen
from freight.cache.pool import KVPool
from freight.engine.build import captured_steps
from freight.engine.prepare import Logits, SequenceSlice
from freight.engine.runner import ModelRunner
from freight.lab.evaluate.measure import SettingRun, now
from freight.lab.evaluate.report import cache_run
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
    decode: tuple[float, ...]


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
    bytes_per_token = max(run.runner.pool.spec.bytes_per_token for run in runs)
    contexts = contexts_for(runs[0].config.max_model_len, bytes_per_token)
    runners = [_runner(opened, run, contexts[-1]) for run in runs]
    count = min(runs[0].config.max_num_batched_tokens, contexts[-1], 512)
    prefill = [SequenceSlice([0] * count, 0, (), Logits.LAST)]
    on_progress(0, 1 + len(contexts))
    seconds = [_in_turns(runners, prefill, REPEATS // 2, runs[0].config.device)]
    for index, context in enumerate(contexts, 1):
        on_progress(index, 1 + len(contexts))
        step = [SequenceSlice([0], context - 1, (), Logits.LAST)]
        seconds.append(_in_turns(runners, step, REPEATS, runs[0].config.device))
    on_progress(1 + len(contexts), 1 + len(contexts))
    first, *steps = seconds
    speeds = []
    for index in range(len(runners)):
        decode = tuple(1 / step[index] for step in steps)
        speeds.append(Speed(count / first[index], contexts, decode))
    return speeds


def faster_from(speed: Speed, reference: Speed) -> int | None:
    """Return the context from which on every timed one decodes faster than the reference; None if
    there is none.
    """
    start = None
    for context, rate, base in reversed(
        list(zip(speed.contexts, speed.decode, reference.decode, strict=True))
    ):
        if 1 / rate > FASTER / base:
            break
        start = context
    return start


def _runner(opened: OpenModel, run: SettingRun, context: int) -> ModelRunner:
    config = run.config
    model = run.runner.model
    kernels = opened.kernels(run.config)
    pool = _zeroed(cache_run(opened, model, config, context).runner.pool)
    captured = captured_steps(model, pool, kernels, replace(config, max_model_len=context))
    return ModelRunner(model, pool, config.device, captured)


def _zeroed(pool: KVPool) -> KVPool:
    for kv in pool.paged.values():
        for tensor in (kv.pages.k, kv.pages.v):
            tensor.view(torch.uint8).zero_()
        if kv.pages.rotated is not None:
            kv.pages.rotated.zero_()
        if kv.pages.dynamic:
            for scale in (kv.pages.k_scale, kv.pages.v_scale):
                assert scale is not None
                scale.fill_(1.0)
    for layer in pool.states.values():
        for tensor in layer.states.parts.values():
            tensor.view(torch.uint8).zero_()
    return pool


def _in_turns(
    runners: Sequence[ModelRunner], step: Sequence[SequenceSlice], repeats: int, device: str
) -> list[float]:
    """Least seconds of `step` for each runner: those that other work on the machine disturbed
    least.

    The first round, which captures and warms up, does not count.
    """
    seconds: list[list[float]] = [[] for _ in runners]
    for turn in range(repeats + 1):
        for runner, times in zip(runners, seconds, strict=True):
            begin = now(device)
            runner.run([part._replace(block_ids=runner.pool.whole) for part in step]).all_logits()
            if turn:
                times.append(now(device) - begin)
    return [min(times) for times in seconds]
