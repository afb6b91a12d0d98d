"""freight quantize --method gptq: of every family, and of runs that are killed."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.random_models import freight_logits, save_random, tokens
from tests.parity.variants import VARIANTS
from tests.refusals import assert_names, refuses
from tests.unit.calibrate.test_every_family import EVERY

from freight import quantize
from freight.errors import ConfigError
from freight.quantizer import layer_rounder
from freight.quantizer.layer_store import LayerStore
from freight.quantizer.modules import linear_modules
from freight.quantizer.quantize import open_unquantized
from freight.quantizer.rounding import RoundedMatrix

IDS = tokens(100)
SAMPLES = [IDS[:60], IDS[60:]]


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize("variant", EVERY)
def test_every_matrix_of_every_family_is_rounded_by_its_inputs(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_random(VARIANTS[variant], tmp_path / "plain", torch.float32)
    model = open_unquantized(str(tmp_path / "plain")).model
    rounded: dict[str, int] = {}
    original = layer_rounder.LayerRounder.rounded

    def note(self: Any, group: Any, statistics: Any) -> Any:
        rounded.update(dict.fromkeys(group, statistics.num_rows))
        return original(self, group, statistics)

    monkeypatch.setattr(layer_rounder.LayerRounder, "rounded", note)
    options: dict[str, Any] = {"weights": "fp8-channel", "activations": "none"}
    result = quantize(
        str(tmp_path / "plain"),
        tmp_path / "out",
        method="gptq",
        calibration_data=SAMPLES,
        **options,
    )
    assert set(rounded) == set(linear_modules(model))
    # every token is seen, but for experts
    experts = {module for module in rounded if "experts" in module}
    assert {rounded[module] for module in rounded.keys() - experts} <= {100}
    if any(rounded[module] == 0 for module in experts):
        assert any("tokens of the calibration data reached" in line for line in result.warnings)
    quantize(str(tmp_path / "plain"), tmp_path / "nearest", **options)
    logits = {}
    for name in ("plain", "out", "nearest"):
        logits[name] = freight_logits(tmp_path / name, IDS, "float32", kv_cache_dtype="auto")
    assert logits["out"].isfinite().all()
    assert not torch.equal(logits["out"], logits["nearest"])
    error = (logits["out"] - logits["plain"]).square().mean()
    of_nearest = (logits["nearest"] - logits["plain"]).square().mean()
    assert error < 1.5 * of_nearest
    assert not list(tmp_path.glob(".freight*"))


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize("method", ["awq", "smoothquant", "rotation"])
@pytest.mark.parametrize("variant", EVERY)
def test_a_transform_of_every_family_changes_rounding_alone(
    variant: str, method: str, tmp_path: Path
):
    save_random(VARIANTS[variant], tmp_path / "plain", torch.float32)
    options: dict[str, Any] = {"weights": "fp8-channel"}
    if method == "awq":
        options["activations"] = "none"
    data = {} if method == "rotation" else {"calibration_data": SAMPLES}
    quantize(str(tmp_path / "plain"), tmp_path / "nearest", **options)
    try:
        quantize(str(tmp_path / "plain"), tmp_path / "out", method=method, **data, **options)
    except ConfigError as error:
        way = "no layer of this model has a place"
        if method == "rotation":
            way = "nothing of this model can be rotated"
        assert_names(str(error), f"--method {method}", way)
        assert not list(tmp_path.glob(".freight*"))
        return
    logits = {}
    for name in ("plain", "out", "nearest"):
        logits[name] = freight_logits(tmp_path / name, IDS, "float32", kv_cache_dtype="auto")
    error = (logits["out"] - logits["plain"]).square().mean()
    of_nearest = (logits["nearest"] - logits["plain"]).square().mean()
    assert error < 4 * of_nearest
    assert not torch.equal(logits["out"], logits["nearest"])
    assert not list(tmp_path.glob(".freight*"))


def digest(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if not path.name.startswith(".")
    }


MATRIX = RoundedMatrix(torch.ones(2, 32, dtype=torch.uint8), torch.ones(2, 1))
OPTIONS = ["--weights", "int4", "--method", "gptq", "--num-samples", "3", "--max-seq-len", "128"]


def command(out: Path) -> list[str]:
    return [sys.executable, "-m", "freight", "quantize", "demo", str(out), *OPTIONS]


def test_a_run_that_was_killed_goes_on_and_writes_the_same_file(tmp_path: Path):
    whole = tmp_path / "whole"
    subprocess.run(command(whole), check=True, capture_output=True)
    cut = tmp_path / "cut"
    layers = tmp_path / ".freight.cut.layers"
    for wanted in (1, 3):
        process = subprocess.Popen(
            command(cut), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 120
        while (
            len(list(layers.glob("layer-?????.safetensors"))) < wanted
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not cut.exists()
    done = len(list(layers.glob("layer-?????.safetensors")))
    assert done >= 3
    last = subprocess.run(command(cut), check=True, capture_output=True, text=True)
    assert f"{done} layers are quantized already" in " ".join(last.stderr.split())
    assert digest(cut) == digest(whole)
    assert not layers.exists()


def test_layers_of_another_run_are_not_used(tmp_path: Path):
    store = LayerStore(tmp_path / "out", {"model": "a"})
    store.add(0, {"q_proj": MATRIX})
    assert store.has(0)
    with refuses(ConfigError, "another run quantizes into"):
        LayerStore(tmp_path / "out", {"model": "a"})
    store.close()
    again = LayerStore(tmp_path / "out", {"model": "a"})
    assert again.has(0)
    stored = again.matrix("q_proj")
    assert stored is not None
    assert torch.equal(stored.codes, MATRIX.codes)
    assert stored.zeros is None
    assert again.matrix("k_proj") is None
    again.close()
    other = LayerStore(tmp_path / "out", {"model": "b"})
    assert not other.has(0)
    other.remove()
    assert not list(tmp_path.glob(".freight*"))


def test_a_damaged_layer_is_named_with_the_way_out(tmp_path: Path):
    store = LayerStore(tmp_path / "out", {})
    store.add(0, {"q_proj": MATRIX})
    store.close()
    (file,) = store.folder.glob("layer-?????.safetensors")
    file.write_bytes(file.read_bytes()[:-3])
    with refuses(ConfigError, "is damaged", "remove"):
        LayerStore(tmp_path / "out", {})
