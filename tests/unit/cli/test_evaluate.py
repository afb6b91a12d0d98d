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
    argv = [
        "evaluate",
        "--data",
        text,
        "--quantization",
        "fp8",
        "--kernels",
        "reference",
        "--no-speed",
    ]
    argv += ["--caches", "token,e5m2"]
    said = json.loads(freight(*argv, "--json").out)
    assert [run["kv_cache_dtype"] for run in said["runs"]] == ["bfloat16", "fp8_e4m3fn", "fp8_e5m2"]
    assert said["weights"]["dtype"] == "fp8_e4m3fn"
    assert said["weights"]["embedding_bytes"] == 4096 * 256 * 2
    plain = json.loads(freight(*argv[:3], *argv[-3:], "--json").out)["weights"]
    assert said["weights"]["bytes"] < 0.55 * plain["bytes"]
    few_windows, few_tokens, *lines = freight(*argv).out.splitlines()
    assert few_windows.startswith("warning: 1 window is too little text for an interval")
    assert few_tokens == "warning: 8 tokens are too few: it takes 2,000, so 1,992 more"
    assert lines[:3] == [line for line in lines if line.startswith("|")][:3]
    assert f"weights: {said['weights']['bytes']:,} bytes in fp8_e4m3fn" in lines[-3]


def test_a_checkpoint_with_static_scales_needs_no_options(freight: Run, text: str, tmp_path: Path):
    """Its scales stand in the place of measured ones. E5M2 cannot use them: it is measured without
    any.
    """
    out = str(tmp_path / "out")
    options = (
        "--weights",
        "none",
        "--kv-cache",
        "fp8",
        "--num-samples",
        "1",
        "--max-seq-len",
        "64",
    )
    assert freight("quantize", "demo", out, *options).code == 0
    answer = freight("evaluate", out, "--data", text, "--no-speed", "--json")
    assert answer.code == 0, answer.err
    caches = [
        (run["kv_cache_dtype"], run["scale_source"]) for run in json.loads(answer.out)["runs"]
    ]
    fp8 = [("fp8_e4m3fn", source) for source in ("unit", "checkpoint", "dynamic")]
    assert caches == [("bfloat16", None), *fp8, ("fp8_e5m2", "unit")]


def test_the_16_bit_cache_is_one_row(freight: Run, text: str):
    rows = freight(
        "evaluate", "--data", text, "--kv-cache-dtype", "bfloat16", "--no-speed"
    ).out.splitlines()
    assert len([row for row in rows if row.startswith("| 16 bits")]) == 1
    assert len([row for row in rows if row.startswith("|")]) == 3


def test_a_report_folder_that_cannot_be_written_is_found_before_the_run(
    freight: Run, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "freight.models.open.OpenModel.load", lambda *_: pytest.fail("weights were read")
    )
    (tmp_path / "file").write_text("")
    answer = freight("evaluate", "--data", text, "--report", str(tmp_path / "file" / "report"))
    assert answer.code == 2
    assert "--report" in answer.err
    assert "name another folder" in answer.err


def test_a_report_is_written_and_named(freight: Run, text: str, tmp_path: Path):
    folder = tmp_path / "new" / "report"
    answer = freight(
        "evaluate", "--data", text, "--caches", "unit", "--no-speed", "--report", str(folder)
    )
    assert answer.code == 0, answer.err
    assert str(folder / "report.html") in answer.out
    found = {path.name for path in folder.iterdir()}
    assert found >= {"report.html", "report.md", "report.json", "error-against-memory.svg"}


def test_bad_files_are_one_line(freight: Run, tmp_path: Path):
    path = tmp_path / "documents.jsonl"
    path.write_text('{"body": "x"}')
    answer = freight("evaluate", "--data", str(path))
    assert answer.code == 2
    assert "line 1" in answer.err
    path.with_suffix(".txt").write_text("")
    assert "is empty" in freight("evaluate", "--data", str(path.with_suffix(".txt"))).err


def test_layers_are_measured_one_at_a_time(freight: Run, text: str):
    said = json.loads(freight("evaluate", "--data", text, "--per-layer", "--json").out)
    assert [layer["layer"] for layer in said["layers"]] == list(range(6))
    assert said["kl_whole"] > 0
    assert "all at once" in freight("evaluate", "--data", text, "--per-layer").out


@pytest.mark.parametrize("measured", [(), ("--long",), ("--per-layer",)])
def test_bad_documents_and_windows_are_one_line_in_every_measurement(
    freight: Run,
    text: str,
    tmp_path: Path,
    measured: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(
        "freight.models.open.OpenModel.load", lambda *_: pytest.fail("weights were read")
    )
    (tmp_path / "empty").write_text("")
    (tmp_path / "other.jsonl").write_text('{"body": "x"}')
    for argv, said in (
        (("--data", str(tmp_path / "empty")), "is empty"),
        (("--data", str(tmp_path / "other.jsonl")), "has ['body']"),
        (("--data", str(tmp_path / "missing")), "cannot be read as text"),
        (("--data", text, "--window", "2048"), "1024 tokens"),
    ):
        answer = freight("evaluate", *argv, *measured)
        assert answer.code == 2, answer
        assert said in answer.err
        assert answer.err.count("\n") == 1


@pytest.mark.parametrize("measured", [("--long",), ("--per-layer",), ("--tasks", "x")])
def test_a_report_of_another_measurement_is_refused(
    freight: Run, tmp_path: Path, measured: tuple[str, ...]
):
    answer = freight("evaluate", *measured, "--report", str(tmp_path))
    assert answer.code == 2
    assert f"is not read by {measured[0]}" in answer.err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["--per-layer", "--max-tokens", "64"],
            "--max-tokens 64 is not read by --per-layer: leave it out",
        ),
        (["--long", "--caches", "token"], "--caches token is not read by --long"),
        (["--long", "--no-speed"], "--no-speed is not read by --long"),
        (["--tasks", "arc_easy", "--data", "x"], "--data x is not read by --tasks"),
        (["--tasks", "arc_easy", "--report", "x"], "--report x is not read by --tasks"),
        (["--contexts", "4"], "--contexts 4 belongs to --long, which is not given"),
        (["--long", "--per-layer"], "different measurements"),
        (["--caches", ""], "--caches '' is unknown"),
    ],
)
def test_what_a_measurement_does_not_read_is_refused(freight: Run, argv: list[str], said: str):
    answer = freight("evaluate", "demo", *argv)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err
