"""freight quantize of every kind of layer: names that other engines read, and a model that runs
here as before.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parity.random_models import freight_logits, save_random, tokens
from tests.parity.variants import VARIANTS
from torch import Tensor

import freight
import freight.quantizer.quantize
from freight.kernels.reference_set import REFERENCE
from freight.operands import kv_pages
from freight.transformers import FP8Cache

IDS = tokens(100)
STATIC: dict[str, Any] = {
    "weights": "fp8",
    "activations": "static",
    "kv_cache": "fp8",
    "calibration_data": [IDS],
}
SEPARATE = [
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
]
HALF_FUSED = [*(f"self_attn.{part}_proj" for part in "qkvo"), "mlp.gate_up_proj", "mlp.down_proj"]
FUSED = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
UNGATED = [
    *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "out_proj")),
    "fc1",
    "fc2",
]
ATTENTION = SEPARATE[:4]
# routers flip between experts that are nearly as good, so a position in a few has other logits
EXPERTS = {
    "mixtral": [
        *ATTENTION,
        *(f"block_sparse_moe.experts.{i}.w{part}" for i in range(4) for part in (1, 2, 3)),
    ],
    "qwen2-moe": [
        *(*ATTENTION, *(f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down"))),
        *(f"mlp.experts.{i}.{part}_proj" for i in range(8) for part in ("gate", "up", "down")),
    ],
    "gemma4-moe": [
        *SEPARATE,
        *(f"experts.{i}.{part}_proj" for i in range(8) for part in ("gate", "up", "down")),
    ],
    "qwen3-moe": [
        *ATTENTION,
        *(f"mlp.experts.{i}.{part}_proj" for i in range(8) for part in ("gate", "up", "down")),
    ],
}
MODULES = {
    "ministral3-tied": SEPARATE,
    "gemma2": SEPARATE,
    "gemma3-two-ropes": SEPARATE,
    "gemma4": SEPARATE,
    "phi3-partial": FUSED,
    "granite": SEPARATE,
    "glm4": HALF_FUSED,
    "seed-oss": SEPARATE,
    "smollm3": SEPARATE,
    "opt": UNGATED,
    "opt-350m": UNGATED,
    **EXPERTS,
}
KEYS_ARE_VALUES = {"gemma4": (3,), "gemma4-moe": (3,)}  # layers without a projection of values


@pytest.fixture(autouse=True)
def reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freight.quantizer.quantize, "select_kernels", lambda *_: REFERENCE)


def logits(folder: Path, **options: Any) -> torch.Tensor:
    return freight_logits(folder, IDS, "float32", "reference", **options)


def save_changed(variant: str, folder: Path, **config: Any) -> dict[str, Tensor]:
    """A random model of that kind, and its tensors, to be changed and given to `store`."""
    changed = type(VARIANTS[variant])(**VARIANTS[variant].to_dict() | config)
    save_random(changed, folder, torch.float32)
    return load_file(folder / "model.safetensors")


def store(weights: dict[str, Tensor], folder: Path) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def errors_of_caches(folder: Path, out: Path, begin: int = 0) -> tuple[Any, list[float]]:
    """What `quantize` found with centers, and the errors of an E4M3 cache with them and without."""
    options: dict[str, Any] = {"weights": "none", "kv_cache": "fp8", "calibration_data": [IDS]}
    result = freight.quantize(folder, out / "centered", **options, center=True)
    freight.quantize(folder, out / "plain", **options)
    exact = logits(folder)
    errors = []
    for name in ("centered", "plain"):
        found = logits(out / name, kv_cache_dtype="fp8")
        errors.append(float((found - exact)[begin:].square().mean()))
    return result, errors


def likeness(one: torch.Tensor, other: torch.Tensor, mean: bool = False) -> float:
    """Least (or mean) cosine of the logits of one position, 1 for the same distribution."""
    centered = (x - x.mean(1, keepdim=True) for x in (one, other))
    cosines = torch.cosine_similarity(*centered, dim=1)
    return float(cosines.mean() if mean else cosines.min())


@pytest.mark.parametrize(
    "layout", ["compressed-tensors", pytest.param("fp8", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("variant", MODULES)
def test_a_quantized_model_has_the_names_that_engines_read_and_runs(
    variant: str, layout: str, tmp_path: Path
):
    save_random(VARIANTS[variant], tmp_path / "model", torch.float32)
    result = freight.quantize(tmp_path / "model", tmp_path / "out", **STATIC, format=layout)
    assert not [
        said for said in result.warnings if "grew" not in said and "no token of the" not in said
    ]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for index in range(VARIANTS[variant].num_hidden_layers):
        prefix = f"model.{'decoder.' if variant.startswith('opt') else ''}layers.{index}."
        absent = ["self_attn.v_proj"] * (index in KEYS_ARE_VALUES.get(variant, ()))
        modules = [module for module in MODULES[variant] if module not in absent]
        scales = {
            name.removeprefix(prefix)
            for name in stored
            if name.startswith(prefix) and "_scale" in name
        }
        scales.discard("router.per_expert_scale")  # of the model, not of a format
        of_modules = {
            f"{module}.{kind}_scale" for module in modules for kind in ("weight", "input")
        }
        assert scales == of_modules | {"self_attn.k_scale", "self_attn.v_scale"}
        assert all(
            stored[f"{prefix}{module}.weight"].dtype is torch.float8_e4m3fn for module in modules
        )
    plain = logits(tmp_path / "model")
    quantized = logits(tmp_path / "out", kv_cache_dtype="fp8")
    assert likeness(quantized, plain, mean=variant in EXPERTS) > 0.9


@pytest.mark.parametrize(
    ("variant", "weights"),
    [
        *(("phi3", weights) for weights in ("fp8", "fp8-channel", "fp8-block")),
        *(("glm4", weights) for weights in ("fp8-channel", "fp8-block")),
    ],
)
def test_projections_in_every_granularity(variant: str, weights: str, tmp_path: Path):
    """One tensor for several, and rows that are brought into another order with their scales."""
    save_random(VARIANTS[variant], tmp_path / "model", torch.float32)
    options = {"ignore": ["model.layers.1.mlp.gate_up_proj"]} if variant == "phi3" else {}
    freight.quantize(tmp_path / "model", tmp_path / "out", weights=weights, **options)
    assert likeness(logits(tmp_path / "out"), logits(tmp_path / "model")) > 0.9


def pair_norms(k: Tensor, rotated: float) -> Tensor:
    """Return the magnitudes of `k` [heads, tokens, channels]: in the part that GLM turns, those of
    its pairs of adjacent channels, which no position changes.
    """
    turned = k[..., : round(k.shape[-1] * rotated)]
    norms = turned.unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, dim=-1)
    return torch.cat((norms, k[..., turned.shape[-1] :].abs()), dim=-1)


def test_scales_of_channels_are_those_of_the_checkpoints_channels_in_a_cache_of_transformers(
    tmp_path: Path,
):
    """The engine turns pairs of other channels than GLM does, and has its keys in another order."""
    model = save_random(VARIANTS["glm4"], tmp_path / "model", torch.float32)
    options: dict[str, Any] = {"weights": "none", "kv_cache": "fp8", "kv_granularity": "channel"}
    freight.quantize(tmp_path / "model", tmp_path / "out", **options, calibration_data=[IDS])
    with torch.no_grad():
        keys = [layer.keys[0] for layer in model(torch.tensor([IDS])).past_key_values.layers]
    cache = FP8Cache(model.config, model=tmp_path / "out")
    for layer, k in zip(cache.layers, keys, strict=True):
        amax = pair_norms(k, model.config.rope_parameters["partial_rotary_factor"]).amax(1)
        expected = torch.maximum(amax, amax.max() / 256) / 448
        assert torch.allclose(layer.storage[0].scale, expected, rtol=1e-4)
    quantized = logits(tmp_path / "out", kv_cache_dtype="fp8")
    assert likeness(quantized, logits(tmp_path / "model")) > 0.99


def test_key_centers_turn_with_the_rope_of_their_own_layer(tmp_path: Path):
    """Large means on half of the channel pairs, in layers of two ropes: most of each score comes
    from the centers.
    """
    folder = tmp_path / "model"
    weights = save_changed("gemma3-two-ropes", folder, attention_bias=True)
    for name, bias in weights.items():
        if name.endswith("k_proj.bias"):
            bias.view(-1, 32)[:, 4:12] = 8.0
    store(weights, folder)
    options: dict[str, Any] = {"weights": "none", "kv_cache": "fp8", "calibration_data": [IDS]}
    result = freight.quantize(folder, tmp_path / "out", **options, center=True)
    assert all(layer.k is not None for layer in result.centers)
    assert likeness(logits(tmp_path / "out", kv_cache_dtype="fp8"), logits(folder)) > 0.995


def test_keys_that_are_rotated_in_part_have_centers_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Large means on rotated pairs of channels: with centers, an E4M3 cache comes nearer to one in
    float32. They are biases, which are subtracted without centers too, but for this test.
    """
    monkeypatch.setattr(kv_pages, "LARGE_BIAS", float("inf"))
    folder = tmp_path / "model"
    weights = save_changed("phi3-partial", folder)
    for index in range(VARIANTS["phi3-partial"].num_hidden_layers):
        prefix = f"model.layers.{index}.self_attn."
        q, k, v = (torch.zeros(size) for size in (4 * 16, 2 * 16, 2 * 16))
        k.view(2, 16)[:, 2:5] = (
            8.0  # of 12 channels that are rotated: pairs (2, 8), (3, 9), (4, 10)
        )
        weights[f"{prefix}qkv_proj.bias"] = torch.cat((q, k, v))
        weights[f"{prefix}o_proj.bias"] = torch.zeros(64)
    store(weights, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_bias": True}))
    result, (centered, plain) = errors_of_caches(folder, tmp_path)
    for layer in result.centers:
        assert layer.k is not None
        assert set(layer.k.nonzero()[:, 1].tolist()) == {2, 3, 4, 8, 9, 10}
    assert centered < plain / 4


def test_centers_of_keys_where_queries_are_scaled_by_their_position(tmp_path: Path):
    """Large means of keys, from a channel that all tokens share: with centers, E4M3 comes nearer to
    float32.
    """
    folder = tmp_path / "model"
    weights = save_changed("ministral3", folder)
    weights["model.embed_tokens.weight"][:, 0] = 3.0
    for index in range(VARIANTS["ministral3"].num_hidden_layers):
        weights[f"model.layers.{index}.self_attn.k_proj.weight"].view(2, 32, 64)[:, 4:8, 0] = 2.0
        weights[f"model.layers.{index}.self_attn.q_proj.weight"] *= 3
    store(weights, folder)
    # queries from position 40 on have a factor
    result, (centered, plain) = errors_of_caches(folder, tmp_path, begin=40)
    assert all(layer.k is not None for layer in result.centers)
    assert centered < plain / 4
