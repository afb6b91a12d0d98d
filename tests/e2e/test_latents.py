"""Caches of latents (MLA): every format and scale, whose values are the last channels of keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.random_models import freight_logits, save_random, tokens
from tests.parity.test_transformers import every_expert
from tests.parity.variants import VARIANTS
from torch import Tensor

import freight
from freight.checkpoint.reader import Checkpoint
from freight.config.engine import EngineArgs
from freight.errors import CheckpointError
from freight.evaluate.grid import GridArgs, evaluate_grid

IDS = tokens(60)
TRAINED = Path(__file__).parents[1] / "fixtures/latents/deepseek_v3"
BOUNDS: dict[str, tuple[dict[str, Any], float]] = {  # KL to a float32 cache, at most; the formats' order is certain
    "bfloat16": ({"kv_cache_dtype": "bfloat16"}, 1e-5),
    "int8": ({"kv_cache_dtype": "int8"}, 1e-4),
    "token": ({"kv_cache_dtype": "fp8_e4m3", "kv_scales": "dynamic"}, 1e-3),
    "unit": ({"kv_cache_dtype": "fp8_e4m3", "kv_scales": "unit"}, 2e-3),
    "given": ({"kv_cache_dtype": "fp8_e4m3", "kv_scales": "0.02"}, 2e-3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("latents") / "model"
    save_random(every_expert(VARIANTS["deepseek-v3"]), made, torch.float32)  # a router that flips would hide it
    return made


def logits(folder: Path, kernels: str = "auto", **cache: Any) -> Tensor:
    return freight_logits(folder, IDS, "float32", kernels, **cache)


def divergence(folder: Path, kernels: str, **cache: Any) -> float:
    exact, other = logits(folder, kernels).log_softmax(-1), logits(folder, kernels, **cache).log_softmax(-1)
    return float((exact.exp() * (exact - other)).sum(-1).mean())


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("name", BOUNDS)
def test_what_a_format_costs(name: str, kernels: str, folder: Path) -> None:
    cache, bound = BOUNDS[name]
    found = divergence(folder, kernels, **cache)
    assert 0 < found < bound


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_values_have_the_scale_of_keys(kernels: str, folder: Path) -> None:
    """Whatever is said of values: they are stored once."""
    one, other = (logits(folder, kernels, kv_cache_dtype="fp8_e4m3", kv_scales=said) for said in ("0.02", "0.02,0.5"))
    assert torch.equal(one, other)
    assert not torch.equal(one, logits(folder, kernels, kv_cache_dtype="fp8_e4m3", kv_scales="0.03"))


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_calibrated_scales_are_written_and_read(granularity: str, folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"weights": "none", "kv_cache": "fp8", "calibration_data": [IDS]}
    freight.quantize(folder, tmp_path / "out", kv_granularity=granularity, **options)
    names = Checkpoint(tmp_path / "out").names
    assert {f"model.layers.{layer}.self_attn.k_scale" for layer in range(3)} <= set(names)
    exact, ours = (logits(one).log_softmax(-1) for one in (folder, tmp_path / "out"))
    assert not torch.equal(exact, ours)
    assert (exact.exp() * (exact - ours)).sum(-1).mean() < 2e-3


def test_centers_are_refused(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"weights": "none", "kv_cache": "fp8", "calibration_data": [IDS]}
    with pytest.raises(CheckpointError, match="latents"):
        freight.quantize(folder, tmp_path / "out", center=True, **options)


def test_evaluate_compares_the_caches_of_latents() -> None:
    """On the trained model: E4M3 with a scale per token costs less than one scale for all, INT8 far less than E4M3."""
    text = (Path(__file__).parents[2] / "src/freight/demo/heldout.txt").read_text(encoding="utf-8")
    grid = GridArgs(caches=("unit", "tensor", "token", "int8", "centered"), max_tokens=2048, window=256, speed=False)
    found = evaluate_grid(EngineArgs(str(TRAINED), dtype="float32"), [text], grid)
    cost = {run.name: run.kl_mean for run in found.runs[1:]}
    assert set(cost) == {"unit", "tensor", "token", "int8"}, "latents have no centers"
    assert 0 < 5 * cost["int8"] < cost["token"] < 0.9 * cost["tensor"]
    assert cost["token"] < 0.9 * cost["unit"]
    assert cost["tensor"] < 4e-3
