"""A picture of requests per second by cache as SVG text: a group for each size of the cache, a bar
for each format.

The line at a bar's end is the interval of its median. At the right stand the rate, its ratio to the
first format at that size, and how many tokens fit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from freight.base.fields import JsonObject
from freight.base.svg import framed, line, styled, text

WIDTH = 860
# pixels; _BAR is the height of one, with the space below it
_LEFT = 210
_TOP = 84
_BAR = 26
_GAP = 22
_PLOT = 400
_STYLE = styled(".span{stroke:var(--ink);stroke-width:1.5}")
# the first format, which the others are compared with, is grey
_COLOURS = ("line", "c1", "c2", "c3")


def cache_picture(report: JsonObject) -> str:
    """SVG of what `measure_caches` returned."""
    groups: dict[object, list[JsonObject]] = defaultdict(list)
    for row in report["rows"]:
        groups[row["kv_cache_memory"]].append(row)
    most = max(row["requests_per_second"]["high"] for row in report["rows"])
    title = f"{report['model']}: requests per second by KV cache"
    under = f"{report['processor']}, {report['threads']} threads; weights {report['weight_dtype']}"
    parts = [text(24, 56, under, 'class="soft"')]
    y = _TOP
    for rows in groups.values():
        parts += _group(rows, y, _PLOT / most)
        y += _BAR * len(rows) + _GAP
    return framed(title, WIDTH, y + 16, _STYLE, parts)


def _group(rows: list[JsonObject], top: int, scale: float) -> Iterator[str]:
    """Draw the bars of one size; `scale` is pixels for one request per second."""
    size = rows[0]["kv_cache_memory"] or "default size"
    yield text(24, top + 15, size, 'class="head"')
    for index, row in enumerate(rows):
        rate = row["requests_per_second"]
        ratio = row["ratio"]
        y = top + _BAR * index
        yield text(_LEFT - 10, y + 15, row["kv_cache_dtype"], 'text-anchor="end" class="soft"')
        bar = f'x="{_LEFT}" y="{y}" width="{rate["median"] * scale:.1f}" height="{_BAR - 6}"'
        yield f'<rect {bar} fill="var(--{_COLOURS[index % 4]})"/>'
        low = round(_LEFT + rate["low"] * scale, 1)
        high = round(_LEFT + rate["high"] * scale, 1)
        yield line((low, high), (y + 10, y + 10), 'class="span"')
        label = f"{rate['median']:.1f}/s"
        if ratio:
            label += f" ({ratio['median']:.2f} ×)"
        label += f", {row['capacity_tokens']:,} tokens fit"
        yield text(_LEFT + _PLOT + 10, y + 15, label, 'class="num"')
    yield line((_LEFT, _LEFT), (top - 4, top + _BAR * len(rows)), 'class="base"')
