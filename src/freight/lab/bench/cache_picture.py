"""A picture of requests per second by cache as SVG text: a group for each size of the cache, a bar
for each format.

The line at a bar's end is the interval of its median. At the right stand the rate, its ratio to the
first format at that size, and how many tokens fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

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
    most = max(row["requests_per_second"]["high"] for row in report["rows"])
    title = f"{report['model']}: requests per second by KV cache"
    under = f"{report['processor']}, {report['threads']} threads; weights {report['weight_dtype']}"
    parts = [text(24, 56, under, 'class="soft"')]
    y = _TOP
    for size, group in groupby(report["rows"], itemgetter("kv_cache_memory")):
        rows = list(group)
        parts.append(text(24, y + 15, size or "default size", 'class="head"'))
        for index, row in enumerate(rows):
            colour = _COLOURS[index % len(_COLOURS)]
            parts += _bar(row, y + _BAR * index, _PLOT / most, colour)
        end = y + _BAR * len(rows)
        parts.append(line((_LEFT, _LEFT), (y - 4, end), 'class="base"'))
        y = end + _GAP
    return framed(title, WIDTH, y + 16, _STYLE, parts)


def _bar(row: JsonObject, y: int, scale: float, colour: str) -> Iterator[str]:
    """Draw one format; `scale` is pixels for one request per second."""
    rate = row["requests_per_second"]
    ratio = row["ratio"]
    yield text(_LEFT - 10, y + 15, row["kv_cache_dtype"], 'text-anchor="end" class="soft"')
    bar = f'x="{_LEFT}" y="{y}" width="{rate["median"] * scale:.1f}" height="{_BAR - 6}"'
    yield f'<rect {bar} fill="var(--{colour})"/>'
    low = round(_LEFT + rate["low"] * scale, 1)
    high = round(_LEFT + rate["high"] * scale, 1)
    yield line((low, high), (y + 10, y + 10), 'class="span"')
    label = f"{rate['median']:.1f}/s"
    if ratio:
        label += f" ({ratio['median']:.2f} ×)"
    label += f", {row['capacity_tokens']:,} tokens fit"
    yield text(_LEFT + _PLOT + 10, y + 15, label, 'class="num"')
