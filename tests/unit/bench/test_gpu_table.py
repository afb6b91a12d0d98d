"""benchmarks/gpu_table.py over a stand-in for `freight bench`: rows that fail, crash or hang cost
themselves alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gpu_goals import Results, table

from freight.kernels.reference_set import REFERENCE
from freight.lab.bench import gpu

SCRIPT = Path(__file__).parents[3] / "benchmarks/gpu_table.py"
STAND_IN = """
import json, os, sys, time
name, words = sys.argv[1], sys.argv[1:]
with open("started", "a") as file:
    print(*words, file=file)
ways = json.load(open("ways.json"))
if name == "latency":
    way = ways[name]
    print("a warning of some library", flush=True)
    if way == "fails":
        sys.exit("no room on this card")
    if way == "hangs":
        time.sleep(60)
    if way == "runs":
        print(json.dumps({"decode_tokens_per_second": 5.0}))
    sys.exit()
for case, way in enumerate(ways["kernels"], 1):
    if case <= int(words[words.index("--after") + 1]):
        continue
    row = {"case": case, "kernel": "attention", "format": "bfloat16", "shape": [64, 1, 8192], "median_us": case}
    if way == "hangs":
        time.sleep(60)
    if way == "crashes":
        os._exit(3)
    if way == "garbage":
        print('{"case": 1, "ker', "NaN", "[]", "17", sep="\\n", flush=True)
    if way == "fails" or way == "loses the device":
        row = {"case": case, "kernel": "attention", "what": "64", "error": "out of memory"}
    print(json.dumps(row), flush=True)
    if way == "loses the device":
        sys.exit("illegal address")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_table", module)
    spec.loader.exec_module(module)
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "FREIGHT", (sys.executable, str(tmp_path / "stand_in.py")))
    monkeypatch.setattr(module, "START_UP", 5.0)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    kernels, latency = module.COMMANDS["kernels"].words, module.COMMANDS["8b batch 1, FP8"].words
    commands = {"kernels": module.Command(kernels, 2.0), "one": module.Command(latency, 2.0)}
    monkeypatch.setattr(module, "COMMANDS", commands)
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(module.signal, "signal", lambda *_: before)
    return module


def run(
    script: ModuleType, kernels: list[str], latency: str = "runs", *more: str
) -> list[dict[str, Any]]:
    """Everything in rows.jsonl after a run in which rows behave so."""
    Path("ways.json").write_text(json.dumps({"kernels": kernels, "latency": latency}))
    script.main(["--output", "out", *more])
    return [json.loads(line) for line in Path("out/rows.jsonl").read_text().splitlines() if line]


def cases(records: list[dict[str, Any]]) -> list[tuple[int, bool]]:
    """(number, whether it was measured) of the kernels' rows."""
    rows = [one["row"] for one in records if one["command"] == "kernels" and "row" in one]
    return [(row["case"], "error" not in row) for row in rows]


def test_a_row_that_fails_crashes_or_prints_garbage_costs_one_row(script):
    ways = ["runs", "fails", "crashes", "garbage", "loses the device", "runs"]
    records = run(script, ways)
    assert cases(records) == [(1, True), (2, False), (3, False), (4, True), (5, False), (6, True)]
    assert {"command": "kernels", "done": True} in records
    assert {"command": "one", "row": {"decode_tokens_per_second": 5.0}} in records
    assert "illegal address" in Path("out/log").read_text()


def test_a_row_that_hangs_is_ended_and_costs_one_row(script):
    records = run(script, ["runs", "hangs", "runs"])
    assert cases(records) == [(1, True), (2, False), (3, True)]
    assert "took more than 2 s" in records[1]["row"]["error"]


def test_a_command_that_cannot_start_is_given_up(script):
    records = run(script, ["crashes"] * 9)
    assert cases(records) == [(1, False), (2, False)]
    assert {"command": "kernels", "done": True} not in records
    assert records[-1] == {"command": "one", "done": True}


@pytest.mark.parametrize(
    ("way", "said"), [("fails", "no room"), ("hangs", "took more than"), ("prints", "no row")]
)
def test_a_failed_run_is_repeated_by_the_next_and_a_finished_one_is_not(script, way, said, capsys):
    script.START_UP = 1.0
    failed = run(script, ["runs"], way)
    assert said in failed[-1]["row"]["error"]
    Path("started").unlink()
    assert run(script, ["runs"])[-1] == {"command": "one", "done": True}
    assert [line.split()[0] for line in Path("started").read_text().splitlines()] == ["latency"]
    assert "| found |" in capsys.readouterr().out


def test_what_an_interruption_left_is_not_measured_again(script):
    Path("out").mkdir()
    row = {"case": 2, "kernel": "attention", "format": "x", "shape": [1], "median_us": 1.0}
    left = json.dumps({"command": "kernels", "row": row})
    Path("out/rows.jsonl").write_text(f"{left}\n{left[:30]}")
    records = Path("out/rows.jsonl")
    Path("ways.json").write_text(
        json.dumps({"kernels": ["crashes", "crashes", "runs"], "latency": "runs"})
    )
    script.main(["--output", "out", "--only", "kernels"])
    found = [
        json.loads(line) for line in records.read_text().splitlines() if line and line != left[:30]
    ]
    assert cases(found) == [(2, True), (3, True)]
    assert found[-1] == {"command": "kernels", "done": True}
    assert "not measured" in Path("out/table.md").read_text()


def test_sigterm_ends_what_runs_and_keeps_the_rows(tmp_path, script):
    Path("ways.json").write_text(json.dumps({"kernels": ["runs", "hangs"], "latency": "runs"}))
    text = SCRIPT.read_text().replace(
        '(sys.executable, "-m", "freight", "bench")', '(sys.executable, "stand_in.py")'
    )
    Path("table.py").write_text(text)
    Path("gpu_goals.py").write_text(SCRIPT.with_name("gpu_goals.py").read_text())
    process = subprocess.Popen(
        [sys.executable, "table.py", "--output", "out"], stderr=subprocess.DEVNULL
    )
    rows = Path("out/rows.jsonl")
    while not rows.exists() or not rows.read_text():
        assert process.poll() is None
    process.terminate()
    assert process.wait(timeout=300) == 1
    assert json.loads(rows.read_text())["row"]["case"] == 1
    running = [
        path.read_bytes()
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if os.access(path, os.R_OK)
    ]
    assert not any(b"stand_in.py" in line and str(tmp_path).encode() in line for line in running)


def test_counters_are_read_from_ncu_s_report(script):
    names = list(script.COUNTERS.values())
    report = (
        f'==PROF== Connected\n"ID","{names[0]}","{names[1]}"\n"","%","%"\n"0","58.25","1,054.5"\n'
    )
    assert script.counters_of(report) == {"issue_active": 58.25, "dram": 1054.5}
    assert script.counters_of("==ERROR== no permission") == {}
    assert script.counters_of(f'"ID","{names[0]}"\n"","%"\n') == {}


def test_ncu_counts_what_misses_its_goal(script, monkeypatch, tmp_path):
    ncu = tmp_path / "ncu"
    ncu.write_text(
        f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\n"
        'Path("asked").write_text(" ".join(sys.argv))\n'
        'names = sys.argv[sys.argv.index("--metrics") + 1].split(",")\n'
        'text = f\'"ID","{names[0]}","{names[1]}"\\n"","%","%"\\n"0","60","50"\\n\'\n'
        'Path(sys.argv[sys.argv.index("--log-file") + 1]).write_text(text)\n'
    )
    ncu.chmod(0o755)
    folder = script.Folder(Path("out"))
    for number, (form, share) in enumerate({"tensor": 0.5, "token": 0.8}.items(), 1):
        folder.write("kernels", kernel_row(f"fp8_e4m3fn, {form}", share, case=number))
    script.count(folder, str(ncu), 5.0)
    counted = [row for row in folder.results["kernels"] if "issue_active" in row]
    assert [row["case"] for row in counted] == [1]
    assert "--after 0" in Path("asked").read_text()
    assert "Instruction issue binds" in folder.write_table()


def test_a_case_that_fails_gives_a_row_and_a_lost_device_ends_the_run(monkeypatch):
    def measured(make: Any, seconds: float) -> dict[str, Any]:
        return {"median_us": make()}

    def lost() -> None:
        raise RuntimeError("illegal address")

    every = [
        ("attention", partial(float, 1)),
        ("linear", partial({}.__getitem__, "no room")),
        ("torch.linear", partial(float, 3)),
    ]
    monkeypatch.setattr(gpu, "cases", lambda *_: iter(every))
    monkeypatch.setattr(gpu, "_measured", measured)
    monkeypatch.setattr(gpu, "launch_gap", lambda: 2e-6)
    for name, value in {
        "get_device_name": lambda: "card",
        "synchronize": int,
        "empty_cache": int,
    }.items():
        monkeypatch.setattr(gpu.torch.cuda, name, value)
    rows = list(gpu.measure_on_gpu(REFERENCE, [], 0.1, gpu.Sizes()))
    assert [(row["case"], row["kernels"], row.get("median_us")) for row in rows] == [
        (1, "reference", 1.0),
        (2, "reference", None),
        (3, "torch", 3.0),
    ]
    assert rows[1]["error"] == "KeyError: 'no room'"
    assert rows[0]["launch_gap_us"] == 2.0
    assert list(gpu.measure_on_gpu(REFERENCE, [], 0.1, gpu.Sizes(), after=2)) == rows[2:]
    monkeypatch.setattr(gpu.torch.cuda, "synchronize", lost)
    found = gpu.measure_on_gpu(REFERENCE, [], 0.1, gpu.Sizes(), after=1)
    assert next(found) == rows[1]
    with pytest.raises(RuntimeError, match="illegal address"):
        next(found)


def kernel_row(form: str, share: float, **more: Any) -> dict[str, Any]:
    row = {
        "kernel": "attention",
        "format": form,
        "shape": [64, 1, 8192, 32, 8, 128],
        "bandwidth_fraction": share,
    }
    return (
        row
        | {"median_us": 100.0, "tflops": 1.0, "case": 1, "launches": 2, "launch_gap_us": 2.0}
        | more
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"bandwidth_fraction": 0.9}, "Bandwidth binds: 0.90 of a copy's."),
        ({"median_us": 10.0}, "Launches bind: 2 of 2.0 us are 0.40 of the time."),
        (
            {"tflops": 90.0},
            "Matrix units bind: 90 TFLOP/s are 0.90 of the fastest product measured.",
        ),
        ({}, "Issue or latency inside the kernel binds"),
        ({"launches": None}, "Issue or latency inside the kernel binds"),
        ({"issue_active": 60.0, "dram": 50.0}, "Instruction issue binds: the memory is busy 50 %"),
        ({"issue_active": 20.0, "dram": 50.0}, "Latency binds"),
        ({"issue_active": 20.0, "dram": 90.0}, "Bandwidth binds: the memory is busy 90 %"),
    ],
)
def test_a_sentence_says_what_binds(more, said):
    product = kernel_row("bfloat16", 0.1, tflops=100.0) | {
        "kernel": "torch.linear",
        "shape": [8192, 8192, 8192],
    }
    failed = {"kernel": "attention", "what": "", "error": "no"}
    results: Results = {"kernels": [failed, product, kernel_row("fp8_e4m3fn, tensor", 0.5) | more]}
    line = next(line for line in table(results) if "64 x 8 k, static" in line)
    assert said in line
    assert line.startswith(
        "| decode attention, 64 x 8 k, static scales: of the copy bandwidth | 0.85 |"
    )


def test_engine_goals_and_rows_that_failed():
    step = {
        "decode_tokens_per_second": 3200.0,
        "decode_bandwidth_fraction": 0.5,
        "decode_step_ms": 4.0,
    }
    results: Results = {
        "kernels": [],
        "8b batch 64, FP8": [{"error": "no"}, step],
        "8b batch 64, BF16": [step | {"decode_tokens_per_second": 2000.0}],
        "8b batch 1, FP8": [step, {"error": "no"}],
    }
    lines = {line.split(" | ")[0]: line for line in table(results)}
    found = lines["| llama-8b, batch 64, decode, FP8 against BF16"]
    assert "| 1.6 x | 1.60 x | A step takes 4.00 ms, 2.00 ms at full bandwidth" in found
    assert "not measured" in lines["| llama-8b, batch 1, decode: of the bandwidth"]
