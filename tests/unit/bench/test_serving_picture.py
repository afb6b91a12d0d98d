"""The picture of a load: positions follow the numbers, every server and load is there, and nothing
is outside.
"""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from tests.refusals import line_naming

from freight.lab.bench.answers import Answer
from freight.lab.bench.load import Level
from freight.lab.bench.serving_figures import Run
from freight.lab.bench.serving_picture import WIDTH, serving_picture

SVG = "{http://www.w3.org/2000/svg}"


def run(url: str, concurrency: int, first: float, gap: float) -> Run:
    """Ten answers of five tokens; times in seconds."""
    times = tuple(first + gap * i for i in range(5))
    return Run(
        url,
        Level(concurrency),
        0,
        [Answer(0.0, 0.0, times[-1], times, (1,) * 5, 5, 7, None, 5)] * 10,
    )


def draw(*runs: Run) -> ElementTree.Element:
    return ElementTree.fromstring(serving_picture("a <model>", runs))


def medians(svg: ElementTree.Element) -> list[float]:
    """Of the long lines, in the order drawn: by half, load and server."""
    lines = [line for line in svg.iter(f"{SVG}line") if line.get("stroke-width") == "2"]
    return [float(line.attrib["x1"]) for line in lines[::2]]


def texts(svg: ElementTree.Element) -> dict[str, float]:
    """Every text, with its y."""
    return {element.text or "": float(element.attrib["y"]) for element in svg.iter(f"{SVG}text")}


def test_slower_is_further_right_in_both_halves():
    svg = draw(
        run("a", 1, 0.1, 0.01),
        run("b", 1, 0.2, 0.02),
        run("a", 8, 0.4, 0.04),
        run("b", 8, 0.8, 0.08),
    )
    found = medians(svg)
    assert found == sorted(found)
    assert len(found) == 8
    steps = [b - a for a, b in pairwise(found[:4])]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.3), "the axis is logarithmic"


@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e4])
def test_everything_is_inside_and_the_numbers_are_there(scale: float):
    svg = draw(run("http://a", 1, 0.2 * scale, 0.02 * scale), run("http://a", 4, 2.0 * scale, 0.0))
    height = float(svg.attrib["viewBox"].split()[3])
    for path in svg.iter(f"{SVG}path"):
        for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path.attrib["d"]):
            assert 0 <= float(x) <= WIDTH
            assert 0 <= float(y) <= height
    assert len(list(svg.iter(f"{SVG}path"))) == 4
    text = {element.text for element in svg.iter(f"{SVG}text")}
    assert {"a <model>", "http://a", "Time to first token", "Between tokens"} <= text


def test_a_load_without_an_answer_has_no_shape():
    failed = Run("a", Level(4), 0, [Answer(0.0, 0.0, 1.0, error="http_429")])
    svg = draw(run("a", 1, 0.1, 0.01), failed)
    assert len(list(svg.iter(f"{SVG}path"))) == 2
    (place,) = [place for text, place in texts(svg).items() if "Failed" in text]
    assert place <= float(svg.attrib["viewBox"].split()[3])


def test_failures_are_counted_by_server_and_not_mentioned_without_one():
    failed = Run("b", Level(1), 0, [Answer(0.0, 0.0, 1.0, error="timeout")])
    both = texts(draw(run("a", 1, 0.1, 0.01), run("b", 1, 0.1, 0.01), failed))
    line_naming("\n".join(both), "Failed", "1 of 11", "b")
    assert not any("Failed" in text for text in texts(draw(run("a", 1, 0.1, 0.01))))
