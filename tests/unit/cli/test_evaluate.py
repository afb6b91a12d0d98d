"""freight evaluate at the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text"
    path.write_text("def main():\n    return 1\n")
    return str(path)


def test_it_tells_what_caches_and_weights_take(freight: Run, text: str):
    argv = ["evaluate", "--data", text, "--quantization", "fp8", "--kernels", "reference"]
    said = json.loads(freight(*argv, "--json").out)
    assert [cache["dtype"] for cache in said["caches"]] == ["bfloat16", "fp8_e4m3fn", "fp8_e5m2"]
    assert said["weights"]["dtype"] == "fp8_e4m3fn"
    assert said["weights"]["embedding_bytes"] == 4096 * 256 * 2
    plain = json.loads(freight(*argv[:3], "--json").out)["weights"]
    assert said["weights"]["bytes"] < 0.55 * plain["bytes"]
    lines = freight(*argv).out.splitlines()
    assert lines[:3] == [line for line in lines if line.startswith("|")][:3]
    assert f"weights: {said['weights']['bytes']:,} bytes in fp8_e4m3fn" in lines[-2]


def test_a_checkpoint_with_static_scales_needs_no_options(freight: Run, text: str, tmp_path: Path):
    """E5M2 cannot use scales that were made for E4M3: it is measured without any."""
    out = str(tmp_path / "out")
    options = ("--weights", "none", "--kv-cache", "fp8", "--num-samples", "1", "--max-seq-len", "64")
    assert freight("quantize", "demo", out, *options).code == 0
    answer = freight("evaluate", out, "--data", text, "--json")
    assert answer.code == 0, answer.err
    caches = [(cache["dtype"], cache["scale_source"]) for cache in json.loads(answer.out)["caches"]]
    assert caches == [("bfloat16", None), ("fp8_e4m3fn", "checkpoint"), ("fp8_e5m2", "unit")]


def test_the_16_bit_cache_is_one_row(freight: Run, text: str):
    rows = freight("evaluate", "--data", text, "--kv-cache-dtype", "bfloat16").out.splitlines()
    assert len([row for row in rows if row.startswith("| bfloat16")]) == 1
    assert len([row for row in rows if row.startswith("|")]) == 3


def test_layers_are_measured_one_at_a_time(freight: Run, text: str):
    said = json.loads(freight("evaluate", "--data", text, "--per-layer", "--json").out)
    assert [layer["layer"] for layer in said["layers"]] == list(range(6))
    assert said["kl_whole"] > 0
    assert "all at once" in freight("evaluate", "--data", text, "--per-layer").out
