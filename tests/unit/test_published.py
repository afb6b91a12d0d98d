"""benchmarks/published/: files that are read with their types checked, and the documents made of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import published
import published_tables
import pytest
from published import (
    Clipping,
    LayerMagnitudes,
    Machine,
    Model,
    Noise,
    Quality,
    Row,
    Side,
    Text,
)

from freight.errors import ConfigError

PLAIN = Row(
    cache="16 bits",
    weights="as stored",
    kv_cache_dtype="bfloat16",
    granularity=None,
    kl=0.0,
    kl_interval=(0.0, 0.0),
    kl_without_noise=0.0,
    kl_p99=0.0,
    perplexity=20.0,
    perplexity_ratio=1.0,
    perplexity_ratio_interval=(1.0, 1.0),
    same_top=1.0,
    same_top_interval=(1.0, 1.0),
    clipped_share=0.0,
    clipping=None,
    flushed_share=0.0,
    bytes_per_token=200,
    tokens_per_gib=5_368_709,
)
TOKEN = replace(
    PLAIN,
    cache="token",
    kv_cache_dtype="fp8_e4m3fn",
    granularity="token",
    kl=0.00543,
    kl_interval=(0.00376, 0.0071),
    kl_without_noise=0.00303,
    perplexity=20.118,
    perplexity_ratio=1.0059,
    perplexity_ratio_interval=None,
    same_top=0.9583,
    same_top_interval=(0.9377, 0.9789),
    bytes_per_token=104,
    tokens_per_gib=10_324_440,
)
SIDE = Side(
    max=500.0,
    channel=5.0,
    smallest_channel=1.0,
    first=500.0,
    later=50.0,
    beyond_448=0.01,
    below_normal=0.0,
)
RESULT = Quality(
    model=Model("tiny", "Tiny 1M", "tiny 1.0", "MIT", "ab" * 32),
    text=Text("prose", "cd" * 32, 4095, 341, 12, None, None),
    command="make real MODEL=tiny",
    machine=Machine("A Processor (R)", "cpu-avx512", "1.0", "2.0", "3.11.7"),
    date="2026-11-29",
    noise=Noise(0.0012, 4095),
    magnitudes=(LayerMagnitudes(0, SIDE, None),),
    rows=(PLAIN, TOKEN),
)
OTHER = replace(
    RESULT,
    machine=replace(RESULT.machine, kernels="cpu-avx2"),
    rows=(PLAIN, replace(TOKEN, kl=0.0055), replace(TOKEN, cache="int8")),
)


def test_docs_are_what_the_tool_prints() -> None:
    """After a change to benchmarks/published/: python tools/published_tables.py --write"""
    assert published_tables.DOCUMENT.read_text("utf-8") == published_tables.document()
    for name, picture in published_tables.pictures().items():
        assert published_tables.DOCUMENT.with_name(name).read_text("utf-8") == picture
    content = published_tables.README.read_text("utf-8")
    assert published_tables.readme(content) == content


def test_published_files_have_the_names_that_are_written() -> None:
    for path in published.FOLDER.glob("*.json"):
        result = published.read(path)
        if isinstance(result, Quality):
            assert path.name == published.file_name(result)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = published.write(RESULT, tmp_path / "new")
    assert path.name == "tiny.a-processor-r-avx512.json"
    assert published.read(path) == RESULT
    assert published.read_all(Quality, path.parent) == [RESULT]


def test_a_figure_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    endless = replace(RESULT, rows=(replace(PLAIN, perplexity=math.inf),))
    with pytest.raises(ConfigError, match="not finite"):
        published.write(endless, tmp_path)
    assert list(tmp_path.iterdir()) == []


def lacks_date(facts: dict[str, Any]) -> None:
    del facts["date"]


def more(facts: dict[str, Any]) -> None:
    facts["model"]["size"] = 1


def text_for_number(facts: dict[str, Any]) -> None:
    facts["rows"][1]["kl"] = "0.1"


def no_integer(facts: dict[str, Any]) -> None:
    facts["rows"][1]["bytes_per_token"] = 104.5


def no_figure(facts: dict[str, Any]) -> None:
    facts["rows"][1]["kl"] = math.nan


def beyond_floats(facts: dict[str, Any]) -> None:
    facts["rows"][1]["perplexity"] = 10**400


def two_lines(facts: dict[str, Any]) -> None:
    facts["model"]["title"] = "Tiny\n# heading"


def lone_surrogate(facts: dict[str, Any]) -> None:
    facts["model"]["title"] = "\ud800"


def no_rows(facts: dict[str, Any]) -> None:
    facts["rows"] = []


def one_bound(facts: dict[str, Any]) -> None:
    facts["rows"][0]["kl_interval"] = [0.0]


def no_list(facts: dict[str, Any]) -> None:
    facts["rows"] = {}


def no_object(facts: dict[str, Any]) -> None:
    facts["machine"] = None


def of_another_kind(facts: dict[str, Any]) -> None:
    facts["kind"] = "speed"


@pytest.mark.parametrize(
    ("damage", "key"),
    [
        (lacks_date, "date is missing"),
        (more, "model.size is no key"),
        (text_for_number, "rows[1].kl is '0.1'; it has to be a finite number"),
        (no_figure, "rows[1].kl is nan; it has to be a finite number"),
        (beyond_floats, "rows[1].perplexity is a whole number"),
        (two_lines, "model.title is 'Tiny\\n# heading'; it has to be a text of one line"),
        (lone_surrogate, "model.title is '\\ud800'; it has to be a text of one line"),
        (no_rows, "rows is empty"),
        (no_integer, "rows[1].bytes_per_token is 104.5; it has to be an integer"),
        (one_bound, "rows[0].kl_interval has 1 entries"),
        (no_list, "rows is a dict of length 0; it has to be a list"),
        (no_object, "machine is None; it has to be an object"),
        (of_another_kind, "kind is 'speed'; known are quality"),
    ],
)
def test_a_bad_file_is_named_with_its_key(
    damage: Callable[[dict[str, Any]], None], key: str, tmp_path: Path
) -> None:
    path = published.write(RESULT, tmp_path)
    facts = json.loads(path.read_text())
    damage(facts)
    path.write_text(json.dumps(facts))
    with pytest.raises(ConfigError) as raised:
        published.read(path)
    assert str(raised.value).startswith(f"{path}: {key}")


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ConfigError, match=r"a\.json"):
        published.read_all(Quality, tmp_path)


def cells(table: str) -> list[list[str]]:
    lines = [line.strip("| ").split("|") for line in table.splitlines()]
    return [[cell.strip() for cell in line] for line in lines]


def test_the_table_of_one_processor_has_all_figures() -> None:
    head, _, plain, token = cells(published_tables.table([RESULT]))
    assert plain == ["as stored", "16 bits", *"——", "20.000", *"——", "0.000%", "5,368,709"]
    assert dict(zip(head, token, strict=True)) == {
        "weights": "as stored",
        "cache": "token",
        "mean KL": "0.00543 ± 0.00167",
        "less noise": "0.00303",
        "perplexity": "20.118",
        "change": "+0.59%",
        "same top": "95.83% ± 2.06%",
        "clipped": "0.000%",
        "tokens in 1 GiB": "10,324,440",
    }


def test_two_processors_stand_side_by_side() -> None:
    """A row that one of them does not have is empty there."""
    head, _, *rows = cells(published_tables.table([RESULT, OTHER]))
    assert head[2:] == [
        *("mean KL, avx512", "perplexity, avx512", "change, avx512"),
        *("mean KL, avx2", "perplexity, avx2", "change, avx2"),
        "tokens in 1 GiB",
    ]
    assert rows[0][2:8] == ["—", "20.000", "—"] * 2
    assert [row[1] for row in rows] == ["16 bits", "token", "int8"]
    assert rows[1][5] == "0.00550 ± 0.00167"
    assert rows[2][2:5] == ["—"] * 3
    same = [RESULT.machine, replace(RESULT.machine, processor="B")]
    assert published_tables.machine_names(same) == ["A Processor (R), avx512", "B, avx512"]


def test_a_section_says_what_was_measured_and_how(tmp_path: Path) -> None:
    published.write(RESULT, tmp_path)
    published.write(OTHER, tmp_path)
    document = published_tables.document(tmp_path)
    assert document.count("## Tiny 1M") == 1
    assert RESULT.model.sha256 is not None
    for words in (RESULT.command, RESULT.model.sha256, "cpu-avx2", "cpu-avx512", "4,095 tokens"):
        assert words in document
    assert document.count("- cache *token*") == 1


def test_the_short_table_stands_between_its_markers(tmp_path: Path) -> None:
    published.write(OTHER, tmp_path)
    begin, end = published_tables.MARKERS
    content = published_tables.readme(f"before\n{begin}older\n{end}after\n", tmp_path)
    before, _, rest = content.partition(begin)
    table, _, after = rest.partition(end)
    assert (before, after) == ("before\n", "after\n")
    head, _, row = cells(table.strip())
    assert head == ["model", "E4M3 per token", "INT8", "E5M2", "E4M3 without scales"]
    assert row == ["Tiny 1M", "0.00550, +0.59%", "0.00543, +0.59%", "—", "—"]
    assert published_tables.readme("no markers", tmp_path) == "no markers"


def test_what_scales_have_to_cover_is_said_and_drawn(tmp_path: Path) -> None:
    unit = replace(TOKEN, cache="unit", clipping=Clipping(layers=1, channels=3, times=1.116))
    e5m2 = replace(TOKEN, cache="e5m2", clipping=Clipping(layers=0, channels=0, times=1.0))
    published.write(replace(RESULT, rows=(*RESULT.rows, unit, e5m2)), tmp_path)
    text = published_tables.document(tmp_path)
    assert "The largest key is 500, in layer 0." in text
    assert "A scale of 1.0 clips such keys in layers 0." in text
    assert "The first token of a window has the largest keys of layer 0: 10 times" in text
    assert "*unit*: 3 channels in 1 layers, by a factor of 1.12 at most; *e5m2*: none." in text
    (name,) = published_tables.pictures(tmp_path)
    assert f"]({name})" in text
