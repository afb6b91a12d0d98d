"""What formats of states cost on the trained hybrids: bounds that a state written too often does
not keep.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from freight.lab.evaluate.advice import advice, recommended_states
from freight.lab.evaluate.figures import Evaluation
from freight.lab.evaluate.grid import GridArgs, evaluate_grid
from freight.lab.evaluate.report_page import write_report
from freight.lab.evaluate.table import table
from freight.settings.engine import EngineArgs

HYBRIDS = Path(__file__).parents[1] / "fixtures" / "hybrids"
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "state_formats.py"
TEXT = Path(__file__).parents[2] / "src" / "freight" / "demo" / "heldout.txt"
# Mean KL in nats against float32. Written every token, the same formats cost 11 to 50 times as much
# (docs/numerics.md).
BOUNDS = {
    "delta_net": {"bfloat16": 3e-6, "int8": 4e-5, "fp8_e4m3fn": 5e-4},
    "mamba2": {"bfloat16": 8e-6, "int8": 2.5e-4, "fp8_e4m3fn": 6e-4},
}


@pytest.mark.parametrize("name", BOUNDS)
def test_formats_are_measured_apart_keep_their_bounds_and_are_advised(
    name: str, tmp_path: Path
) -> None:
    grid = GridArgs(caches=("token",), max_tokens=4096, window=256, speed=False, per_layer=True)
    args = EngineArgs(str(HYBRIDS / name), dtype="float32")
    evaluation = evaluate_grid(args, [TEXT.read_text(encoding="utf-8")], grid)
    check_bounds(evaluation, BOUNDS[name])
    check_parts(evaluation)
    check_advice(evaluation, tmp_path)


def check_bounds(evaluation: Evaluation, bounds: dict[str, float]) -> None:
    states = [run for run in evaluation.runs if run.name.startswith("states ")]
    kl = {run.state_dtype: run.kl_mean for run in states}
    assert set(kl) == set(bounds)
    assert all(0 < kl[name] < bound for name, bound in bounds.items()), kl
    # otherwise these are other formats
    assert 4 * kl["bfloat16"] < kl["int8"] < kl["fp8_e4m3fn"] / 1.5


def check_parts(evaluation: Evaluation) -> None:
    """Layers have pages or a state, and lose by their own."""
    first, pages, *states = evaluation.runs
    assert (pages.kv_cache_dtype, pages.state_dtype) == ("fp8_e4m3fn", "float32")
    assert {run.kv_cache_dtype for run in states} == {"float32"}
    assert pages.layer_kl is not None
    with_pages = [bool(kl) for kl in pages.layer_kl]
    assert 0 < sum(with_pages) < len(with_pages)
    for run in states:
        assert run.bytes_per_token == first.bytes_per_token
        assert run.bytes_per_state < first.bytes_per_state
        assert run.layer_kl is not None
        assert [not kl for kl in run.layer_kl] == with_pages


def check_advice(evaluation: Evaluation, folder: Path) -> None:
    chosen = recommended_states(evaluation)
    assert chosen is not None
    assert chosen.state_dtype == "int8", "as small as E4M3, and nearer to float32"
    text, share = advice(evaluation), chosen.bytes_per_state / evaluation.runs[0].bytes_per_state
    assert "--kv-cache-dtype fp8" in text.command
    assert "--state-dtype int8" in text.command
    assert f"take int8, {share:.2f} of the bytes" in text.text
    assert "| states int8" in table(evaluation)
    write_report(evaluation, folder)
    assert "states int8" in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDS)
def test_a_tile_pays(name: str) -> None:
    """The figures of docs/numerics.md: INT8 written every 16 tokens beside BF16 every token, E4M3
    beside itself.
    """

    def measured(every: int) -> dict[str, float]:
        command = [sys.executable, SCRIPT, HYBRIDS / name, "--json", "--every", str(every)]
        runs = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        return {run["state_dtype"]: run["kl_mean"] for run in runs}

    tiles, tokens = measured(16), measured(1)
    assert tiles["int8"] <= 2 * tokens["bfloat16"]
    assert tiles["fp8_e4m3fn"] <= 0.1 * tokens["fp8_e4m3fn"]
