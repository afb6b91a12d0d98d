"""A picture of KV scales by layer, as SVG text: what each layer's cache covers, against the
format's range.

A scale s means that magnitudes up to s × 448 (E4M3FN) are stored without saturation, and from s ×
2⁻⁶ on with full precision. A layer is a bar from the smallest to the largest of its scales, a dot
where there is one. The shaded band is what a scale of 1.0 would cover at full precision, so the
distance of a dot to the band's upper edge is the headroom that layer would leave unused without its
scale, and a dot above it would saturate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from freight.fp8.formats import Format

WIDTH, HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 16, 82, 46  # margins, in pixels
_COLOURS = {"k": "#1f6fb4", "v": "#d9541e"}
_NAMES = {"k": "keys", "v": "values"}
_SMALLEST_NORMAL = {Format.E4M3FN: 2.0**-6, Format.E4M3FNUZ: 2.0**-7, Format.E5M2: 2.0**-14}


def scale_picture(title: str, format: Format, layers: Sequence[Mapping[str, Any]]) -> str:
    """SVG of `layers`, each {layer, k, v} with k and v None or {min, max}: scales, of which there
    is at least one.
    """
    sides = {
        side: [(entry["layer"], entry[side]) for entry in layers if entry[side]] for side in "kv"
    }
    amax = [
        scale * format.max
        for side in sides.values()
        for _, one in side
        for scale in (one["min"], one["max"])
    ]
    floor, ceiling = _SMALLEST_NORMAL[format], format.max
    low = math.floor(math.log10(min(*amax, floor)))
    high = math.ceil(math.log10(max(*amax, ceiling) * 1.2))
    axes = _Axes(len(layers), low, high)
    parts = [
        *_frame(title, format, axes, floor, ceiling),
        *(line for side in "kv" for line in _side(side, sides[side], axes, format)),
        *_legend(sides, format),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Axes:
    """Layers from left to right, magnitudes upwards in powers of ten."""

    def __init__(self, num_layers: int, low: int, high: int) -> None:
        self.num_layers, self.low, self.high = num_layers, low, high

    def x(self, layer: float) -> float:
        return round(_LEFT + (layer + 0.5) / self.num_layers * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, magnitude: float) -> float:
        share = (math.log10(magnitude) - self.low) / (self.high - self.low)
        return round(HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM), 1)


def _frame(title: str, format: Format, axes: _Axes, floor: float, ceiling: float) -> Iterator[str]:
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {box}>'
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    yield f'<text x="{_LEFT}" y="20" font-size="15">{escape(title)}: largest magnitude its KV scales cover</text>'
    right, top, bottom = WIDTH - _RIGHT, axes.y(ceiling), axes.y(floor)
    yield f'<rect x="{_LEFT}" y="{top}" width="{right - _LEFT}" height="{bottom - top}" fill="#eef2ee"/>'
    for power in range(axes.low, axes.high + 1):
        y = axes.y(10.0**power)
        yield f'<line x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}" stroke="#dddddd"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{_power(power)}</text>'
    yield f'<line x1="{_LEFT}" x2="{right}" y1="{top}" y2="{top}" stroke="#447744" stroke-dasharray="5 3"/>'
    note = f"{format.max:g}: {format} with a scale of 1.0 saturates above, and is coarse below the band"
    yield f'<text x="{right - 4}" y="{top - 5}" text-anchor="end" fill="#447744">{note}</text>'
    step = max(1, math.ceil(axes.num_layers / 20))
    for layer in range(0, axes.num_layers, step):
        yield f'<text x="{axes.x(layer)}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{layer}</text>'
    yield f'<text x="{(_LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">layer</text>'


def _power(power: int) -> str:
    return f"{10.0**power:g}" if -3 <= power <= 4 else f"1e{power}"


def _side(
    side: str, layers: Sequence[tuple[int, Mapping[str, float]]], axes: _Axes, format: Format
) -> Iterator[str]:
    """The dots and bars of keys or of values, a little left or right of the layer's middle."""
    colour, shift = _COLOURS[side], -0.12 if side == "k" else 0.12
    for layer, scales in layers:
        x, top, bottom = (
            axes.x(layer + shift),
            axes.y(scales["max"] * format.max),
            axes.y(scales["min"] * format.max),
        )
        scale = scales["max"]
        tip = f"layer {layer}, {_NAMES[side]}: scale {scale:.4g}, magnitudes up to {scale * format.max:.4g}"
        if bottom > top:
            look = f'stroke="{colour}" stroke-width="3" opacity="0.45"'
            yield f'<line x1="{x}" x2="{x}" y1="{top}" y2="{bottom}" {look}/>'
        yield f'<circle cx="{x}" cy="{top}" r="4" fill="{colour}"><title>{tip}</title></circle>'


def _legend(
    sides: Mapping[str, Sequence[tuple[int, Mapping[str, float]]]], format: Format
) -> Iterator[str]:
    """Per side: the range of scales, and the headroom to the format's largest number, in powers of
    two.
    """
    for row, (side, layers) in enumerate(sides.items()):
        if layers:
            largest = [scales["max"] for _, scales in layers]
            least, most = (-math.log2(scale) for scale in (max(largest), min(largest)))
            text = (
                f"{_NAMES[side]}: scales {min(scales['min'] for _, scales in layers):.3g} to {max(largest):.3g}; "
                f"headroom to {format.max:g}, if it were 1.0: {least:.1f} to {most:.1f} bits"
            )
            y = 42 + 18 * row
            yield f'<circle cx="{_LEFT + 4}" cy="{y - 4}" r="4" fill="{_COLOURS[side]}"/>'
            yield f'<text x="{_LEFT + 14}" y="{y}">{text}</text>'
