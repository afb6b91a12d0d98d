"""Models with Mamba-2 quantized, in the form of ModelOpt's files, and under the names that
checkpoints have.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parity.random_models import freight_logits, save_random, tokens
from tests.parity.variants import VARIANTS

import freight
from freight.model.decoder import Decoder
from freight.model.layers.linear import Linear
from freight.model.mixers.mamba2.layer import Mamba2
from freight.model.open import open_checkpoint, open_model
from freight.operands.weight import Weight
from freight.settings.engine import EngineArgs

IDS = tokens(120)
FP8 = torch.float8_e4m3fn
BLOCK = 128
EXACT = ("mixer.A_log", "mixer.D", "mixer.dt_bias", "mixer.conv1d.weight", "mixer.conv1d.bias", "mixer.norm.weight",
         "mixer.gate.weight", "mixer.gate.e_score_correction_bias", "norm.weight", "norm_f.weight",
         "embeddings.weight")  # fmt: skip


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def rewritten(folder: Path, changed: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    save_file(
        {name: tensor.contiguous() for name, tensor in changed.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(config))


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def decoder_of(folder: Path) -> Decoder:
    opened = open_model(EngineArgs(str(folder), kernels="reference", skip_tokenizer_init=True))
    decoder = opened.load(opened.resolve(opened.args))
    assert isinstance(decoder, Decoder)
    return decoder


def decoded(stored: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """The matrix that a module stands for: its values times the scale of the tensor, of their row
    or of their block.
    """
    data, scale = stored[f"{module}.weight"].float(), stored[f"{module}.weight_scale"].float()
    if scale.numel() in (1, len(data)):
        return data * scale.reshape(-1, 1)
    return (
        data
        * scale.repeat_interleave(BLOCK, 0)[: len(data)].repeat_interleave(BLOCK, 1)[
            :, : data.shape[1]
        ]
    )


@pytest.mark.parametrize("weights", ["fp8", "fp8-channel", "fp8-block"])
def test_projections_are_quantized_whole_and_nothing_else_of_mamba(
    weights: str, tmp_path: Path
) -> None:
    """No scale is cut: z, what is convolved and dt end within blocks of 128 rows."""
    save_random(VARIANTS["nemotron-h-latent"], tmp_path / "plain", torch.bfloat16)
    freight.quantize(str(tmp_path / "plain"), tmp_path / "made", weights=weights, kv_cache="fp8",
                     calibration_data=[IDS])  # fmt: skip
    before, stored = tensors(tmp_path / "plain"), tensors(tmp_path / "made")
    kept = [name for name in before if name.endswith(EXACT)]
    assert all(torch.equal(stored[name], before[name]) for name in kept)
    assert {name for name in before if stored[name].dtype != FP8} - set(kept) == {"lm_head.weight"}
    layers = [layer.mixer for layer in decoder_of(tmp_path / "made").layers]
    for index, mixer in enumerate(layers):
        if isinstance(mixer, Mamba2):
            for module, linear in (("in_proj", mixer.in_proj), ("out_proj", mixer.out)):
                assert isinstance(linear, Linear)
                assert isinstance(linear.weight, Weight)
                expected = decoded(stored, f"backbone.layers.{index}.mixer.{module}")
                assert torch.equal(linear.weight.dequantized(), expected)
    assert sum(isinstance(mixer, Mamba2) for mixer in layers) == 2
    scales = open_checkpoint(str(tmp_path / "made")).kv_scales
    assert [layer is not None for layer in scales.layers] == [False, False, True, False, False]
    logits, plain = (freight_logits(tmp_path / name, IDS, "auto") for name in ("made", "plain"))
    assert torch.nn.functional.cosine_similarity(logits, plain).mean() > 0.9


def test_granite_is_quantized(tmp_path: Path) -> None:
    save_random(VARIANTS["granite-h-moe"], tmp_path / "plain", torch.bfloat16)
    options: dict[str, Any] = {"weights": "fp8", "activations": "static", "calibration_data": [IDS]}
    freight.quantize(str(tmp_path / "plain"), tmp_path / "made", **options)
    before, stored = tensors(tmp_path / "plain"), tensors(tmp_path / "made")
    for module in (
        "mamba.in_proj",
        "mamba.out_proj",
        "shared_mlp.input_linear",
        "shared_mlp.output_linear",
    ):
        assert stored[f"model.layers.0.{module}.weight"].dtype == FP8
        assert stored[f"model.layers.0.{module}.input_scale"] > 0
    same = [name for name in before if ".mamba." in name and "proj.weight" not in name]
    assert len(same) == 2 * 8
    assert all(torch.equal(stored[name], before[name]) for name in same)
    logits, plain = (freight_logits(tmp_path / name, IDS, "auto") for name in ("made", "plain"))
    assert torch.nn.functional.cosine_similarity(logits, plain).mean() > 0.9


def test_a_file_of_modelopt(tmp_path: Path) -> None:
    """Scales per tensor of the projections and experts, attention and convolutions left out by
    name, KV scales beside k_proj and v_proj, and layers that predict further tokens."""
    save_random(VARIANTS["nemotron-h-moe"], tmp_path, torch.float32)
    config, changed = config_of(tmp_path), tensors(tmp_path)
    for name in [
        name for name in changed if name.endswith("proj.weight") and ".layers.2." not in name
    ]:
        module, weight = name.removesuffix(".weight"), changed[name]
        scale = weight.abs().max() / 448
        changed[name] = (weight / scale).to(FP8)
        changed |= {f"{module}.weight_scale": scale, f"{module}.input_scale": torch.tensor(0.02)}
    changed |= {
        f"backbone.layers.2.mixer.{side}_proj.{side}_scale": torch.tensor(0.01) for side in "kv"
    }
    changed["mtp.layers.0.norm.weight"] = torch.ones(64)
    rewritten(
        tmp_path,
        changed,
        {**config, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"},
    )
    left_out = ["lm_head", "backbone.layers.*.mixer.conv1d", "backbone.layers.2.mixer*", "mtp*"]
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": left_out}
    written = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": quantization}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(written))
    opened = open_checkpoint(str(tmp_path))
    layer = opened.kv_scales.layers[2]
    assert layer is not None
    assert layer.k == layer.v == (pytest.approx(0.01),)
    mixer = decoder_of(tmp_path).layers[0].mixer
    assert isinstance(mixer, Mamba2)
    assert isinstance(mixer.in_proj, Linear)
    assert isinstance(mixer.in_proj.weight, Weight)
    assert mixer.in_proj.weight.input_scale == pytest.approx(0.02)
    matrix = changed["backbone.layers.0.mixer.in_proj.weight"].float()
    expected = matrix * changed["backbone.layers.0.mixer.in_proj.weight_scale"]
    assert torch.equal(mixer.in_proj.weight.dequantized(), expected)
    assert freight_logits(tmp_path, IDS, "auto").isfinite().all()


def test_names_of_transformers_and_of_publishers(tmp_path: Path) -> None:
    """`backbone.` or `model.`, and a matrix for each expert or one tensor of all."""
    save_random(VARIANTS["nemotron-h-latent"], tmp_path, torch.float32)
    expected = freight_logits(tmp_path, IDS, "auto")
    changed = {
        name.replace("backbone.", "model.", 1): tensor for name, tensor in tensors(tmp_path).items()
    }
    for layer in (1, 3):
        for part in ("up_proj", "down_proj"):
            prefix = f"model.layers.{layer}.mixer.experts."
            changed[prefix + part] = torch.stack(
                [changed.pop(f"{prefix}{i}.{part}.weight") for i in range(8)]
            )
    rewritten(tmp_path, changed, config_of(tmp_path))
    assert torch.equal(freight_logits(tmp_path, IDS, "auto"), expected)


@pytest.mark.parametrize("model_type", ["NemotronH_Nano_VL_V2", "NemotronH_Nano_Omni_Reasoning_V3"])
def test_the_text_model_as_published(model_type: str, tmp_path: Path) -> None:
    """transformers' form of the whole model, with NVIDIA's keys and names of tensors around it."""
    theirs, published = tmp_path / "theirs", tmp_path / "published"
    save_random(VARIANTS["nemotron-h-omni"], theirs, torch.float32)
    shutil.copytree(theirs, published)
    config = config_of(theirs)
    text = config.pop("text_config") | {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "ME*EM",
    }
    del text["layers_block_type"]
    outside = {
        "model_type": model_type,
        "architectures": [model_type],
        "llm_config": text,
        "img_context_token_id": 18,
    }
    beside = {
        "sound_encoder.encoder.a.weight": torch.ones(2),
        "sound_projection.norm.weight": torch.ones(2),
    }
    rewritten(
        published, tensors(theirs) | beside, {"dtype": "float32", "vision_config": {}, **outside}
    )
    assert torch.equal(freight_logits(published, IDS, "auto"), freight_logits(theirs, IDS, "auto"))
