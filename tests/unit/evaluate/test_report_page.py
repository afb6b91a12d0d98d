"""The report: its page is self-contained, its texts do not overlap, and it says which setting to take."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from freight.checkpoint.reader import resolve_model
from freight.config.engine import EngineArgs
from freight.evaluate.advice import advice, how_to, recommended
from freight.evaluate.charts import HEIGHT, NUM_STYLES, WIDTH, Axis, Series, chart
from freight.evaluate.figures import Evaluation
from freight.evaluate.grid import GridArgs, evaluate_grid
from freight.evaluate.report_page import sections, write_report

TEXT = (resolve_model("demo") / "heldout.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    grid = GridArgs(caches=("unit", "token", "e5m2"), window=128, per_layer=True)
    return evaluate_grid(EngineArgs("demo"), [TEXT[:1500]], grid)


def test_the_page_is_one_file_and_the_text_has_its_pictures_beside_it(evaluation: Evaluation, tmp_path: Path):
    write_report(evaluation, tmp_path)
    pictures = re.findall(r"!\[[^]]+\]\((.+\.svg)\)", (tmp_path / "report.md").read_text())
    assert len(pictures) == 4
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"report.html", "report.json", "report.md", *pictures}
    for name in pictures:
        picture = ElementTree.fromstring((tmp_path / name).read_text())
        assert picture.tag == "{http://www.w3.org/2000/svg}svg"
        assert "prefers-color-scheme:dark" in (picture[0].text or "")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)=|url\(|@import|<script""", page)
    assert "prefers-color-scheme:dark" in page
    assert page.count("<svg") == 4
    first = re.search(r"<p[^>]*>(.*?)</p>", page)
    assert first is not None
    assert f"Take “{recommended(evaluation).name}”" in first[1] or "Keep the 16-bit cache" in first[1]
    said = json.loads((tmp_path / "report.json").read_text())
    assert [run["name"] for run in said["runs"]] == ["16 bits", "unit", "token", "e5m2"]
    assert "| 16 bits | bfloat16" in (tmp_path / "report.md").read_text()


def test_every_chart_says_what_it_shows_and_has_units(evaluation: Evaluation):
    for section in sections(evaluation):
        assert section.says.endswith(".")
        labels = [text.text or "" for text in ElementTree.fromstring(section.svg).iter("text")]
        assert sum("(" in label or label == "layer" or "tokens" in label for label in labels) >= 2


def test_each_layer_alone_costs_less_than_all(evaluation: Evaluation):
    first, *others = evaluation.runs
    assert first.layer_kl is None
    for run in others:
        assert run.layer_kl is not None
        assert len(run.layer_kl) == 6
        assert 0 < max(run.layer_kl) < run.kl_mean < 3 * sum(run.layer_kl)


def boxes(svg: str) -> list[tuple[float, float, float, float]]:
    """The box of each text that is not rotated, generously: 7.5 pixels a character, 13 high."""
    found = []
    for text in ElementTree.fromstring(svg).iter("text"):
        if "transform" not in text.attrib:
            width, x, y = 7.5 * len(text.text or ""), float(text.attrib["x"]), float(text.attrib["y"])
            left = x - width * {"end": 1, "middle": 0.5}.get(text.get("text-anchor", ""), 0)
            found.append((left, y - 11, left + width, y + 2))
    return found


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("scale", [1e-7, 3e-3, 1.0, 4e6])
@pytest.mark.parametrize("spread", [1.0, 1.001, 40.0, 1e5])
def test_no_text_overlaps_and_all_is_inside(log: bool, scale: float, spread: float):
    points = [[(512.0 + i * 100, scale), (90000.0, scale * spread)] for i in range(NUM_STYLES)]
    series = [Series(f"setting {i}", part, i) for i, part in enumerate(points)]
    svg = chart("title", Axis("tokens", log=log), Axis("KL (nats)", log=log), series)
    found = boxes(svg)
    for i, (left, top, right, bottom) in enumerate(found):
        assert left >= 0
        assert right <= WIDTH
        assert top >= 0
        assert bottom <= HEIGHT
        for other in found[i + 1 :]:
            apart = right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
            assert apart, (found[i], other)


def test_settings_differ_without_colour():
    """Each mark or its dashes differ from all others' by more than its class, which is the colour."""
    looks = []
    for style in range(NUM_STYLES):
        svg = ElementTree.fromstring(chart("t", Axis("x"), Axis("y"), [Series("a", [(1, 1), (2, 2)], style)]))
        parts = [part for part in svg.iter() if re.match(r"s\d", part.get("class", ""))]
        looks.append(
            tuple(
                (p.tag, "hollow" in p.get("class", ""), p.get("stroke-dasharray"), len(p.get("points", "")))
                for p in parts
            )
        )
    assert len(set(looks)) == NUM_STYLES


def test_what_cannot_be_on_a_logarithmic_axis_is_left_out():
    svg = chart("t", Axis("x"), Axis("y", log=True), [Series("a", [(1, 0.0), (2, 0.5)], 0)])
    assert svg.count("<circle") == 2  # the mark and the legend's
    assert "nothing to show" in chart("t", Axis("x"), Axis("y", log=True), [Series("a", [(1, 0.0)], 0)])


def test_the_advice_is_the_least_error_among_the_small_and_safe(evaluation: Evaluation):
    first, unit, token, coarse = evaluation.runs
    safe = [
        replace(run, perplexity_ratio=1.001, perplexity_ratio_interval=(0.999, 1.002)) for run in (unit, token, coarse)
    ]
    judged = replace(evaluation, runs=(first, *safe))
    assert recommended(judged).name == "token"
    bad = replace(safe[1], perplexity_ratio_interval=(0.99, 1.02))
    assert recommended(replace(judged, runs=(first, safe[0], bad))).name == "unit"
    assert recommended(replace(judged, runs=(first, bad))) is first
    assert advice(replace(judged, runs=(first, bad))).startswith("Keep the 16-bit cache")
    assert "too few for an interval" not in advice(replace(judged, units="documents"))
    assert "too few for an interval" in advice(replace(judged, units=None))
    assert "--kv-cache-dtype fp8 --kv-scales dynamic" in how_to(token, judged.overview)
    assert "--kv-granularity channel --center" in how_to(
        replace(token, scale_source="calibrated", granularity="channel", centered=True), judged.overview
    )


def test_the_command_names_the_scales_the_weights_and_the_text_that_were_measured(evaluation: Evaluation):
    over = replace(evaluation.overview, kv_scales="my scales.json", quantization="fp8", calibration_data="own.txt")
    run = replace(evaluation.runs[2], granularity="tensor")
    for source in ("file", "given"):
        command = how_to(replace(run, scale_source=source), over)
        assert command == "freight serve demo --kv-cache-dtype fp8 --kv-scales 'my scales.json' --quantization fp8"
    made, served = how_to(replace(run, scale_source="calibrated"), over).split(" && ")
    assert made.endswith("--kv-granularity tensor --calibration-data own.txt")
    assert served == "freight serve OUT --quantization fp8"
