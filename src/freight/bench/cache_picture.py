"""A picture of requests per second by cache as SVG text: a group for each size of the cache, a bar
for each format.

The line at a bar's end is the interval of its median. At the right stand the rate, its ratio to the
first format at that size, and how many tokens fit. The picture follows the reader's light or dark
setting, and needs no other file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from itertools import groupby
from typing import Any

WIDTH = 860
_LEFT, _TOP, _BAR, _GAP, _PLOT = (
    210,
    84,
    26,
    22,
    400,
)  # pixels; _BAR is the height of one, with the space below it
_STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",sans-serif;fill:var(--ink)}
.soft{fill:var(--soft)}.title{font-size:18px;font-weight:600}.head{font-weight:600}
.num{font-variant-numeric:tabular-nums}.base{stroke:var(--line)}.span{stroke:var(--ink);stroke-width:1.5}
svg{--paper:#fff;--ink:#1d2329;--soft:#626b75;--line:#c3cad1;--c0:#8b95a0;--c1:#1668b8;--c2:#c2410c;--c3:#0f7a5a}
@media(prefers-color-scheme:dark){svg{--paper:#14181d;--ink:#e8ebee;--soft:#9aa4ae;--line:#46505a;
--c0:#77828d;--c1:#6bb3f5;--c2:#f59a5d;--c3:#4fcf9f}}
"""


def cache_picture(found: Mapping[str, Any]) -> str:
    """SVG of what `measure_caches` returned."""
    groups = [
        list(rows) for _, rows in groupby(found["rows"], key=lambda row: row["kv_cache_memory"])
    ]
    most = max(row["requests_per_second"]["high"] for row in found["rows"])
    height = _TOP + sum(_BAR * len(rows) + _GAP for rows in groups) + 16
    title = f"{found['model']}: requests per second by KV cache"
    under = f"{found['processor']}, {found['threads']} threads; weights {found['weight_dtype']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="var(--paper)"/>',
        f'<text x="24" y="34" class="title">{escape(title)}</text>',
        f'<text x="24" y="56" class="soft">{escape(under)}</text>',
    ]
    y = _TOP
    for rows in groups:
        parts += _group(rows, y, _PLOT / most)
        y += _BAR * len(rows) + _GAP
    return "\n".join([*parts, "</svg>"]) + "\n"


def _group(rows: list[Mapping[str, Any]], top: int, scale: float) -> Iterator[str]:
    """The bars of one size; `scale` is pixels for one request per second."""
    bottom = top + _BAR * len(rows)
    size = rows[0]["kv_cache_memory"] or "default size"
    yield f'<text x="24" y="{top + 15}" class="head">{escape(size)}</text>'
    for index, row in enumerate(rows):
        rate, ratio, y = row["requests_per_second"], row["ratio"], top + _BAR * index
        yield f'<text x="{_LEFT - 10}" y="{y + 15}" text-anchor="end" class="soft">{row["kv_cache_dtype"]}</text>'
        bar = f'x="{_LEFT}" y="{y}" width="{rate["median"] * scale:.1f}" height="{_BAR - 6}"'
        yield f'<rect {bar} fill="var(--c{index % 4})"/>'
        low, high = (round(_LEFT + rate[end] * scale, 1) for end in ("low", "high"))
        yield f'<line x1="{low}" x2="{high}" y1="{y + 10}" y2="{y + 10}" class="span"/>'
        times = f" ({ratio['median']:.2f} ×)" if ratio else ""
        text = f"{rate['median']:.1f}/s{times}, {row['capacity_tokens']:,} tokens fit"
        yield f'<text x="{_LEFT + _PLOT + 10}" y="{y + 15}" class="num">{text}</text>'
    yield f'<line x1="{_LEFT}" x2="{_LEFT}" y1="{top - 4}" y2="{bottom}" class="base"/>'
