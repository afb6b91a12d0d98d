"""Layers that read the keys and values of others: what the cache holds, which tensors are skipped,
what is refused.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parity.random_models import freight_logits, save_random, tokens
from tests.parity.variants import VARIANTS
from tests.refusals import refuses
from transformers import AutoModelForCausalLM

import freight
from freight.cache.pool import allocate_pool
from freight.cache.spec import cache_spec
from freight.errors import CheckpointError
from freight.fp8.formats import Format
from freight.kernels.reference_set import REFERENCE
from freight.model.open import open_checkpoint
from freight.quantizer import centers
from freight.settings.engine import KVCacheConfig

IDS = tokens(60)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, with a window and without in turn; the last three read those of layers 1, 2 and
    1.
    """
    folder = tmp_path_factory.mktemp("shared") / "model"
    save_random(VARIANTS["gemma4-shared"], folder, torch.float32)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def logits(folder: Path, **options: str) -> torch.Tensor:
    return freight_logits(folder, IDS, "auto", "reference", **options)


def similarity(*rows: torch.Tensor) -> float:
    """The least of all rows, each without its mean."""
    return float(torch.cosine_similarity(*(x - x.mean(1, keepdim=True) for x in rows)).min())


def test_the_cache_has_no_pages_for_them(folder: Path) -> None:
    kv = KVCacheConfig(Format.FLOAT32, None, None, None)
    spec = cache_spec(kv, open_checkpoint(str(folder)).model, 16)
    assert [(group.window, group.layers) for group in spec.groups] == [(24, (0, 2)), (None, (1,))]
    # two layers of heads of 32, one of heads of 64
    assert spec.bytes_per_token == 4 * (2 * 2 * 2 * 32 + 2 * 2 * 64)
    pool = allocate_pool(spec, kv, [2, 3], REFERENCE)
    assert [layer.pages.k.data_ptr() for layer in pool.layers[3:]] == [
        pool.layers[source].pages.k.data_ptr() for source in (1, 2, 1)
    ]
    pool.layers[1].pages.counters[0] = 1
    assert pool.counters() == (1, 0)


def test_projections_that_no_layer_uses_are_skipped(folder: Path) -> None:
    """Checkpoints have keys and values of these layers all the same."""
    expected, file = logits(folder), folder / "model.safetensors"
    stored = load_file(file)
    assert "model.layers.3.self_attn.k_proj.weight" not in stored
    for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
        stored[f"model.layers.3.self_attn.{name}"] = torch.full((3,), torch.nan)
    save_file(stored, file, metadata={"format": "pt"})
    assert torch.equal(logits(folder), expected)


def test_an_fp8_cache_with_scales_of_the_layers_that_store(folder: Path) -> None:
    file, scales = folder / "model.safetensors", {"k_scale": 0.02, "v_scale": 0.01}
    own = {
        f"model.layers.{i}.self_attn.{side}": torch.tensor(scale)
        for i in range(3)
        for side, scale in scales.items()
    }
    stored = load_file(file)
    save_file(stored | own, file, metadata={"format": "pt"})
    exact, rounded = logits(folder, kv_cache_dtype="float32"), logits(folder, kv_cache_dtype="fp8")
    assert 0 < (exact - rounded).abs().mean() < 0.3 * exact.std()
    of_a_reader = {"model.layers.4.self_attn.k_scale": torch.tensor(0.02)}
    save_file(stored | own | of_a_reader, file, metadata={"format": "pt"})
    name = "model.layers.4.self_attn.k_scale"
    with refuses(CheckpointError, name, "KV scale of layer 4", "remove it"):
        logits(folder, kv_cache_dtype="fp8")


@pytest.mark.parametrize("options", [{}, {"kv_granularity": "channel"}, {"center": True}], ids=str)
def test_calibrated_scales_are_those_of_the_layers_that_store(
    folder: Path, tmp_path: Path, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two samples: what a layer stored of the first must not be read for the second."""
    for name in ("WORTH", "PAIR_RATIO"):
        monkeypatch.setattr(centers, name, 0.0)  # every pair, whatever it gains
    static = {"weights": "fp8", "activations": "static", "kv_cache": "fp8"}
    data = [IDS, tokens(90)[20:]]
    freight.quantize(folder, tmp_path / "out", **static, **options, calibration_data=data)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    of_kv = {name for name in stored if name.endswith((".k_scale", ".v_scale"))}
    assert of_kv == {f"model.layers.{i}.self_attn.{side}_scale" for i in range(3) for side in "kv"}
    assert "model.layers.3.self_attn.q_proj.input_scale" in stored
    assert similarity(logits(folder), logits(tmp_path / "out", kv_cache_dtype="fp8")) > 0.9


def test_inputs_of_layers_that_read_others_are_those_of_the_model(
    folder: Path, tmp_path: Path
) -> None:
    """Observed layer by layer, they must be what the whole model computes of each sample."""
    static = {"weights": "fp8", "activations": "static"}
    data = [tokens(90)[40:], IDS]
    freight.quantize(folder, tmp_path / "out", **static, calibration_data=data)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    model, seen = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"), []
    module = model.model.layers[5].mlp.down_proj
    module.register_forward_hook(lambda _, x, output: seen.append(float(x[0].abs().max())))
    with torch.no_grad():
        for ids in data:
            model(torch.tensor([ids]))
    scale = float(stored["model.layers.5.mlp.down_proj.input_scale"])
    assert scale == pytest.approx(max(seen) / 448, rel=1e-3)


def test_weights_are_quantized_and_a_budget_is_refused(folder: Path, tmp_path: Path) -> None:
    freight.quantize(folder, tmp_path / "out", weights="fp8")
    assert similarity(logits(folder), logits(tmp_path / "out")) > 0.9
    with refuses(CheckpointError, "layer 3", "layer 1", "--kv-budget"):
        mixed = {"weights": "none", "kv_cache": "fp8", "kv_budget": "bits=9"}
        freight.quantize(folder, tmp_path / "mixed", calibration_data=[IDS, IDS], **mixed)
