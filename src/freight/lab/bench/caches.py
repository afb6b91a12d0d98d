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
from freight.lab.bench.throughput import Cell, Load, run_in_turns
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
    load = Load.draw(num_requests, input_len, output_len, numbers)
    settings = []
    for memory in memories:
        for cache in caches:
            settings.append(replace(opened.args.with_cache(cache), kv_cache_memory=memory))
    cells = run_in_turns(opened, settings, load, numbers, repeats, on_progress)
    rows = []
    for index, cell in enumerate(cells):
        memory = memories[index // len(caches)]
        rows.append({"kv_cache_memory": memory, **_row(cell, cells[index - index % len(caches)])})
    facts = {**describe_run(opened, cells[0].engine, cells[0].config, name)}
    del facts["kv_cache"]
    return {
        **facts,
        "processor": opened.device.name,
        **load.facts,
        "repeats": repeats,
        "rows": rows,
    }


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
    "KV cache": "{0[kv_cache_dtype]}",
    "tokens that fit": "{0[capacity_tokens]:,}",
    "running at once": "{0[mean_running]:.1f}",
    "requests/s": "{rate[median]:.1f} ({rate[low]:.1f} to {rate[high]:.1f})",
}


def as_table(report: JsonObject) -> str:
    """For people, and for documents: Markdown, a row for each size and format."""
    rows = [["cache memory", *_COLUMNS, "ratio", "interval"]]
    for row in report["rows"]:
        rate = row["requests_per_second"]
        ratio = row["ratio"]
        cells = [str(row["kv_cache_memory"] or "default")]
        cells += [form.format(row, rate=rate) for form in _COLUMNS.values()]
        if ratio:
            cells += [f"{ratio['median']:.2f}", f"{ratio['low']:.2f} to {ratio['high']:.2f}"]
        else:
            cells += ["1", ""]
        rows.append(cells)
    coverage = min(row["requests_per_second"]["coverage"] for row in report["rows"])
    note = (
        "{model}, weights {weight_dtype}, {num_requests} requests; medians of {repeats} repeats in turns, "
        "intervals cover {coverage:.0%}. {processor}, {threads} threads."
    )
    return f"{markdown(rows, num_left=2)}\n\n{note.format(coverage=coverage, **report)}"
