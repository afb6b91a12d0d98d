"""Caches compared in turns: the same requests and weights, ratios within a repeat, and a picture
that shows them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from freight.lab.bench import throughput as bench_throughput
from freight.lab.bench.cache_picture import WIDTH, cache_picture
from freight.lab.bench.caches import as_table, measure_caches
from freight.lab.bench.drive import StepRecord
from freight.model.config.presets import PRESETS
from freight.model.open import open_random
from freight.settings.engine import EngineArgs

SVG = "{http://www.w3.org/2000/svg}"
SHAPE = PRESETS["llama-1b"] | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}
SIZES = ["8KiB", "4MiB"]


@pytest.fixture
def shape(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE))
    return str(path)


def measure(shape: str, repeats: int) -> dict[str, Any]:
    opened = open_random(EngineArgs(max_num_seqs=8), shape)
    return measure_caches(opened, "tiny", ["auto", "fp8"], SIZES, 6, 12, 8, repeats)


def test_each_cache_at_each_size(shape: str):
    found = measure(shape, 1)
    rows = found["rows"]
    assert [(row["kv_cache_memory"], row["kv_cache_dtype"]) for row in rows] == [
        (size, dtype) for size in SIZES for dtype in ("bfloat16", "fp8_e4m3fn")
    ]
    assert [row["ratio"] is None for row in rows] == [True, False] * 2
    plain, fp8, roomy, _ = rows
    assert fp8["capacity_tokens"] > 1.5 * plain["capacity_tokens"]
    assert (
        fp8["mean_running"] > plain["mean_running"]
    )  # where memory binds, more requests run at once
    assert roomy["cache_occupancy"] < plain["cache_occupancy"]
    assert found["processor"]


def test_they_take_turns_on_the_same_requests_and_ratios_are_within_a_repeat(
    shape: str, monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[int, Any]] = []

    def drive(engine: Any, prompts: list[list[int]], params: list[Any]) -> list[StepRecord]:
        """A repeat takes 1 s with an FP8 cache and 2 s with another, and 10 times as long as the
        one before.
        """
        asked.append((id(engine), prompts))
        turn = sum(one == id(engine) for one, _ in asked) - 1
        seconds = 10.0**turn * (1 if engine.runner.pool.spec.bytes_per_token < 128 else 2)
        return [StepRecord(seconds, seconds, len(prompts), len(prompts), 0.5, len(prompts))]

    monkeypatch.setattr(bench_throughput, "drive", drive)
    found = measure(shape, 3)
    engines = [engine for engine, _ in asked]
    assert len(set(engines)) == 4
    assert [engines[start] for start in (4, 8, 12)] == engines[4:7]
    for start in (4, 8, 12):
        assert all(prompts == asked[start][1] for _, prompts in asked[start : start + 4])
        assert len(set(engines[start : start + 4])) == 4
    medians = [row["ratio"] and row["ratio"]["median"] for row in found["rows"]]
    assert medians == [None, 2.0, None, 2.0]
    assert found["rows"][1]["ratio"]["low"] == found["rows"][1]["ratio"]["high"] == 2.0


FOUND = {
    "model": "a <model>",
    "processor": "Some & Processor",
    "threads": 2,
    "weight_dtype": "bfloat16",
    "num_requests": 6,
    "repeats": 6,
    "rows": [
        {
            "kv_cache_memory": size,
            "kv_cache_dtype": dtype,
            "capacity_tokens": 672,
            "mean_running": 2.0,
            "requests_per_second": {
                "median": rate,
                "low": rate - 1,
                "high": rate + 1,
                "coverage": 0.97,
            },
            "ratio": None
            if dtype == "bfloat16"
            else {"median": 1.5, "low": 1.4, "high": 1.6, "coverage": 0.97},
        }
        for size, dtype, rate in (
            ("2MiB", "bfloat16", 8.0),
            ("2MiB", "fp8", 12.0),
            (None, "bfloat16", 24.0),
        )
    ],
}


def test_bars_are_as_long_as_rates_and_nothing_lies_outside():
    svg = ElementTree.fromstring(cache_picture(FOUND))
    bars = [float(bar.attrib["width"]) for bar in svg.iter(f"{SVG}rect")][1:]
    assert bars[1] / bars[0] == pytest.approx(1.5, abs=0.01)
    assert bars[2] / bars[0] == pytest.approx(3.0, abs=0.01)
    text = [part.text or "" for part in svg.iter(f"{SVG}text")]
    assert "12.0/s (1.50 ×), 672 tokens fit" in text
    assert any("Some & Processor" in part for part in text)
    assert {"2MiB", "default size"} <= set(text)
    height = float(svg.attrib["viewBox"].split()[3])
    assert all(0 <= float(line.attrib["x2"]) <= WIDTH for line in svg.iter(f"{SVG}line"))
    assert all(float(part.attrib["y"]) < height for part in svg.iter(f"{SVG}text"))


def test_the_table_names_the_processor_and_the_interval():
    lines = as_table(FOUND).splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    assert ["2MiB", "fp8", "672", "2.0", "12.0 (11.0 to 13.0)", "1.50", "1.40 to 1.60"] in cells
    assert lines[-1].endswith("intervals cover 97%. Some & Processor, 2 threads.")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--compare auto", "give two or more"),
        ("--compare fp8 --compare fp8", "each once"),
        ("--compare-memory 2MiB", "--compare takes turns"),
        ("--compare auto --compare fp9", "fp9"),
        ("--compare auto --compare fp8 --kv-cache-dtype fp8", "give one of the two"),
        (
            "--compare auto --compare fp8 --kv-cache-memory 1MiB --compare-memory 2MiB",
            "give one of the two",
        ),
        ("--compare auto --compare fp8 --compare-memory many", "many"),
        ("--compare auto --compare fp8 --picture x.png", "name it x.svg"),
        ("--picture x.svg", "--compare takes turns"),
    ],
)
def test_what_cannot_be_compared(freight: Callable[..., Any], options: str, says: str):
    answer = freight("bench", "throughput", *options.split())
    assert (answer.code, says in answer.err) == (2, True), answer.err


def test_the_command(freight: Callable[..., Any], shape: str, tmp_path: Path):
    argv = ["bench", "throughput", "--random-weights", shape]
    argv += ["--num-requests", "2", "--input-len", "4", "--output-len", "2"]
    argv += ["--compare", "auto", "--compare", "fp8_e5m2", "--compare-memory", "4MiB"]
    answer = freight(*argv, "--picture", str(tmp_path / "gain.svg"))
    assert answer.code == 0, answer.err
    assert re.search(r"\| 4MiB +\| fp8_e5m2 +\|", answer.out)
    assert "fp8_e5m2" in (tmp_path / "gain.svg").read_text()
    assert len(json.loads(freight(*argv, "--json").out)["rows"]) == 2
