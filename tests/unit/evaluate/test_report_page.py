"""The report: its page is self-contained, its texts do not overlap, and it says which setting to
take.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.refusals import assert_names
from tests.unit.server.page.browser import browser, in_browser, wait_for
from tests.unit.server.page.looks import LOOKS, WIDTHS, faults, keyboard_faults, seen_at

from freight.checkpoint.reader import resolve_model
from freight.lab.evaluate.advice import advice, how_to, recommended
from freight.lab.evaluate.charts import HEIGHT, MARK, NUM_STYLES, WIDTH, Axis, Series, chart
from freight.lab.evaluate.figures import CalibrationText, Evaluation
from freight.lab.evaluate.grid import GridArgs, evaluate_grid
from freight.lab.evaluate.report_page import sections, write_report
from freight.lab.evaluate.safety import Verdict
from freight.settings.engine import EngineArgs

TEXT = (resolve_model("demo") / "heldout.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    grid = GridArgs(caches=("unit", "token", "e5m2"), window=128, per_layer=True)
    return evaluate_grid(EngineArgs("demo"), [TEXT[:1500]], grid)


def test_the_page_is_one_file_and_the_text_has_its_pictures_beside_it(
    evaluation: Evaluation, tmp_path: Path
):
    write_report(evaluation, tmp_path)
    pictures = re.findall(r"!\[[^]]+\]\((.+\.svg)\)", (tmp_path / "report.md").read_text())
    assert len(pictures) == 7
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"report.html", "report.json", "report.md", *pictures}
    for name in pictures:
        picture = ElementTree.fromstring((tmp_path / name).read_text())
        assert picture.tag == "{http://www.w3.org/2000/svg}svg"
        sheet = next(part for part in picture.iter() if part.tag.endswith("style"))
        assert "prefers-color-scheme:dark" in (sheet.text or "")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)=|url\(|@import|<script""", page)
    assert "prefers-color-scheme:dark" in page
    assert page.count("<svg") == 7
    first = re.search(r"<p[^>]*>(.*?)</p>", page)
    assert first is not None
    assert "Warning:" in first[1], "1,500 characters are too few"
    assert_names(page, "cannot be said")
    said = json.loads((tmp_path / "report.json").read_text())
    assert [run["name"] for run in said["runs"]] == ["16 bits", "unit", "token", "e5m2"]
    text = (tmp_path / "report.md").read_text()
    assert "| 16 bits | bfloat16" in text
    for said_in in (page, text):
        for word in ("unit", "token", "KL", "clipped"):  # in an entry of their own
            assert f"<dt>{word}</dt>" in said_in or f"- **{word}**: " in said_in
        assert "“unit”, “token”" in said_in, "why"


def test_every_chart_says_what_it_shows_and_has_units(evaluation: Evaluation):
    for section in sections(evaluation):
        assert section.says.endswith(".")
        drawn = ElementTree.fromstring(section.svg)
        labels = [text.text or "" for text in drawn.iter() if text.tag.endswith("text")]
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
            width, x, y = (
                7.5 * len(text.text or ""),
                float(text.attrib["x"]),
                float(text.attrib["y"]),
            )
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
        svg = ElementTree.fromstring(
            chart("t", Axis("x"), Axis("y"), [Series("a", [(1, 1), (2, 2)], style)])
        )
        parts = [part for part in svg.iter() if re.match(r"s\d", part.get("class", ""))]
        looks.append(
            tuple(
                (
                    p.tag,
                    "hollow" in p.get("class", ""),
                    p.get("stroke-dasharray"),
                    len(p.get("points", "")),
                )
                for p in parts
            )
        )
    assert len(set(looks)) == NUM_STYLES


def test_what_cannot_be_on_a_logarithmic_axis_is_left_out():
    svg = chart("t", Axis("x"), Axis("y", log=True), [Series("a", [(1, 0.0), (2, 0.5)], 0)])
    assert svg.count("<circle") == 2  # the mark and the legend's
    assert "nothing to show" in chart(
        "t", Axis("x"), Axis("y", log=True), [Series("a", [(1, 0.0)], 0)]
    )


def test_the_16_bit_cache_stands_at_0_and_no_mark_on_another(evaluation: Evaluation):
    section = sections(evaluation)[0]
    names = [text.text for text in ElementTree.fromstring(section.svg).iter("text")]
    assert "16 bits" in names
    assert names.count("0") == 1
    places = marks(section.svg)
    assert len(places) == len(evaluation.runs)
    assert places[0] == (max(x for x, _ in places), max(y for _, y in places))
    no_mark_hides_another(section.svg, len(evaluation.runs))


@pytest.mark.parametrize("values", [(0.5,), (1e-6, 3.0), (2.0, 2.0)])
def test_0_is_below_a_logarithmic_axis(values: tuple[float, ...]):
    points = [(1.0, 0.0), *((2.0 + i, value) for i, value in enumerate(values))]
    svg = chart("t", Axis("x"), Axis("y", log=True, zero=True), [Series("a", points, 0)])
    zero, *others = (y for _, y in marks(svg))
    assert zero < HEIGHT
    assert all(y <= zero - MARK for y in others)
    ticks = [text.text for text in ElementTree.fromstring(svg).iter("text")]
    assert ticks[0] == "0"
    only = [Series("a", [(1.0, 0.0)], 0)]
    assert "nothing to show" in chart("t", Axis("x"), Axis("y", log=True, zero=True), only)


def test_the_advice_is_the_least_error_among_the_small_and_safe(evaluation: Evaluation):
    first, unit, token, coarse = evaluation.runs
    interval = (0.999, 1.002)
    safe = [
        replace(
            run,
            verdict=Verdict.SAFE,
            reasons=(),
            perplexity_ratio=1.001,
            perplexity_ratio_interval=interval,
        )
        for run in (unit, token, coarse)
    ]
    judged = replace(evaluation, runs=(first, *safe))
    assert recommended(judged) is safe[1]
    bad = replace(safe[1], verdict=Verdict.NOT_SAFE, reasons=("mean KL is 1.64",))
    assert recommended(replace(judged, runs=(first, safe[0], bad))) is safe[0]
    none = replace(judged, runs=(first, bad))
    assert recommended(none) is None
    assert advice(none).as_json()["verdict"] == "not safe"
    assert_names(advice(none).text, "No smaller cache", "1.64")
    unsettled = replace(
        judged, runs=(first, bad, replace(bad, verdict=Verdict.CANNOT_BE_SAID, reasons=("few",)))
    )
    assert_names(advice(unsettled).text, "cannot be said", "smaller cache")
    assert recommended(replace(judged, runs=(first, replace(safe[1], weights="fp8")))) is None, (
        "other weights"
    )
    assert "--kv-cache-dtype fp8 --kv-scales dynamic" in how_to(token, judged.overview)
    assert "--kv-granularity channel --center" in how_to(
        replace(token, scale_source="calibrated", granularity="channel", centered=True),
        replace(judged.overview, calibration=CalibrationText(None, 16, 1024)),
    )


def test_the_command_names_the_scales_the_weights_and_the_text_that_were_measured(
    evaluation: Evaluation,
):
    args = EngineArgs("demo", kv_scales="my scales.json", quantization="fp8", dtype="float32")
    text = CalibrationText("own.txt", 16, 1024)
    over = replace(evaluation.overview, args=args, calibration=text)
    run = replace(evaluation.runs[2], granularity="tensor")
    for source in ("file", "given"):
        command = how_to(replace(run, scale_source=source), over)
        assert (
            command
            == "freight serve demo --kv-cache-dtype fp8 --kv-scales 'my scales.json' --dtype float32 "
            "--quantization fp8"
        )
    made, served = how_to(replace(run, scale_source="calibrated"), over).split(" && ")
    sizes = "--num-samples 16 --max-seq-len 1024"
    assert made.endswith(f"--kv-granularity tensor --calibration-data own.txt {sizes}")
    assert served == "freight serve OUT --dtype float32 --quantization fp8"


def test_the_command_names_the_layers_that_were_skipped(evaluation: Evaluation):
    over = replace(
        evaluation.overview,
        args=EngineArgs("demo", kv_cache_dtype_skip_layers=("0", "sliding_window")),
        calibration=CalibrationText(None, 16, 1024),
    )
    layers = [
        {"dtype": "bfloat16", "granularity": None},
        {"dtype": "fp8_e5m2", "granularity": "token"},
    ]
    mixed = replace(
        evaluation.runs[2], kv_cache_dtype="mixed", granularity="token", scale_source="dynamic"
    )
    mixed = replace(mixed, layers=layers)
    served = "freight serve demo --kv-cache-dtype fp8_e5m2 --kv-scales dynamic"
    assert how_to(mixed, over) == f"{served} --kv-cache-dtype-skip-layers 0,sliding_window"
    made = how_to(replace(mixed, scale_source="calibrated"), over)
    assert made.endswith(" && freight serve OUT --kv-cache-dtype-skip-layers 0,sliding_window")
    assert how_to(evaluation.runs[0], over) == "freight serve demo --kv-cache-dtype bfloat16"
    stored, chosen = replace(mixed, scale_source="checkpoint"), replace(over, chosen_by_layer=True)
    assert how_to(stored, over) == (
        "freight serve demo --kv-cache-dtype fp8_e5m2 --kv-cache-dtype-skip-layers 0,sliding_window"
    )
    assert (
        how_to(stored, chosen) == "freight serve demo --kv-cache-dtype-skip-layers 0,sliding_window"
    )
    assert how_to(stored, replace(chosen, args=EngineArgs("demo"))) == "freight serve demo"


def marks(svg: str) -> list[tuple[float, float]]:
    """The middles of the marks in the plot, in order of the series."""
    found = []
    for part in ElementTree.fromstring(svg).iter():
        if part.find("title") is None:
            continue
        if part.tag == "circle":
            found.append((float(part.attrib["cx"]), float(part.attrib["cy"])))
        elif part.tag == "rect":
            found.append((float(part.attrib["x"]) + 4, float(part.attrib["y"]) + 4))
        else:
            corners = [
                tuple(map(float, corner.split(","))) for corner in part.attrib["points"].split()
            ]
            across, up = ([corner[side] for corner in corners] for side in (0, 1))
            found.append(((min(across) + max(across)) / 2, (min(up) + max(up)) / 2))
    return found


def no_mark_hides_another(svg: str, count: int) -> None:
    found = marks(svg)
    assert len(found) == count
    for i, (x, y) in enumerate(found):
        for other_x, other_y in found[i + 1 :]:
            assert max(abs(x - other_x), abs(y - other_y)) >= 8, "marks are 8 to 11 pixels wide"


def test_marks_at_one_x_stand_side_by_side():
    """As the demo's: six caches of 1,536 bytes, three of them of nearly the same error."""
    errors = (0.00160, 0.00161, 0.00162, 0.00173, 0.00576, 0.00108)
    series = [Series(f"cache {i}", [(1536, error)], i + 1) for i, error in enumerate(errors)]
    axes = Axis("bytes"), Axis("KL (nats)", log=True)
    svg = chart("t", *axes, [*series, Series("token", [(1584, 0.00125)], 7)], lines=False)
    no_mark_hides_another(svg, 7)
    assert svg.count("leader") == 3, "of the four that are near each other, one stays"
    many = [Series(str(i), [(1536, 0.001)], i) for i in range(NUM_STYLES)]
    no_mark_hides_another(chart("t", *axes, many, lines=False), NUM_STYLES)


def test_equal_values_of_a_category_stand_side_by_side():
    series = [Series(str(i), [(0, 1.0), (1, 2.0)], i) for i in range(4)]
    svg = chart("t", Axis("layer", names=["0", "1"]), Axis("KL (nats)"), series)
    no_mark_hides_another(svg, 8)
    assert MARK >= 11


def test_a_command_breaks_between_words_alone(evaluation: Evaluation, tmp_path: Path):
    write_report(evaluation, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<span>--kv-cache-dtype</span>" in page
    assert "code span{white-space:nowrap}" in page


@in_browser
def test_the_page_can_be_read_at_every_width_and_by_the_keyboard(
    evaluation: Evaluation, tmp_path: Path
):
    write_report(evaluation, tmp_path)
    url = (tmp_path / "report.html").as_uri()
    found = []
    with browser() as page:
        for width, scheme in LOOKS:
            with seen_at(page, width, scheme):
                page.open(url)
                found += [(width, scheme, fault) for fault in faults(page) + keyboard_faults(page)]
        assert found == []
        with seen_at(page, min(WIDTHS), "light"):
            page.open(url)
            page.press("Tab")

            def scrolls() -> bool:
                page.press("Right")  # again: a busy machine may lose the first
                return bool(page.run("return document.activeElement.scrollLeft") > 0)

            wait_for(scrolls)
            assert page.run("return document.activeElement.querySelector('svg') !== null")
