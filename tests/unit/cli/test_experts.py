"""The commands that measure a model, on a small mixture of experts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.random_models import save_random
from tests.parity.variants import VARIANTS

from freight.checkpoint.reader import resolve_model

Run = Callable[..., Any]
TEXT = "def main():\n    return [value for value in range(10) if value % 2]\n" * 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, with the tokenizer of the model that ships."""
    folder, demo = tmp_path_factory.mktemp("experts") / "model", resolve_model("demo")
    vocabulary = json.loads((demo / "config.json").read_text())["vocab_size"]
    own = VARIANTS["qwen3-moe"].to_dict() | {"vocab_size": vocabulary, "num_hidden_layers": 2}
    save_random(type(VARIANTS["qwen3-moe"])(**own), folder, torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, folder)
    (folder.parent / "text").write_text(TEXT)
    return folder


def test_evaluate_measures_caches_weights_and_layers(freight: Run, model: Path) -> None:
    text = str(model.parent / "text")
    options = ("--data", text, "--json", "--kernels", "reference")
    answer = freight(
        "evaluate",
        "caches",
        str(model),
        *options,
        "--caches",
        "token",
        "--weights",
        "fp8-channel",
        "--no-speed",
    )
    assert answer.code == 0, answer.err
    plain, *others = json.loads(answer.out)["runs"]
    assert len(others) >= 2
    assert all(run["perplexity"] == pytest.approx(plain["perplexity"], rel=0.2) for run in others)
    assert all(run["kl_mean"] > 0 for run in others)
    answer = freight("evaluate", "layers", str(model), *options)
    assert answer.code == 0, answer.err
    assert [layer["layer"] for layer in json.loads(answer.out)["layers"]] == [0, 1]


def test_quantize_chooses_the_cache_by_layer_and_inspect_counts_matrices(
    freight: Run, model: Path, tmp_path: Path
) -> None:
    text, out = str(model.parent / "text"), str(tmp_path / "out")
    options = ("--kv-budget", "bits=12", "--calibration-data", text, "--max-seq-len", "50")
    answer = freight("quantize", str(model), out, *options, "--json")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["kv_budget"]
    said = json.loads(freight("inspect", out, "--json").out)
    assert said["runs"] == "natively"
    assert sum(said["scheme"]["fp8_weights"].values()) == 2 * (4 + 8 * 3)
    plain = json.loads(freight("inspect", str(model), "--json").out)
    assert said["num_parameters"] == plain["num_parameters"]


def test_plan_counts_a_preset_of_fewer_layers(freight: Run) -> None:
    answer = freight("plan", "qwen3-30b-a3b:8", "--memory", "24GiB", "--device", "cpu", "--json")
    assert answer.code == 0, answer.err
    whole = freight(
        "plan", "qwen3-30b-a3b:8:151936", "--memory", "24GiB", "--device", "cpu", "--json"
    )
    assert answer.out != whole.out
