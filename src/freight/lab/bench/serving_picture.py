"""A picture of a load as SVG text: how the times to the first token and between tokens are
distributed.

A row is one load, a colour is one server, and both halves have a logarithmic axis of milliseconds.
Each shape is a histogram over that axis, so equal areas are equal numbers of samples. The long line
is the median, the short one p99; the numbers at the right say both. Requests that failed are in no
shape, and counted in a line below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    steps = (1, 2, 5) if axis.high / axis.low <= 1500 else (1,)
    powers = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
    ticks = []
    for power in powers:
        for step in steps:
            tick = step * 10.0**power
            if axis.low * 0.999 <= tick <= axis.high * 1.001:
                ticks.append(tick)
    return ticks


def serving_picture(title: str, runs: Sequence[Run]) -> str:
    """SVG of all runs; those of one server and load are one shape."""
    urls = list(dict.fromkeys(run.url for run in runs))
    levels = list(dict.fromkeys(run.level for run in runs))
    samples = {(url, level): _samples(runs, url, level) for url in urls for level in levels}
    failed = _failed(urls, runs)
    height = _TOP + _ROW * len(levels) + _BOTTOM
    if failed:
        height += 24
    units = {of_load.unit for of_load in samples.values()}
    unit = "events" if "event" in units else "tokens"
    parts = list(_legend(urls))
    for index, level in enumerate(levels):
        parts.append(_level(level, index))
    if failed:
        parts.append(text(24, height - 12, failed))
    halves = (("Time to first token", "ttft"), (f"Between {unit}", "itl"))
    for half, (name, field) in enumerate(halves):
        values = {key: list(getattr(of_load, field)) for key, of_load in samples.items()}
        axis = _axis(_LEFT + half * (_PLOT + _NUMBERS + _GAP), list(chain(*values.values())))
        parts += _half(name, axis, urls, levels, values)
    return framed(title, WIDTH, height, _STYLE, parts)


def _failed(urls: Sequence[str], runs: Sequence[Run]) -> str:
    """Return what the shapes leave out; empty where every request was answered."""
    parts = []
    for url in urls:
        answers: list[Answer] = []
        for run in runs:
            if run.url == url:
                answers += run.answers
        if bad := sum(bool(answer.error) for answer in answers):
            server = f" of {url}" if len(urls) > 1 else ""
            parts.append(f"{bad:,} of {len(answers):,} requests{server}")
    if not parts:
        return ""
    return f"Failed, and in no shape: {', '.join(parts)}"


def _samples(runs: Sequence[Run], url: str, level: Level) -> Samples:
    answers: list[Answer] = []
    for run in runs:
        if run.url == url and run.level == level:
            answers += run.answers
    return Samples.of(answers)


def _axis(x: float, values: Sequence[float]) -> LogAxis:
    """Return an axis over nearly all samples: the lowest half percent, such as tokens that came
    together, lies at the left edge.
    """
    seen = [value for value in values if value > 0] or [1.0]
    low, high = np.percentile(seen, [0.5, 100.0]).tolist()
    middle = math.sqrt(low * high)
    return LogAxis(min(low / 1.15, middle / 2.5), max(high * 1.15, middle * 2.5), x, x + _PLOT)


def _legend(urls: Sequence[str]) -> Iterator[str]:
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


def _half(
    name: str,
    axis: LogAxis,
    urls: Sequence[str],
    levels: Sequence[Level],
    values: dict[tuple[str, Level], list[float]],
) -> Iterator[str]:
    bottom = _TOP + _ROW * len(levels)
    right = axis.end + _NUMBERS
    columns = {"median": right - 58, "p99": right}
    yield text(axis.start, _TOP - 18, name, 'class="head"')
    for figure, x in columns.items():
        yield text(x, _TOP - 18, figure, 'class="soft num"')
    for tick in _ticks(axis):
        x = axis.at(tick)
        yield line((x, x), (_TOP - 8, bottom), 'class="grid"')
        yield text(x, bottom + 18, f"{tick:,g}", 'text-anchor="middle" class="soft"')
    yield text(axis.end + 8, bottom + 18, "ms", 'class="soft"')
    for row, level in enumerate(levels):
        base = _TOP + _ROW * (row + 1)
        shapes = {url: _density(axis, values[url, level]) for url in urls}
        most = max((max(shape) for shape in shapes.values() if shape), default=1.0)
        for index, url in enumerate(urls):
            times = values[url, level]
            if not times:
                continue
            figures = percentiles(times)
            colour = _colour(index)
            yield _shape(axis, base, shapes[url], most, colour)
            for figure, reach in (("median", _ROW - 16), ("p99", 16)):
                x = axis.at(max(figures[figure] or 0.0, axis.low))
                yield line((x, x), (base, base - reach), f'stroke="{colour}" stroke-width="2"')
            y = base - 8 - 18 * (len(urls) - 1 - index)
            for figure, x in columns.items():
                yield text(
                    x, y, _number(figures[figure] or 0.0), f'class="num" style="fill:{colour}"'
                )
        yield line((axis.start, right), (base, base), 'class="base"')


def _density(axis: LogAxis, values: Sequence[float]) -> list[float]:
    """Return the share of the samples around each of `_BINS` places of the axis, smoothed over
    about two bins each way.
    """
    if not values:
        return []
    places = np.log10(np.clip(values, axis.low, axis.high))
    edges = np.linspace(math.log10(axis.low), math.log10(axis.high), _BINS + 1)
    counts = np.histogram(places, edges)[0] / len(values)
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
