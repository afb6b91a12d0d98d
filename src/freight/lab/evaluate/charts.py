"""The report's charts as inline SVG: axes with units, and a mark and dashes for each setting, so
that grey is enough.

Colours are those of the kit (`svg.styled`), in the style sheet of the page (`report_page`). Names
stand in a legend next to the plot and never on it, so no text can overlap.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from freight.base.svg import line, text

WIDTH = 860
HEIGHT = 360
_LEFT = 76  # pixels around the plot; the legend is at the right
_RIGHT = 230
_TOP = 16
_BOTTOM = 52
_END = WIDTH - _RIGHT  # pixels where the plot ends
_FLOOR = HEIGHT - _BOTTOM
_DASHES = ("", "7 4", "2 3", "10 3 2 3", "5 2", "1 4", "12 5", "4 4 1 4", "9 2 2 2 2 2")
NUM_STYLES = 24
MARK = 13.0  # pixels that a mark takes, with a gap
_ZERO = 14  # pixels from the end of a logarithmic axis to 0, and to its own beginning
_BREAK = 44

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points of one setting, with its name in the legend; `style` picks colour, mark and dashes."""

    name: str
    points: Sequence[Point]
    style: int


@dataclass(frozen=True)
class Axis:
    """`label` has the unit. `names`, if given, stand at 0, 1, …: the axis is then of categories.

    `zero`: the axis begins at 0; a logarithmic one has 0 beyond a break at its lower end.
    """

    label: str
    log: bool = False
    names: Sequence[str] = ()
    zero: bool = False

    def has(self, value: float) -> bool:
        """Whether `value` has a place."""
        return not self.log or value > 0 or (self.zero and value == 0)

    def has_span(self, values: Sequence[float]) -> bool:
        """Whether the axis has anything but 0 beyond a break."""
        return len(values) > 0 and (not self.log or max(values) > 0)


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series], lines: bool = True) -> str:
    """SVG. Points that a logarithmic axis cannot show are left out. `title` is for screen readers."""
    visible = []
    x_values: list[float] = []
    y_values: list[float] = []
    for setting in series:
        points = [point for point in setting.points if x.has(point[0]) and y.has(point[1])]
        visible.append(replace(setting, points=points))
        for x_value, y_value in points:
            x_values.append(x_value)
            y_values.append(y_value)
    if not x.has_span(x_values) or not y.has_span(y_values):
        return "<p>There is nothing to show: no setting differs from the first.</p>"
    across = _Scale(x, x_values, _LEFT, _END)
    up = _Scale(y, y_values, _FLOOR, _TOP)
    at: list[Sequence[Point]] = []
    for setting in visible:
        at.append([(across.at(x_value), up.at(y_value)) for x_value, y_value in setting.points])
    places = at
    if x.names:
        places = _abreast(at, len(x.names))
    elif not lines:
        places = _apart(at)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        *_axes(across, up),
    ]
    if not lines:
        for true, moved in zip(at, places, strict=True):
            parts += _leaders(true, moved)
    for setting, place in zip(visible, places, strict=True):
        parts += _marks(setting, place, across, lines)
    parts += [*_legend(visible, lines), "</svg>"]
    return "\n".join(parts)


class _Scale:
    """Values -> pixels between `low` and `high`."""

    def __init__(self, axis: Axis, values: Sequence[float], low: float, high: float) -> None:
        self.axis = axis
        self._low = low
        self._high = high
        self._zero: float | None = None  # where 0 is, if it is beyond a break
        if axis.names:
            self._from = -0.5
            self._to = len(axis.names) - 0.5
            step = math.ceil(len(axis.names) / 16)
            self.ticks = list(map(float, range(0, len(axis.names), step)))
            return
        if axis.log:
            positive = [value for value in values if value > 0]
            least = min(positive)
            most = max(positive)
            self.ticks = _log_ticks(least, most)
        else:
            least = 0.0 if axis.zero else min(values)
            most = max(values)
            self.ticks = _ticks(least, most)
        self._from = self._position(min(least, self.ticks[0]))
        self._to = self._position(max(most, self.ticks[-1]))
        pad = 0.04 * (self._to - self._from) or (0.1 if axis.log else 0.5)
        self._to += pad
        if axis.log or not axis.zero:
            self._from -= pad
        if axis.log and axis.zero:
            inwards = math.copysign(1, high - low)
            self._zero = low + inwards * _ZERO
            self._low = low + inwards * _BREAK
            self.ticks = [0.0, *self.ticks]

    def _position(self, value: float) -> float:
        """Return where `value` is between `_from` and `_to`."""
        return math.log10(value) if self.axis.log else value

    @property
    def gap(self) -> float | None:
        """The middle of the break between 0 and a logarithmic axis, if there is one."""
        if self._zero is None:
            return None
        return (self._zero + self._low) / 2

    def at(self, value: float) -> float:
        if value == 0 and self._zero is not None:
            return self._zero
        share = (self._position(value) - self._from) / (self._to - self._from)
        return round(self._low + share * (self._high - self._low), 1)

    def text(self, tick: float) -> str:
        if self.axis.names:
            return self.axis.names[int(tick)]
        if tick == 0 or 1e-4 <= abs(tick) < 1000:
            return f"{tick:.6g}"
        if 1000 <= abs(tick) < 1e6:
            return f"{tick:,.0f}"
        return f"{tick:.3g}"


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers from at most `low` to at least `high`."""
    span = high - low or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 5)
    first = math.floor(low / step)
    last = math.ceil(high / step)
    return [round(step * i, 12) for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power, or 1 alone over more than two powers, from at most `low` to at
    least `high`.
    """
    steps: tuple[int, ...] = (1, 2, 5) if high / low < 100 else (1,)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    ticks = [float(f"{step}e{power}") for power in powers for step in steps]
    first = bisect_right(ticks, low * 1.0001) - 1
    last = bisect_left(ticks, high * 0.9999)
    return ticks[first : last + 1]


def _axes(across: _Scale, up: _Scale) -> Iterator[str]:
    for tick in up.ticks:
        y = up.at(tick)
        yield line((_LEFT, _END), (y, y), 'class="grid"')
        yield text(_LEFT - 8, y + 4, up.text(tick), 'class="num" text-anchor="end"')
    if up.gap is not None:
        for y in (up.gap - 2, up.gap + 2):
            yield line((_LEFT - 6, _LEFT + 6), (y + 3, y - 3), 'class="base"')
    yield line((_LEFT, _END), (_FLOOR, _FLOOR), 'class="base"')
    for tick in across.ticks:
        x = across.at(tick)
        yield line((x, x), (_FLOOR, _FLOOR + 5), 'class="base"')
        yield text(x, _FLOOR + 20, across.text(tick), 'class="num" text-anchor="middle"')
    middle = (_LEFT + _END) / 2
    yield text(middle, HEIGHT - 8, across.axis.label, 'class="soft" text-anchor="middle"')
    y = (_TOP + _FLOOR) / 2
    look = f'class="soft" text-anchor="middle" transform="rotate(-90 16 {y})"'
    yield text(16, y, up.axis.label, look)


def _abreast(at: Sequence[Sequence[Point]], num_categories: int) -> list[Sequence[Point]]:
    """Move each series sideways by a few pixels, so that marks of one category stand side by
    side.
    """
    width = (_END - _LEFT) / num_categories
    step = min(MARK, 0.8 * width / max(1, len(at) - 1))
    places: list[Sequence[Point]] = []
    for i, points in enumerate(at):
        shift = step * (i - (len(at) - 1) / 2)
        places.append([(round(x + shift, 1), y) for x, y in points])
    return places


def _apart(at: Sequence[Sequence[Point]]) -> list[Sequence[Point]]:
    """Move marks that would cover an earlier one sideways to the nearest free place."""
    occupied: list[Point] = []
    places: list[Sequence[Point]] = []
    for points in at:
        for x, y in points:
            near = [a for a, b in occupied if abs(y - b) < MARK - 0.1]
            occupied.append((round(_free(x, near), 1), y))
        places.append(occupied[len(occupied) - len(points) :])
    return places


def _free(x: float, near: Sequence[float]) -> float:
    """Return the place nearest to x, inside of the plot, where no mark of `near` is; x if none is."""
    for distance in range(WIDTH):
        for place in (x + MARK * distance, x - MARK * distance):
            is_inside = _LEFT + MARK / 2 <= place <= _END - MARK / 2 or place == x
            if is_inside and all(abs(place - a) >= MARK - 0.1 for a in near):
                return place
    return x


def _leaders(true: Sequence[Point], moved: Sequence[Point]) -> Iterator[str]:
    """Draw a thin line from where a mark belongs to where it stands."""
    for (x, y), (place, _) in zip(true, moved, strict=True):
        if x != place:
            yield line((x, place), (y, y), 'class="base leader"')


def _marks(series: Series, at: Sequence[Point], across: _Scale, lines: bool) -> Iterator[str]:
    style = series.style % NUM_STYLES
    if lines and len(at) > 1:
        path = " ".join(f"{x},{y}" for x, y in at)
        yield f'<polyline {_dashed(style)} fill="none" points="{path}"/>'
    for (x, y), (true_x, true_y) in zip(at, series.points, strict=True):
        name = across.text(true_x) if across.axis.names else f"{true_x:,.6g}"
        yield _mark(x, y, style, f"{series.name}: {name}, {true_y:.4g}")


def _class(style: int) -> int:
    """Return the number of the colour, of which the page has eight."""
    return style if style < 8 else 4 + style % 4


def _dashed(style: int) -> str:
    """Return the attributes of a setting's line."""
    return f'class="s{_class(style)}" stroke-dasharray="{_DASHES[style % len(_DASHES)]}"'


def _mark(x: float, y: float, style: int, tip: str = "") -> str:
    """Draw one of four shapes, 10 pixels wide: full, hollow, or hollow with a sign in it."""
    if style >= 8:
        return _mark(x, y, _class(style), tip) + _sign(x, y, style)
    look = f'class="s{style} {"hollow" if style >= 4 else "full"}"'
    shape = style % 4
    title = f"<title>{escape(tip)}</title>" if tip else ""
    if shape == 0:
        return f'<circle {look} cx="{x}" cy="{y}" r="4.5">{title}</circle>'
    if shape == 1:
        return f'<rect {look} x="{x - 4}" y="{y - 4}" width="8" height="8">{title}</rect>'
    corners = {2: ((0, -5.5), (5, 4), (-5, 4)), 3: ((0, -6), (5, 0), (0, 6), (-5, 0))}[shape]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon {look} points="{points}">{title}</polygon>'


# Where strokes of the signs inside of hollow marks end; they begin at the opposite of the middle:
# a cross, a bar, a plus
_STROKES = {3: ((2, 2), (2, -2)), 4: ((3, 0),), 5: ((2.5, 0), (0, 2.5), (0, 0))}


def _sign(x: float, y: float, style: int) -> str:
    """Draw what is inside of a hollow mark: a dot, a cross, a bar or a plus."""
    colour = f"s{_class(style)}"
    if style < 12:
        return f'<circle class="{colour} full" cx="{x}" cy="{y}" r="1.6"/>'
    strokes = []
    for dx, dy in _STROKES[style // 4]:
        strokes.append(line((x - dx, x + dx), (y - dy, y + dy), f'class="{colour}"'))
    return "".join(strokes)


def _legend(series: Sequence[Series], lines: bool) -> Iterator[str]:
    x = _END + 24
    distance = min(24.0, (HEIGHT - _TOP - 18) / max(1, len(series)))
    for row, setting in enumerate(series):
        y = round(_TOP + 14 + distance * row, 1)
        style = setting.style % NUM_STYLES
        if lines:
            yield line((x, x + 34), (y, y), _dashed(style))
        yield _mark(x + 17, y, style)
        yield text(x + 44, y + 4, setting.name[:24])
