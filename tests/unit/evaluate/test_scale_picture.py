"""The picture of scales: positions follow the numbers, for every range of them."""

from __future__ import annotations

import math
from typing import Any
from xml.etree import ElementTree

import pytest

from freight.fp8.formats import Format
from freight.lab.evaluate.scale_picture import HEIGHT, WIDTH, magnitude_picture, scale_picture

SVG = "{http://www.w3.org/2000/svg}"


def draw(
    *scales: tuple[float, float] | None, format: Format = Format.E4M3FN
) -> ElementTree.Element:
    """Keys of these (min, max), values a tenth of them."""

    def side(one: tuple[float, float] | None, factor: float) -> dict[str, float] | None:
        return None if one is None else {"min": one[0] * factor, "max": one[1] * factor}

    layers: list[dict[str, Any]] = [
        {"layer": i, "k": side(s, 1.0), "v": side(s, 0.1)} for i, s in enumerate(scales)
    ]
    return ElementTree.fromstring(scale_picture("a <model>", format, layers))


def dots(svg: ElementTree.Element) -> list[tuple[float, float]]:
    """Of keys, then values, by layer; not those of the legend."""
    return [
        (float(c.attrib["cx"]), float(c.attrib["cy"])) for c in svg.iter(f"{SVG}circle") if len(c)
    ]


def test_larger_is_higher_and_later_is_further_right():
    svg = draw((0.01, 0.01), (0.1, 0.1), (1.0, 1.0))
    keys, values = dots(svg)[:3], dots(svg)[3:]
    for side in (keys, values):
        assert [x for x, _ in side] == sorted(x for x, _ in side)
        assert [y for _, y in side] == sorted((y for _, y in side), reverse=True)
    assert all(v[1] > k[1] for k, v in zip(keys, values, strict=True)), "values are smaller"
    steps = [keys[i][1] - keys[i + 1][1] for i in range(2)]
    assert steps[0] == pytest.approx(steps[1], abs=0.3), "the axis is logarithmic"


def test_a_scale_of_one_lies_on_the_format_s_largest_number():
    svg = draw((1.0, 1.0))
    dashed = next(line for line in svg.iter(f"{SVG}line") if "stroke-dasharray" in line.attrib)
    assert dots(svg)[0][1] == float(dashed.attrib["y1"])


def test_a_range_is_a_bar():
    bars = [
        line
        for line in draw((0.01, 0.1), (0.1, 0.1)).iter(f"{SVG}line")
        if line.get("stroke-width") == "3"
    ]
    assert len(bars) == 2  # keys and values of the first layer


@pytest.mark.parametrize("format", [Format.E4M3FN, Format.E4M3FNUZ])
@pytest.mark.parametrize("scale", [1e-12, 1e-5, 1.0, 1e6])
def test_everything_is_inside(scale: float, format: Format):
    svg = draw((scale / 3, scale), None, (scale, scale * 7), format=format)
    for x, y in dots(svg):
        assert 0 < x < WIDTH
        assert 0 < y < HEIGHT
    assert len(dots(svg)) == 4


def test_magnitudes_of_a_hybrid_stand_at_their_layers():
    """Layers 1 and 3 store something, the second no values. A bar is from the smallest channel."""
    side = {"smallest_channel": 0.5, "channel": 4.0, "max": 448.0}
    entries = [{"layer": 1, "k": side, "v": side}, {"layer": 3, "k": side, "v": None}]
    svg = ElementTree.fromstring(magnitude_picture(Format.E4M3FN, entries))
    lines = list(svg.iter(f"{SVG}line"))
    dashed = next(line for line in lines if "stroke-dasharray" in line.attrib)
    assert [y for _, y in dots(svg)] == [float(dashed.attrib["y1"])] * 3
    labels = [t.text for t in svg.iter(f"{SVG}text") if t.get("text-anchor") == "middle"]
    assert labels == ["0", "1", "2", "3", "layer"]
    assert all(x < WIDTH for x, _ in dots(svg))
    axis = {}
    for label in svg.iter(f"{SVG}text"):
        if label.get("text-anchor") == "end":
            axis[label.text] = float(label.attrib["y"]) - 4
    bars = [float(line.attrib["y2"]) for line in lines if line.get("stroke-width") == "3"]
    between = axis["0.1"] - axis["1"]  # a power of ten
    assert bars == pytest.approx([axis["1"] + between * math.log10(2)] * 3, abs=0.3)


def test_the_title_is_text():
    assert any("a <model>" in (text.text or "") for text in draw((1.0, 1.0)).iter(f"{SVG}text"))


def test_eighty_layers_have_no_eighty_labels():
    labels = [
        t for t in draw(*[(0.1, 0.1)] * 80).iter(f"{SVG}text") if t.get("text-anchor") == "middle"
    ]
    assert len(labels) <= 21
