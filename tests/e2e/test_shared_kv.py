"""Layers that read the keys and values of others: what the cache holds, which tensors are skipped, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parity.variants import VARIANTS, freight_logits, save_random, tokens

import freight
from freight.cache.pool import allocate_pool, cache_spec
from freight.config.engine import KVCacheConfig
from freight.errors import CheckpointError
from freight.fp8.formats import Format
from freight.kernels.reference_set import REFERENCE
from freight.models.open import open_checkpoint

IDS = tokens(60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six layers, with a window and without in turn; the last three read those of layers 1, 2 and 1."""
    save_random(VARIANTS["gemma4-shared"], tmp_path / "model", torch.float32)
    return tmp_path / "model"


def logits(folder: Path, **options: str) -> torch.Tensor:
    return freight_logits(folder, IDS, "auto", "reference", **options)


def test_the_cache_has_no_pages_for_them(folder: Path) -> None:
    kv = KVCacheConfig(Format.FLOAT32, None, None, None)
    spec = cache_spec(kv, open_checkpoint(str(folder)).model, 16)
    assert [(group.window, group.layers) for group in spec.groups] == [(24, (0, 2)), (None, (1,))]
    assert spec.bytes_per_token == 4 * (2 * 2 * 2 * 32 + 2 * 2 * 64)  # two layers of heads of 32, one of heads of 64
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
        f"model.layers.{i}.self_attn.{side}": torch.tensor(scale) for i in range(3) for side, scale in scales.items()
    }
    stored = load_file(file)
    save_file(stored | own, file, metadata={"format": "pt"})
    exact, rounded = logits(folder, kv_cache_dtype="float32"), logits(folder, kv_cache_dtype="fp8")
    assert 0 < (exact - rounded).abs().mean() < 0.3 * exact.std()
    of_a_reader = {"model.layers.4.self_attn.k_scale": torch.tensor(0.02)}
    save_file(stored | own | of_a_reader, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.4\.self_attn\.k_scale is a KV scale of layer 4, which reads"):
        logits(folder, kv_cache_dtype="fp8")


def test_weights_are_quantized_and_calibration_is_refused(folder: Path, tmp_path: Path) -> None:
    freight.quantize(folder, tmp_path / "out", weights="fp8")
    centered = [x - x.mean(1, keepdim=True) for x in (logits(folder), logits(tmp_path / "out"))]
    assert torch.cosine_similarity(*centered, dim=1).min() > 0.9
    with pytest.raises(CheckpointError, match="layer 3 reads the keys and values of layer 1"):
        freight.quantize(folder, tmp_path / "static", weights="fp8", activations="static", calibration_data=[IDS])
