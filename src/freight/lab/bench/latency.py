"""`freight bench latency`: one batch that arrives at once, prefill and decode apart, against
the speed of the memory.

Prefill lasts until the last of the batch has its first token. A decode step counts when every
sequence gets a token in it, so its batch size is the one asked for. `decode_bandwidth_fraction` is
what a step has to read, the weights once and each sequence's keys and values, divided by its time
and by the bandwidth right before and after its run: 1.0 is as fast as this memory allows.
`overhead_fraction` is the share of a decode step that passes outside the model's runner:
scheduling, sampling, bookkeeping (null on a GPU, which the host does not wait for there).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from freight.base.fields import JsonObject
from freight.base.terminal import OnProgress, unseen
from freight.cache.pool import KVPool
from freight.cache.spec import KVCacheSpec
from freight.engine.build import memory_for_cache
from freight.errors import ConfigError
from freight.lab.bench.drive import (
    StepRecord,
    counted,
    describe_run,
    drive,
    full_steps,
    greedy,
    linears_of,
    random_prompt,
    start,
    token_rate,
    weight_bytes,
)
from freight.lab.bench.timing import MemoryProbe, Spread, medians, peak_rss_bytes
from freight.model.open import OpenModel


def measure_latency(
    opened: OpenModel,
    name: str,
    batch_size: int,
    input_len: int,
    output_len: int,
    repeats: int,
    on_progress: OnProgress = unseen,
) -> JsonObject:
    """Medians over `repeats` runs, after one to warm up; lengths in tokens. Returns what --json
    prints.

    Raises what `start_engine` raises, and ConfigError when no decode step has the full batch.
    """
    imported = peak_rss_bytes()
    length = opened.args.max_model_len or input_len + output_len
    engine, config = start(opened, max_num_seqs=batch_size, max_model_len=length)
    numbers = random.Random(config.seed)
    params = [greedy(output_len)] * batch_size

    def run() -> tuple[float, list[StepRecord]]:
        prompts = [random_prompt(input_len, opened.model.vocab_size, numbers) for _ in params]
        return split(drive(engine, prompts, params), batch_size)

    formats = (config.compute_format, config.weight_format)
    linear_of = linears_of(opened, config)
    weights = weight_bytes(engine.runner.model.config, *formats, batch_size, linear_of)
    # of a step half way through the output
    cache = round(batch_size * read_bytes(engine.runner.pool.spec, input_len + output_len / 2))
    turns = counted(repeats + 1, on_progress)
    next(turns)
    run()  # warms up
    peak = peak_rss_bytes()  # before the probe takes its memory
    room = _room(engine.runner.pool, config.device)
    probe = MemoryProbe(device=config.device)
    runs: list[tuple[float, list[StepRecord]]] = []
    bandwidth_fractions = []
    for _ in turns:
        before = probe.sample()
        runs.append(run())
        bandwidth = (before + probe.sample()) / 2
        for step in runs[-1][1]:
            bandwidth_fractions.append((weights + cache) / (step.seconds * bandwidth))
    figures = _figures(runs, batch_size * input_len)
    figures["decode_bandwidth_fraction"] = Spread.of(bandwidth_fractions)
    figures["read_bandwidth_bytes_per_second"] = probe.bandwidth()
    overhead = figures["overhead_ms"].median / figures["decode_step_ms"].median
    return describe_run(opened, engine, config, name) | {
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        "repeats": repeats,
        **medians(figures),
        "overhead_fraction": overhead if config.device == "cpu" else None,
        "decode_bytes_per_step": {"weights": weights, "kv_cache": cache},
        "peak_rss_bytes": peak,
        "imported_rss_bytes": imported,
        **room,
    }


def _figures(runs: Sequence[tuple[float, list[StepRecord]]], num_input: int) -> dict[str, Spread]:
    """`runs`: seconds until all have their first token, and the steps after it. `num_input`: tokens
    of all prompts.
    """
    prefill = []
    decode = []
    step_ms = []
    overhead_ms = []
    for until_first, full in runs:
        prefill.append(num_input / until_first)
        decode.append(token_rate(full))
        for step in full:
            step_ms.append(step.seconds * 1e3)
            overhead_ms.append((step.seconds - step.model_seconds) * 1e3)
    return {
        "prefill_tokens_per_second": Spread.of(prefill),
        "decode_tokens_per_second": Spread.of(decode),
        "decode_step_ms": Spread.of(step_ms),
        "overhead_ms": Spread.of(overhead_ms),
    }


def read_bytes(spec: KVCacheSpec, num_tokens: float) -> float:
    """Return bytes of keys and values that a decode step reads of one sequence; of a window's
    layers, those in the window.
    """
    return sum(group.read_bytes(num_tokens) for group in spec.groups)


def _room(pool: KVPool, device: str) -> dict[str, int]:
    """Return what the cache takes, and how many tokens it could hold in all that is free; a CPU's
    is not touched yet.
    """
    free = memory_for_cache(device)
    if device == "cuda":
        free += pool.num_bytes
    return {"kv_cache_bytes": pool.num_bytes, "tokens_that_fit": pool.spec.tokens_in(free)}


def split(records: Sequence[StepRecord], batch_size: int) -> tuple[float, list[StepRecord]]:
    """(seconds until every sequence has its first token, the later steps in which all get one).

    Raises ConfigError when there is no such later step.
    """
    full = full_steps(records, batch_size)
    if len(full) < 2:
        raise ConfigError(
            f"of {batch_size} sequences the first ends before all decode together: "
            "raise --output-len or --max-num-batched-tokens, or lower --batch-size"
        )
    until_first = sum(record.seconds for record in records[: full[0] + 1])
    return until_first, [records[index] for index in full[1:]]
