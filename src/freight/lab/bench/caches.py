"""`freight bench throughput --compare`: the gain of a cache alone. Several caches, on the same
weights and requests.

A smaller cache entry lets more requests run at once where memory binds, and changes little where it
does not. So each format is measured at each size of the cache. The weights are loaded once and
shared. A repeat runs every format at every size on the same prompts, and each repeat begins with
another one. Ratios are taken within a repeat, to the first format at the same size; intervals are
those of order statistics for the median.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from freight.base.fields import JsonObject
from freight.base.tables import markdown
from freight.base.terminal import OnProgress, unseen
from freight.lab.bench.drive import describe_run, occupancy
from freight.lab.bench.serving_figures import interval
from freight.lab.bench.throughput import Cell, describe_load, draw_lengths, run_in_turns
from freight.lab.columns import scales_name
from freight.model.open import OpenModel


def measure_caches(
    opened: OpenModel,
    name: str,
    caches: Sequence[str],
    memories: Sequence[str | int | None],
    num_requests: int,
    input_len: int,
    output_len: int,
    repeats: int,
    on_progress: OnProgress = unseen,
) -> JsonObject:
    """Return what --json prints: facts of the run, and `rows`, one for each size and format, in the
    order given.

    caches    values of `kv_cache_dtype`; the first is the one that others are compared with
    memories  values of `kv_cache_memory`, None for its default

    Raises what `start_engine` raises.
    """
    numbers = random.Random(opened.args.seed)
    lengths = draw_lengths(num_requests, input_len, output_len, numbers)
    settings = []
    for memory in memories:
        for cache in caches:
            settings.append(replace(opened.args.with_cache(cache), kv_cache_memory=memory))
    cells = run_in_turns(opened, settings, lengths, numbers, repeats, on_progress)
    rows = []
    for index, cell in enumerate(cells):
        first = cells[index - index % len(caches)]
        rows.append({"kv_cache_memory": settings[index].kv_cache_memory, **_row(cell, first)})
    facts = describe_run(opened, cells[0].engine, cells[0].config, name)
    del facts["kv_cache"]
    load = describe_load(lengths, repeats)
    return {**facts, "processor": opened.device.name, **load, "rows": rows}


def _row(cell: Cell, first: Cell) -> JsonObject:
    """`first`: the format at this size that the others are compared with."""
    running, in_use = occupancy(cell.steps)
    ratio = None
    if cell is not first:
        rates = zip(cell.rates, first.rates, strict=True)
        ratio = _median([rate / base for rate, base in rates])
    kv = cell.config.kv
    return {
        "kv_cache_dtype": kv.names()["dtype"],
        "scales": scales_name(kv.granularity, kv.scale_source) if kv.granularity else None,
        "capacity_tokens": cell.engine.runner.pool.capacity_tokens,
        "mean_running": running,
        "cache_occupancy": in_use,
        "requests_per_second": _median(cell.rates),
        "ratio": ratio,
    }


def _median(values: Sequence[float]) -> dict[str, float]:
    low, high, coverage = interval(values)
    return {"median": median(values), "low": low, "high": high, "coverage": coverage}


_COLUMNS = {
    "cache memory": "{memory}",
    "KV cache": "{kv_cache_dtype}",
    "tokens that fit": "{capacity_tokens:,}",
    "running at once": "{mean_running:.1f}",
    "requests/s": "{rate[median]:.1f} ({rate[low]:.1f} to {rate[high]:.1f})",
    "ratio": "{ratio[median]:.2f}",
    "interval": "{ratio[low]:.2f} to {ratio[high]:.2f}",
}


def as_table(report: JsonObject) -> str:
    """For people, and for documents: Markdown, a row for each size and format."""
    rows = [list(_COLUMNS)]
    coverage = 1.0
    for row in report["rows"]:
        rate = row["requests_per_second"]
        coverage = min(coverage, rate["coverage"])
        forms = list(_COLUMNS.values())
        if row["ratio"] is None:
            forms[-2:] = "1", ""
        memory = row["kv_cache_memory"] or "default"
        rows.append([form.format(memory=memory, rate=rate, **row) for form in forms])
    note = (
        "{model}, weights {weight_dtype}, {num_requests} requests; medians of {repeats} repeats in turns, "
        "intervals cover {coverage:.0%}. {processor}, {threads} threads."
    )
    return f"{markdown(rows, num_left=2)}\n\n{note.format(coverage=coverage, **report)}"
