"""Mistral 3: a text model beside a vision model, of Mistral's older kind or of the newer one, and
its FP8 files.
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
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PixtralVisionConfig

from freight.checkpoint.reader import Checkpoint
from freight.errors import CheckpointError

IDS = tokens(100)
NAMES = ("model.language_model.", "language_model.model.")
PROJECTIONS = [
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
]


def save_wrapped(text: str, folder: Path, **more: Any) -> Any:
    """Random, beside a vision model, as transformers saves it."""
    vision = PixtralVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = Mistral3Config(
        text_config=VARIANTS[text].to_dict(),
        vision_config=vision,
        tie_word_embeddings=VARIANTS[text].tie_word_embeddings,
    )
    torch.manual_seed(0)
    model = Mistral3ForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.12 * noise)
    model.save_pretrained(folder)
    return model


def rename(folder: Path, under: str, change: Any = lambda tensors: None) -> None:
    """The decoder's tensors under one of the names that published files have; then `change` the
    tensors.
    """
    file, renamed = folder / "model.safetensors", {}
    for name, tensor in load_file(file).items():
        bare = name.removeprefix("model.").replace("language_model.model.", "language_model.")
        if bare.startswith("language_model.") and "lm_head" not in bare:
            renamed[under + bare.removeprefix("language_model.")] = tensor
        elif "lm_head" in bare:
            renamed[("language_model." if under == NAMES[1] else "") + "lm_head.weight"] = tensor
        else:
            renamed[("model." if under == NAMES[0] else "") + bare] = tensor
    change(renamed)
    save_file(renamed, file, {"format": "pt"})


@pytest.mark.parametrize(
    "text", ["ministral3", "ministral3-tied", "mistral", "mistral4", "mistral4-groups"]
)
def test_the_text_model_of_mistral_3_beside_a_vision_model(text: str, tmp_path: Path):
    model = save_wrapped(text, tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0]
    assert expected.std() > 0.1
    for under in NAMES:
        rename(tmp_path, under)
        got = freight_logits(tmp_path, IDS, "auto", "reference")
        assert (got - expected).abs().max() <= 1e-4
    rename(tmp_path, under, lambda tensors: tensors.update({"audio_tower.weight": torch.ones(3)}))
    with pytest.raises(CheckpointError, match=r"audio_tower\.weight"):
        freight_logits(tmp_path, IDS, "auto", "reference")


def test_a_stored_head_is_used_and_none_means_a_tied_one_where_the_key_outside_is_absent(
    tmp_path: Path,
):
    """transformers reads the key outside of text_config, whose default ties, and uses a head that
    is stored.
    """
    for text in ("ministral3", "ministral3-tied"):
        expected = save_wrapped(text, tmp_path / text)(torch.tensor([IDS])).logits[0]
        path = tmp_path / text / "config.json"
        config = json.loads(path.read_text())
        del config["tie_word_embeddings"]
        config["text_config"].pop("tie_word_embeddings")
        path.write_text(json.dumps(config))
        assert (
            freight_logits(tmp_path / text, IDS, "auto", "reference") - expected
        ).abs().max() <= 1e-4


def quantized(folder: Path, variant: str = "ministral3") -> dict[str, torch.Tensor]:
    """A plain float32 model as Mistral's FP8 files have it, with KV scales. Returns its tensors.

    Experts are one tensor for a layer, with a scale [experts, 1, 1] and one for inputs [experts]
    (Mistral Small 4).
    """
    save_random(VARIANTS[variant], folder, torch.float32)
    file, path = folder / "model.safetensors", folder / "config.json"
    stored = load_file(file)
    for name, weight in list(stored.items()):
        if not name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight")) and weight.ndim < 3:
            continue
        scale = (
            weight.abs().amax((1, 2), keepdim=True) if weight.ndim == 3 else weight.abs().max()
        ) / 448
        scale = scale.bfloat16() if variant == "mistral4" else scale
        stored[name] = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        inputs = torch.full((len(weight),), 0.01) if weight.ndim == 3 else torch.tensor(0.01)
        stored[
            f"{name.removesuffix('.weight')}{'_' if weight.ndim == 3 else '.'}activation_scale"
        ] = inputs
    for layer in range(VARIANTS[variant].num_hidden_layers):
        sides = ("k",) if variant == "mistral4" else ("k", "v")
        stored |= {
            f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor(0.02) for side in sides
        }
    save_file(stored, file, {"format": "pt"})
    declared = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": None,
        "dequantize": False,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": declared}))
    return stored


def logits(folder: Path, kernels: str = "reference") -> torch.Tensor:
    return freight_logits(folder, IDS[:40], "float32", kernels, kv_cache_dtype="fp8")


def test_fp8_as_mistral_publishes_it_with_every_scale_used(tmp_path: Path):
    save_random(VARIANTS["ministral3"], tmp_path / "plain", torch.float32)
    plain = freight_logits(tmp_path / "plain", IDS[:40], "float32", "reference")
    stored = quantized(tmp_path / "fp8")
    fp8 = logits(tmp_path / "fp8")
    assert (fp8 - plain).norm() < 0.25 * plain.norm()
    inputs = [
        f"{module}.activation_scale"
        for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
    ]
    weights = [f"{module}.weight_scale_inv" for module in PROJECTIONS]
    for name in (*weights, *inputs, "self_attn.k_scale", "self_attn.v_scale"):
        name = f"model.layers.1.{name}"
        save_file(
            stored | {name: stored[name] * 1.5},
            tmp_path / "fp8" / "model.safetensors",
            {"format": "pt"},
        )
        assert (logits(tmp_path / "fp8") - fp8).abs().max() > 1e-3, name


def test_fp8_of_mistral_4_with_every_scale_used(tmp_path: Path):
    """But that of `q_a_proj`, which the norm behind it undoes, and that of the inputs of
    `kv_b_proj`, which are not rounded."""
    save_random(VARIANTS["mistral4"], tmp_path / "plain", torch.float32)
    plain = freight_logits(tmp_path / "plain", IDS[:40], "float32", "reference")
    stored = quantized(tmp_path / "fp8", "mistral4")
    fp8 = logits(tmp_path / "fp8")
    assert (fp8 - plain).norm() < 0.35 * plain.norm()
    assert (logits(tmp_path / "fp8", "auto") - fp8).norm() < 0.1 * fp8.norm()
    scales = [
        name for name in stored if "layers.1." in name and name.endswith(("_scale_inv", "_scale"))
    ]
    assert len(scales) == 2 * 5 + 2 * 2 + 2 * 3 + 1
    for name in scales:
        save_file(
            stored | {name: stored[name] * 1.5},
            tmp_path / "fp8" / "model.safetensors",
            {"format": "pt"},
        )
        moved = (logits(tmp_path / "fp8") - fp8).abs().max()
        unseen = name.endswith(("q_a_proj.weight_scale_inv", "kv_b_proj.activation_scale"))
        assert moved < 1e-3 if unseen else moved > 1e-3, (name, moved)


@pytest.mark.parametrize("under", NAMES)
@pytest.mark.parametrize("text", ["ministral3", "mistral4"])
def test_fp8_beside_a_vision_model_in_16_bits(text: str, under: str, tmp_path: Path):
    tensors = quantized(tmp_path, text)
    expected, path = logits(tmp_path), tmp_path / "config.json"
    text = json.loads(path.read_text())
    wrapped = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "float32",
               "quantization_config": text.pop("quantization_config"), "image_token_index": 10,
               "vision_config": {"a": 1},
               "projector_hidden_act": "gelu", "spatial_merge_size": 2, "multimodal_projector_bias": False,
               "vision_feature_layer": -1, "tie_word_embeddings": False}  # fmt: skip
    path.write_text(json.dumps(wrapped | {"text_config": text}))
    save_file(
        {f"language_model.{name}": tensor for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
    )
    vision = {
        "vision_tower.patch_conv.weight": torch.ones(3),
        "multi_modal_projector.norm.weight": torch.ones(3),
    }
    outer = "model." if under == NAMES[0] else ""
    rename(
        tmp_path,
        under,
        lambda tensors: tensors.update({outer + name: value for name, value in vision.items()}),
    )
    assert torch.equal(logits(tmp_path), expected)


def test_mistral_s_own_format_is_refused_with_the_way_out(tmp_path: Path):
    save_file(
        {"layers.0.attention.wq.weight": torch.ones(2, 2)}, tmp_path / "consolidated.safetensors"
    )
    (tmp_path / "params.json").write_text('{"dim": 64}')
    said = r"Mistral's own format \(consolidated\.safetensors, params\.json\).*config\.json and model\*\.safetensors"
    with pytest.raises(CheckpointError, match=said):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=said):
        Checkpoint(tmp_path)
    save_file({"norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert Checkpoint(tmp_path).names == {"norm.weight"}
