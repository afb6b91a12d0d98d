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
from freight.engine.build import start_engine
from freight.engine.engine import Engine
from freight.lab.bench.drive import (
    StepRecord,
    describe_run,
    drive,
    greedy,
    occupancy,
    random_prompt,
)
from freight.lab.bench.timing import Spread, medians, peak_rss_bytes
from freight.model.open import OpenModel
from freight.settings.engine import EngineArgs, EngineConfig


@dataclass(frozen=True)
class Load:
    """Requests of random tokens: the length of each prompt and of its answer."""

    inputs: Sequence[int]
    outputs: Sequence[int]

    @staticmethod
    def draw(count: int, input_len: int, output_len: int, numbers: random.Random) -> Load:
        """`count` requests whose lengths are around those given."""
        lengths = draw_lengths(count, input_len, output_len, numbers)
        inputs, outputs = zip(*lengths, strict=True)
        return Load(inputs, outputs)

    @property
    def longest(self) -> int:
        return max(map(sum, zip(self.inputs, self.outputs, strict=True)))

    @property
    def facts(self) -> JsonObject:
        return {
            "num_requests": len(self.inputs),
            "input_tokens": sum(self.inputs),
            "output_tokens": sum(self.outputs),
        }


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
    load: Load,
    numbers: random.Random,
    repeats: int,
    on_progress: OnProgress,
) -> list[Cell]:
    """Run `load` with each of `settings`, which share the weights, `repeats` times after a short run
    to warm up; each repeat has prompts of its own and begins with another setting.

    Engines have no tokenizer and no drafts. Raises what `start_engine` raises.
    """
    cells: list[Cell] = []
    for args in settings:
        args = replace(
            args.without_drafts(),
            max_model_len=args.max_model_len or load.longest,
            skip_tokenizer_init=True,
        )
        weights = cells[0].engine.runner.model if cells else None
        cells.append(Cell(*start_engine(replace(opened, args=args), decoder=weights)))
    params = list(map(greedy, load.outputs))
    total = len(cells) * (repeats + 1)
    done = 0
    for repeat in range(-1, repeats):  # the first warms up, on requests that are cut short
        prompts = [random_prompt(size, opened.model.vocab_size, numbers) for size in load.inputs]
        first = repeat % len(cells)
        for cell in cells[first:] + cells[:first]:
            on_progress(done, total)
            done += 1
            if repeat < 0:
                short = [ids[:32] for ids in prompts[: cell.config.max_num_seqs]]
                drive(cell.engine, short, [greedy(2)] * len(short))
                continue
            steps = drive(cell.engine, prompts, params)
            cell.rates.append(len(prompts) / sum(step.seconds for step in steps))
            cell.steps += steps
    on_progress(done, total)
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
    load = Load.draw(num_requests, input_len, output_len, numbers)
    [cell] = run_in_turns(opened, [opened.args], load, numbers, repeats, on_progress)
    prefill = sum(load.inputs) / num_requests
    decode = sum(load.outputs) / num_requests
    figures = {
        "requests_per_second": Spread.of(cell.rates),
        "prefill_tokens_per_second": Spread.of([rate * prefill for rate in cell.rates]),
        "decode_tokens_per_second": Spread.of([rate * decode for rate in cell.rates]),
    }
    running, in_use = occupancy(cell.steps)
    return {
        **describe_run(opened, cell.engine, cell.config, name),
        **load.facts,
        "repeats": repeats,
        **medians(figures),
        "mean_running": running,
        "batch_occupancy": running / cell.config.max_num_seqs,
        "cache_occupancy": in_use,
        "steps": len(cell.steps) // repeats,
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
