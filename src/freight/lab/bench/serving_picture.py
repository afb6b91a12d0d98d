"""A picture of a load as SVG text: how the times to the first token and between tokens are
distributed.

A row is one load, a colour is one server, and both halves have a logarithmic axis of milliseconds.
Each shape is a histogram over that axis, so equal areas are equal numbers of samples. The long line
is the median, the short one p99; the numbers at the right say both. Requests that failed are in no
shape, and counted in a line below.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np

from freight.base.svg import LogAxis, framed, line, styled, text
from freight.lab.bench.answers import Answer
from freight.lab.bench.load import Level
from freight.lab.bench.serving_figures import Run, Samples, percentiles

WIDTH = 1120
_LEFT = 104  # pixels; _ROW is the height of one load
_TOP = 116
_ROW = 84
_BOTTOM = 46
# widths: of an axis, of the numbers at its right, between the halves
_PLOT = 346
_NUMBERS = 120
_GAP = 30
_BINS = 90
_STYLE = styled("text.num{text-anchor:end}")


def _ticks(axis: LogAxis) -> list[float]:
    """1, 2 and 5 of each power; over more than three powers only 1."""
    step = 1 if axis.high / axis.low <= 1500 else 3
    first = 3 * math.floor(math.log10(axis.low))
    ticks = []
    for place in range(first, 3 * math.ceil(math.log10(axis.high)) + 3, step):
        tick = (1, 2, 5)[place % 3] * 10.0 ** (place // 3)
        if axis.low * 0.999 <= tick <= axis.high * 1.001:
            ticks.append(tick)
    return ticks


def serving_picture(title: str, runs: Sequence[Run]) -> str:
    """SVG of all runs; those of one server and load are one shape."""
    levels = list(dict.fromkeys(run.level for run in runs))
    answers: dict[str, dict[Level, list[Answer]]] = {}
    for run in runs:
        of_server = answers.setdefault(run.url, {level: [] for level in levels})
        of_server[run.level] += run.answers
    failed = _failed(answers)
    height = _TOP + _ROW * len(levels) + _BOTTOM
    parts = list(_legend(answers))
    for index, level in enumerate(levels):
        parts.append(_level(level, index))
    if failed:
        height += 24
        parts.append(text(24, height - 12, f"Failed, and in no shape: {', '.join(failed)}"))
    rows = []  # a row is a load, and has the samples of each server
    for level in levels:
        rows.append([Samples.of(of_server[level]) for of_server in answers.values()])
    units = {samples.unit for samples in chain(*rows)}
    unit = "events" if "event" in units else "tokens"
    parts += _half("Time to first token", _LEFT, [[part.ttft for part in row] for row in rows])
    second = _LEFT + _PLOT + _NUMBERS + _GAP
    parts += _half(f"Between {unit}", second, [[part.itl for part in row] for row in rows])
    return framed(title, WIDTH, height, _STYLE, parts)


def _failed(answers: Mapping[str, Mapping[Level, Sequence[Answer]]]) -> list[str]:
    """Return what the shapes leave out, by server; empty where every request was answered."""
    parts = []
    for url, of_server in answers.items():
        errors = [answer.error for answer in chain(*of_server.values())]
        if bad := sum(map(bool, errors)):
            server = f" of {url}" if len(answers) > 1 else ""
            parts.append(f"{bad:,} of {len(errors):,} requests{server}")
    return parts


def _axis(x: float, values: Sequence[float]) -> LogAxis:
    """Return an axis over nearly all samples: the lowest half percent, such as tokens that came
    together, lies at the left edge.
    """
    seen = [value for value in values if value > 0] or [1.0]
    low, high = np.percentile(seen, [0.5, 100.0]).tolist()
    middle = math.sqrt(low * high)
    return LogAxis(min(low / 1.15, middle / 2.5), max(high * 1.15, middle * 2.5), x, x + _PLOT)


def _legend(urls: Iterable[str]) -> Iterator[str]:
    x = 24.0
    for index, url in enumerate(urls):
        yield f'<rect x="{x}" y="50" width="12" height="12" rx="3" fill="{_colour(index)}"/>'
        yield text(x + 18, 61, url, 'class="soft"')
        x += 44 + 7.4 * len(url)


def _level(level: Level, index: int) -> str:
    y = _TOP + _ROW * (index + 1) - 6
    if level.concurrency:
        number = str(level.concurrency)
        what = "at a time"
    else:
        number = f"{level.rate:g}"
        what = "a second"
    return text(24, y - 18, number, 'class="title"') + text(24, y, what, 'class="soft"')


def _half(name: str, x: float, rows: Sequence[Sequence[Sequence[float]]]) -> Iterator[str]:
    """Draw the half that begins at `x`: the times of each load and server."""
    axis = _axis(x, list(chain(*chain(*rows))))
    bottom = _TOP + _ROW * len(rows)
    columns = {"median": axis.end + _NUMBERS - 58, "p99": axis.end + _NUMBERS}
    yield text(axis.start, _TOP - 18, name, 'class="head"')
    for figure, x in columns.items():
        yield text(x, _TOP - 18, figure, 'class="soft num"')
    for tick in _ticks(axis):
        x = axis.at(tick)
        yield line((x, x), (_TOP - 8, bottom), 'class="grid"')
        yield text(x, bottom + 18, f"{tick:,g}", 'text-anchor="middle" class="soft"')
    yield text(axis.end + 8, bottom + 18, "ms", 'class="soft"')
    for row, servers in enumerate(rows):
        base = _TOP + _ROW * (row + 1)
        shapes = [_density(axis, times) for times in servers]
        most = max(map(max, shapes))
        for index, times in enumerate(servers):
            if not times:
                continue
            figures = percentiles(times)
            colour = _colour(index)
            y = base - 8 - 18 * (len(servers) - 1 - index)
            yield _shape(axis, base, shapes[index], most, colour)
            for figure, reach in (("median", _ROW - 16), ("p99", 16)):
                value = figures[figure] or 0.0
                x = axis.at(max(value, axis.low))
                yield line((x, x), (base, base - reach), f'stroke="{colour}" stroke-width="2"')
                look = f'class="num" style="fill:{colour}"'
                yield text(columns[figure], y, _number(value), look)
        yield line((axis.start, columns["p99"]), (base, base), 'class="base"')


def _density(axis: LogAxis, values: Sequence[float]) -> list[float]:
    """Return the share of the samples around each of `_BINS` places of the axis, smoothed over
    about two bins each way.
    """
    places = np.log10(np.clip(values, axis.low, axis.high))
    edges = np.linspace(math.log10(axis.low), math.log10(axis.high), _BINS + 1)
    counts = np.histogram(places, edges)[0] / max(len(values), 1)
    kernel = np.exp(-(np.arange(-5, 6) ** 2) / 4.0)
    density: list[float] = np.convolve(counts, kernel / kernel.sum(), mode="same").tolist()
    return density


def _shape(axis: LogAxis, base: float, shape: Sequence[float], most: float, colour: str) -> str:
    step = _PLOT / _BINS
    tall = _ROW - 22
    path = f"M{axis.start} {base}"
    for index, value in enumerate(shape):
        x = axis.start + (index + 0.5) * step
        path += f" L{x:.1f} {base - tall * value / most:.1f}"
    path += f" L{axis.end} {base}"
    return f'<path d="{path} Z" fill="{colour}" fill-opacity="0.22" stroke="{colour}" stroke-opacity="0.75"/>'


def _colour(index: int) -> str:
    """Return the colour of a server."""
    return f"var(--c{index % 4 + 1})"


def _number(value: float) -> str:
    """Three digits, as people write them."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    if value >= 0.1:
        return f"{value:.2f}"
    return f"{value:.2g}"
