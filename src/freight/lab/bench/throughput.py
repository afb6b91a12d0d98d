"""`freight bench throughput`: many requests of different lengths, all there at the start, through
the engine.

Lengths are drawn evenly from half to one and a half times the ones given, so sequences come and go
as they do in service. Rates are over the total time; occupancy is the mean over time of sequences
running, against `max_num_seqs`, and of the cache's blocks in use.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from freight.base.fields import JsonObject
from freight.base.terminal import OnProgress, unseen
from freight.engine.engine import Engine
from freight.lab.bench.drive import (
    StepRecord,
    counted,
    describe_run,
    drive,
    greedy,
    occupancy,
    random_prompt,
    start,
)
from freight.lab.bench.timing import Spread, medians, peak_rss_bytes
from freight.model.open import OpenModel
from freight.settings.engine import EngineArgs, EngineConfig


@dataclass
class Cell:
    """One engine, and what has been measured of it so far: requests per second and the steps of
    each repeat.
    """

    engine: Engine
    config: EngineConfig
    rates: list[float] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)


def run_in_turns(
    opened: OpenModel,
    settings: Sequence[EngineArgs],
    lengths: Sequence[tuple[int, int]],
    numbers: random.Random,
    repeats: int,
    on_progress: OnProgress,
) -> list[Cell]:
    """Run requests of `lengths` (of prompt and answer) with each of `settings`, which share the
    weights, `repeats` times after a short run to warm up; each repeat has prompts of its own and
    begins with another setting.

    Engines have no tokenizer and no drafts. Raises what `start_engine` raises.
    """
    cells: list[Cell] = []
    for args in settings:
        longest = args.max_model_len or max(map(sum, lengths))
        weights = cells[0].engine.runner.model if cells else None
        cells.append(Cell(*start(replace(opened, args=args), weights, max_model_len=longest)))
    params = [greedy(output_len) for _, output_len in lengths]
    prompts: list[list[int]] = []
    for turn in counted(len(cells) * (repeats + 1), on_progress):
        repeat, place = divmod(turn, len(cells))
        if place == 0:
            prompts = [random_prompt(size, opened.model.vocab_size, numbers) for size, _ in lengths]
        cell = cells[(repeat - 1 + place) % len(cells)]
        if repeat == 0:  # warms up, on requests that are cut short
            short = [ids[:32] for ids in prompts[: cell.config.max_num_seqs]]
            drive(cell.engine, short, [greedy(2)] * len(short))
            continue
        steps = drive(cell.engine, prompts, params)
        cell.rates.append(len(prompts) / sum(step.seconds for step in steps))
        cell.steps += steps
    return cells


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
    [cell] = run_in_turns(opened, [opened.args], lengths, numbers, repeats, on_progress)
    facts = describe_load(lengths, repeats)
    prefill = facts["input_tokens"] / num_requests
    decode = facts["output_tokens"] / num_requests
    figures = {
        "requests_per_second": Spread.of(cell.rates),
        "prefill_tokens_per_second": Spread.of([rate * prefill for rate in cell.rates]),
        "decode_tokens_per_second": Spread.of([rate * decode for rate in cell.rates]),
    }
    running, in_use = occupancy(cell.steps)
    return {
        **describe_run(opened, cell.engine, cell.config, name),
        **facts,
        **medians(figures),
        "mean_running": running,
        "batch_occupancy": running / cell.config.max_num_seqs,
        "cache_occupancy": in_use,
        "steps": len(cell.steps) // repeats,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def describe_load(lengths: Sequence[tuple[int, int]], repeats: int) -> JsonObject:
    """Return how much was asked for, as --json prints it."""
    return {
        "num_requests": len(lengths),
        "input_tokens": sum(input_len for input_len, _ in lengths),
        "output_tokens": sum(output_len for _, output_len in lengths),
        "repeats": repeats,
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
