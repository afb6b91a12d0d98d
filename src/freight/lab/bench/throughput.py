"""`freight bench throughput`: many requests of different lengths, all there at the start, through
the engine.

Lengths are drawn evenly from half to one and a half times the ones given, so sequences come and go
as they do in service. Rates are over the total time; occupancy is the mean over time of sequences
running, against `max_num_seqs`, and of the cache's blocks in use.
"""

from __future__ import annotations

import random

from freight.base.fields import JsonObject
from freight.base.terminal import OnProgress, unseen
from freight.lab.bench.drive import counted, describe_run, drive_random, occupancy, start
from freight.lab.bench.timing import Spread, medians, peak_rss_bytes
from freight.model.open import OpenModel


def measure_throughput(
    opened: OpenModel,
    name: str,
    num_requests: int,
    input_len: int,
    output_len: int,
    repeats: int,
    on_progress: OnProgress = unseen,
) -> JsonObject:
    """Medians over `repeats` runs of the same lengths, after a short one to warm up. Returns what
    --json prints.
    """
    numbers = random.Random(opened.args.seed)
    lengths = draw_lengths(num_requests, input_len, output_len, numbers)
    longest = opened.args.max_model_len or max(before + after for before, after in lengths)
    engine, config = start(opened, max_model_len=longest)
    short = [(min(before, 32), 2) for before, _ in lengths[: config.max_num_seqs]]
    num_input = sum(before for before, _ in lengths)
    num_output = sum(after for _, after in lengths)
    requests = []
    prefill = []
    decode = []
    records = []
    for repeat in counted(repeats + 1, on_progress):
        if repeat == 0:  # warms up
            drive_random(engine, short, numbers)
            continue
        steps = drive_random(engine, lengths, numbers)
        seconds = sum(step.seconds for step in steps)
        requests.append(num_requests / seconds)
        prefill.append(num_input / seconds)
        decode.append(num_output / seconds)
        records += steps
    figures = {
        "requests_per_second": Spread.of(requests),
        "prefill_tokens_per_second": Spread.of(prefill),
        "decode_tokens_per_second": Spread.of(decode),
    }
    running, in_use = occupancy(records)
    return describe_run(opened, engine, config, name) | {
        "num_requests": num_requests,
        "input_tokens": num_input,
        "output_tokens": num_output,
        "repeats": repeats,
        **medians(figures),
        "mean_running": running,
        "batch_occupancy": running / config.max_num_seqs,
        "cache_occupancy": in_use,
        "steps": len(records) // repeats,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def draw_lengths(
    count: int, input_len: int, output_len: int, numbers: random.Random
) -> list[tuple[int, int]]:
    """(prompt, answer) of each request, in tokens."""
    lengths = []
    for _ in range(count):
        lengths.append((draw_length(input_len, numbers), draw_length(output_len, numbers)))
    return lengths


def draw_length(length: int, numbers: random.Random) -> int:
    """Evenly from half to one and a half times `length`, at least 1."""
    return numbers.randint(max(1, length // 2), max(1, length + length // 2))
