"""Caches of latents (MLA): every format and scale, whose values are the last channels of keys, and
scales per group.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.random_models import freight_logits, save_random, tokens
from tests.parity.test_transformers import every_expert
from tests.parity.variants import VARIANTS
from tests.refusals import refuses
from torch import Tensor

import freight
from freight.checkpoint.reader import Checkpoint
from freight.engine.fingerprint import fingerprint
from freight.errors import CheckpointError, ConfigError
from freight.lab.evaluate.advice import how_to
from freight.lab.evaluate.figures import Evaluation
from freight.lab.evaluate.grid import GridArgs, evaluate_grid
from freight.model.open import open_model
from freight.settings.engine import EngineArgs

IDS = tokens(60)
TRAINED = Path(__file__).parents[1] / "fixtures/latents/deepseek_v3"
# options, KL to a float32 cache at most; the formats' order is certain
BOUNDS: dict[str, tuple[dict[str, Any], float]] = {
    "bfloat16": ({"kv_cache_dtype": "bfloat16"}, 1e-5),
    "int8": ({"kv_cache_dtype": "int8"}, 1e-4),
    "token": ({"kv_cache_dtype": "fp8_e4m3", "kv_scales": "dynamic"}, 1e-3),
    "unit": ({"kv_cache_dtype": "fp8_e4m3", "kv_scales": "unit"}, 2e-3),
    "given": ({"kv_cache_dtype": "fp8_e4m3", "kv_scales": "0.02"}, 2e-3),
}
DATA: dict[str, Any] = {"weights": "none", "kv_cache": "fp8", "calibration_data": [IDS]}
GROUPS: dict[str, Any] = {
    "kv_cache_dtype": "fp8",
    "kv_scales": "group",
    "skip_tokenizer_init": True,
}


def saved(folder: Path, **changes: int) -> Path:
    """A router that flips would hide what a format costs: the model takes every expert."""
    config = VARIANTS["deepseek-v3"]
    changed = type(config)(**config.to_dict() | changes)
    save_random(every_expert(changed), folder, torch.float32)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("latents") / "model")


@cache
def exact(folder: Path, kernels: str) -> Tensor:
    """Log-probabilities with a float32 cache."""
    return logits(folder, kernels).log_softmax(-1)


def logits(folder: Path, kernels: str = "auto", **cache: Any) -> Tensor:
    return freight_logits(folder, IDS, "float32", kernels, **cache)


def divergence(folder: Path, kernels: str, other: Tensor) -> float:
    plain = exact(folder, kernels)
    return float((plain.exp() * (plain - other.log_softmax(-1))).sum(-1).mean())


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("name", BOUNDS)
def test_what_a_format_costs(name: str, kernels: str, folder: Path) -> None:
    options, bound = BOUNDS[name]
    assert 0 < divergence(folder, kernels, logits(folder, kernels, **options)) < bound


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_values_have_the_scale_of_keys(kernels: str, folder: Path) -> None:
    """Whatever is said of values: they are stored once."""
    keys, both, larger = (
        logits(folder, kernels, kv_cache_dtype="fp8_e4m3", kv_scales=scales)
        for scales in ("0.02", "0.02,0.5", "0.03")
    )
    assert torch.equal(keys, both)
    assert not torch.equal(keys, larger)


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_calibrated_scales_are_written_and_read(
    granularity: str, folder: Path, tmp_path: Path
) -> None:
    freight.quantize(folder, tmp_path / "out", kv_granularity=granularity, **DATA)
    names = Checkpoint(tmp_path / "out").names
    assert {f"model.layers.{layer}.self_attn.k_scale" for layer in range(3)} <= set(names)
    assert 0 < divergence(folder, "auto", logits(tmp_path / "out")) < 2e-3


def test_centers_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="latents"):
        freight.quantize(folder, tmp_path / "out", center=True, **DATA)


def test_evaluate_compares_the_caches_of_latents() -> None:
    """On the trained model: the finer the scales the less, and INT8, by default by group, far less
    than E4M3.
    """
    text = (Path(__file__).parents[2] / "src/freight/demo/heldout.txt").read_text(encoding="utf-8")
    grid = GridArgs(
        caches=("unit", "tensor", "token", "group", "int8", "centered"),
        max_tokens=1024,
        window=256,
        speed=False,
    )
    found = evaluate_grid(EngineArgs(str(TRAINED), dtype="float32"), [text], grid)
    cost = {run.name: run.kl_mean for run in found.runs[1:]}
    assert set(cost) == {"unit", "tensor", "token", "group", "int8"}, "latents have no centers"
    assert 0 < 5 * cost["int8"] < cost["group"] < cost["token"] / 3 < 0.3 * cost["tensor"]
    assert cost["token"] < 0.9 * cost["unit"]
    assert cost["tensor"] < 4e-3


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a latent of four groups."""
    return saved(tmp_path_factory.mktemp("latents") / "wide", kv_lora_rank=512)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8"])
def test_scales_per_group_cost_less_than_one_per_token(
    dtype: str, kernels: str, wide: Path
) -> None:
    group, token = (
        divergence(wide, kernels, logits(wide, kernels, kv_cache_dtype=dtype, kv_scales=scales))
        for scales in ("group", "dynamic")
    )
    assert 0 < group < 0.85 * token


def test_a_latent_of_no_whole_groups_is_refused(folder: Path) -> None:
    says = ("--kv-scales group", "layer 0", "32", "kv_lora_rank", "--kv-scales dynamic")
    with refuses(ConfigError, *says):
        freight.LLM(str(folder), **GROUPS)


def test_an_engine_says_what_it_has(wide: Path) -> None:
    info = freight.LLM(str(wide), **GROUPS).kv_cache_info()
    cache = [info[name] for name in ("dtype", "granularity", "scale_source")]
    assert cache == ["fp8_e4m3fn", "group", "dynamic"]
    assert info["bytes_per_token"] == 3 * (512 + 4 * 2 + 8 * 2)
    marks = set()
    for scales in ("group", "dynamic"):
        options = GROUPS | {"kv_scales": scales, "device": "cpu"}
        opened = open_model(EngineArgs(str(wide), **options))
        config = opened.resolve(opened.args)
        marks.add(fingerprint(opened, config, opened.kernels(config), "1"))
    assert len(marks) == 2


def evaluated(model: Path, **options: Any) -> Evaluation:
    args = EngineArgs(str(model), device="cpu", skip_tokenizer_init=True, **options)
    return evaluate_grid(args, [IDS, IDS[::-1]], GridArgs(caches=None, speed=False, window=60))


def test_evaluate_measures_scales_per_group_of_latents(
    wide: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freight.lab.evaluate.grid.CACHES", ("token", "group"))
    runs = {run.name: run for run in evaluated(wide).runs}
    assert list(runs) == ["float32", "token", "group"]
    group, token = runs["group"], runs["token"]
    assert (group.granularity, group.bytes_per_token) == ("group", 3 * 536)
    for of_group, of_token in zip(group.layer_errors, token.layer_errors, strict=True):
        assert all(0 < of_group[side] < of_token[side] for side in "kv")
    command = f"freight serve {wide} --kv-cache-dtype fp8 --kv-scales group"
    assert how_to(group, evaluated(wide, kv_cache_dtype="fp8").overview).startswith(command)
    assert [run.name for run in evaluated(folder).runs] == ["float32", "token"]
