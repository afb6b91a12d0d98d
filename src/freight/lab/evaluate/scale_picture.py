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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from freight.base.fields import JsonObject
from freight.base.svg import LogAxis, framed, line, styled, text
from freight.fp8.formats import Format

WIDTH = 760
HEIGHT = 462
_LEFT = 70  # margins, in pixels
_RIGHT = 16
_TOP = 104
_BOTTOM = 46
_STYLE = styled(
    "text{font-size:12px}text.one{fill:var(--c3)}line.one{stroke:var(--c3)}.band{fill:var(--box)}"
)
_TINY = 1e-6  # drawn for a channel of zeros
_SMALLEST_NORMAL = {Format.E4M3FN: 2.0**-6, Format.E4M3FNUZ: 2.0**-7, Format.E5M2: 2.0**-14}


@dataclass(frozen=True)
class _Side:
    """Keys or values: `scales` are {min, max} by layer, `shift` the share of a layer's width from its
    middle to its dot.
    """

    name: str
    colour: str
    shift: float
    scales: dict[int, Mapping[str, float]]


_LegendOf = Callable[[_Side, Format], str]


def scale_picture(title: str, format: Format, layers: Sequence[JsonObject]) -> str:
    """SVG of `layers`, each {layer, k, v} with k and v None or {min, max}: scales, of which there
    is at least one. `title` is the model's name.
    """
    heading = f"{title}: largest magnitude its KV scales cover"
    return _picture(heading, format, layers, len(layers), _legend)


def magnitude_picture(format: Format, magnitudes: Sequence[JsonObject]) -> str:
    """SVG of keys and values by layer, as `Magnitudes.as_list` has them: from the smallest to the
    largest of the channels' largest magnitudes.
    """
    layers = []
    for entry in magnitudes:
        sides = {}
        for name in ("k", "v"):
            side = entry[name]
            sides[name] = side and {
                "min": max(side["smallest_channel"], _TINY) / format.max,
                "max": max(side["max"], _TINY) / format.max,
            }
        layers.append({"layer": entry["layer"], **sides})
    heading = "Keys and values: largest magnitude of a layer's channels"
    num_layers = 1 + max(entry["layer"] for entry in layers)
    return _picture(heading, format, layers, num_layers, _magnitude_legend)


def _picture(
    heading: str, format: Format, layers: Sequence[JsonObject], num_layers: int, legend: _LegendOf
) -> str:
    sides = (_Side("keys", "var(--c1)", -0.12, {}), _Side("values", "var(--c2)", 0.12, {}))
    amax = [_SMALLEST_NORMAL[format]]
    for entry in layers:
        for side, scales in zip(sides, (entry["k"], entry["v"]), strict=True):
            if scales:
                side.scales[entry["layer"]] = scales
                amax += [scales["min"] * format.max, scales["max"] * format.max]
    low = math.floor(math.log10(min(amax)))
    high = math.ceil(math.log10(max(*amax, format.max) * 1.2))
    axis = LogAxis(10.0**low, 10.0**high, HEIGHT - _BOTTOM, _TOP)
    parts = list(_axes(format, num_layers, range(low, high + 1), axis))
    for side in sides:
        parts += _dots(side, num_layers, axis, format)
    for row, side in enumerate(sides):
        if side.scales:
            parts += _key(side, 60 + 18 * row, legend(side, format))
    return framed(heading, WIDTH, HEIGHT, _STYLE, parts)


def _x(layer: float, num_layers: int) -> float:
    return round(_LEFT + (layer + 0.5) / num_layers * (WIDTH - _LEFT - _RIGHT), 1)


def _axes(format: Format, num_layers: int, powers: range, axis: LogAxis) -> Iterator[str]:
    right = WIDTH - _RIGHT
    top = axis.at(format.max)
    bottom = axis.at(_SMALLEST_NORMAL[format])
    yield f'<rect x="{_LEFT}" y="{top}" width="{right - _LEFT}" height="{bottom - top}" class="band"/>'
    for power in powers:
        y = axis.at(10.0**power)
        yield line((_LEFT, right), (y, y), 'class="grid"')
        yield text(_LEFT - 8, y + 4, _power(power), 'text-anchor="end"')
    yield line((_LEFT, right), (top, top), 'class="one" stroke-dasharray="5 3"')
    note = f"{format.max:g}: {format} with a scale of 1.0 saturates above, and is coarse below the band"
    yield text(right - 4, top - 5, note, 'text-anchor="end" class="one"')
    step = max(1, math.ceil(num_layers / 20))
    for layer in range(0, num_layers, step):
        yield text(_x(layer, num_layers), HEIGHT - _BOTTOM + 18, layer, 'text-anchor="middle"')
    yield text((_LEFT + right) / 2, HEIGHT - 8, "layer", 'text-anchor="middle"')


def _power(power: int) -> str:
    return f"{10.0**power:g}" if -3 <= power <= 4 else f"1e{power}"


def _dots(side: _Side, num_layers: int, axis: LogAxis, format: Format) -> Iterator[str]:
    """Draw the dots and bars of keys or of values, a little left or right of the layer's middle."""
    for layer, scales in side.scales.items():
        x = _x(layer + side.shift, num_layers)
        scale = scales["max"]
        top = axis.at(scale * format.max)
        bottom = axis.at(scales["min"] * format.max)
        tip = f"layer {layer}, {side.name}: scale {scale:.4g}, magnitudes up to {scale * format.max:.4g}"
        if bottom > top:
            look = f'stroke="{side.colour}" stroke-width="3" opacity="0.45"'
            yield line((x, x), (top, bottom), look)
        yield f'<circle cx="{x}" cy="{top}" r="4" fill="{side.colour}"><title>{tip}</title></circle>'


def _legend(side: _Side, format: Format) -> str:
    """The range of scales, and the headroom to the format's largest number, in powers of two."""
    largest = [scales["max"] for scales in side.scales.values()]
    smallest = min(scales["min"] for scales in side.scales.values())
    return (
        f"{side.name}: scales {smallest:.3g} to {max(largest):.3g}; headroom to {format.max:g}, if it were 1.0: "
        f"{-math.log2(max(largest)):.1f} to {-math.log2(min(largest)):.1f} bits"
    )


def _magnitude_legend(side: _Side, format: Format) -> str:
    """The range of the channels' largest magnitudes."""
    largest = max(scales["max"] for scales in side.scales.values()) * format.max
    smallest = min(scales["min"] for scales in side.scales.values()) * format.max
    return (
        f"{side.name}: {smallest:.3g} to {largest:.4g} (smallest and largest channel of all layers)"
    )


def _key(side: _Side, y: int, label: str) -> Iterator[str]:
    yield f'<circle cx="{_LEFT + 4}" cy="{y - 4}" r="4" fill="{side.colour}"/>'
    yield text(_LEFT + 14, y, label)
