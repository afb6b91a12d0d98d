"""benchmarks/peers/side_by_side.py with stand-ins for engines: a peer that fails, the order of a
round, the table.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import assert_names

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "peers" / "side_by_side.py"
ANSWER = json.dumps(
    {"prefill_tokens_per_second": 100.0, "decode_tokens_per_second": 20.0, "version": "engine 1.2"}
)
FIGURES = {
    "prefill_tokens_per_second": 200.0,
    "decode_tokens_per_second": 40.0,
    "kernels": "cpu-portable",
}


def stand_in(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def run_script(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *words: str
) -> Any:
    """(standard output, the names in the order of the runs)."""
    output = tmp_path / "results.json"
    freight = stand_in(
        tmp_path / "freight", f"[ $1 = --version ] && echo 9.9 || echo '{json.dumps(FIGURES)}'"
    )
    line = [
        str(SCRIPT),
        "--models",
        str(tmp_path),
        "--freight",
        freight,
        "--output",
        str(output),
        *words,
    ]
    monkeypatch.setattr(sys, "argv", line)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    results = json.loads(output.read_text())["results"]
    return capsys.readouterr().out, [one["engine"] for one in results]


def test_a_peer_that_fails_keeps_a_row_with_the_reason_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    crashes = stand_in(tmp_path / "crashes", "kill -SEGV $$")
    raises = stand_in(
        tmp_path / "raises", "echo Traceback >&2; echo 'ImportError: a|b' >&2; exit 1"
    )
    works = stand_in(tmp_path / "works", f"echo '{ANSWER}'")
    engines = [
        f"--engine=llama_cpp={crashes}",
        f"--engine=vllm={raises}",
        f"--engine=torch={works}",
    ]
    out, _ = run_script(
        capsys, monkeypatch, tmp_path, *engines, "--workload", "8x128+33", "--rounds", "1"
    )
    assert "| llama.cpp Q8_0 | failed | killed by SIGSEGV | | | 0 |" in out
    assert "| vLLM INT8 W8A8 | failed | exit status 1: ImportError: a/b | | | 0 |" in out
    assert "| torch BF16 products alone | 100.0 | 20.0 | 2.00 | 2.00 | 1 |" in out


def test_an_interpreter_that_is_not_there_is_a_row_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    words = (
        f"--engine=vllm={tmp_path}/nothing",
        "--peers",
        "vllm-bf16",
        "freight-fp8",
        "--rounds",
        "1",
    )
    out, _ = run_script(capsys, monkeypatch, tmp_path, *words, "--workload", "1x8+3")
    assert "| vLLM BF16 | failed | [Errno 2] No such file or directory" in out
    assert "| Freight FP8 | 200.0 | 40.0 | 1.00 | 1.00 | 1 |" in out


def test_every_round_starts_with_another_row_and_only_those_asked_for_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    works = stand_in(tmp_path / "works", f"echo '{ANSWER}'")
    words = (
        f"--engine=torch={works}",
        "--peers",
        "torch-bf16",
        "freight-fp8",
        "--rounds",
        "2",
        "--workload",
        "1x8+3",
    )
    out, order = run_script(capsys, monkeypatch, tmp_path, *words)
    assert order == ["freight-fp8", "torch-bf16", "torch-bf16", "freight-fp8"]
    assert "- Freight 9.9, kernels cpu-portable\n- engine 1.2\n" in out
    out, _ = run_script(capsys, monkeypatch, tmp_path, *words, "--base", "torch-bf16")
    assert "| torch BF16 products alone ÷ it, prefill | decode |" in out
    assert "| Freight FP8 | 200.0 | 40.0 | 0.50 | 0.50 | 2 |" in out


def test_one_cache_for_all_rows_of_freight_and_for_no_other():
    script = runpy.run_path(str(SCRIPT))
    words = ["--models=models", "--output=it.json", "--engine=xllamacpp=python"]
    args = script["arguments"]().parse_args([*words, "--kv-cache-dtype=bfloat16"])
    for name, command in script["commands"](args, script["Workload"](1, 8, 3)).items():
        ours = name.startswith("freight-")
        assert (command[-2:] == ["--kv-cache-dtype", "bfloat16"]) == ours


def test_a_name_stands_for_its_workloads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    words = ("--peers", "freight-fp8", "--rounds", "1", "--workload", "long", "1x8+3")
    out, _ = run_script(capsys, monkeypatch, tmp_path, *words)
    assert [line for line in out.splitlines() if line.startswith("### ")] == [
        "### 1x16384+65",
        "### 8x4096+65",
        "### 1x8+3",
    ]


def test_a_row_without_its_environment_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    with pytest.raises(SystemExit):
        run_script(capsys, monkeypatch, tmp_path, "--peers", "vllm-int8")
    assert_names(capsys.readouterr().err, "--peers", "--engine vllm=PYTHON")


def test_the_processor_and_its_units_come_from_cpuinfo(tmp_path: Path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "model name\t: A Processor\nflags\t\t: fpu avx2 amx_int8\n\nmodel name\t: A Processor\n"
    )
    found = runpy.run_path(str(SCRIPT))["machine"](cpuinfo)
    assert found["processor"] == "A Processor"
    assert found["units"] == ["avx2", "amx_int8"]
