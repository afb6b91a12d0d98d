"""Models with Mamba-2 quantized, in the form of ModelOpt's files, and under the names that
checkpoints have.
"""

from __future__ import annotations

import itertools
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
EXACT = (
    *("mixer.A_log", "mixer.D", "mixer.dt_bias", "mixer.conv1d.weight", "mixer.conv1d.bias"),
    *("mixer.norm.weight", "mixer.gate.weight", "mixer.gate.e_score_correction_bias"),
    *("norm.weight", "norm_f.weight", "embeddings.weight"),
)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def rewritten(folder: Path, changed: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    stored = {name: tensor.contiguous() for name, tensor in changed.items()}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def quantized(variant: str, folder: Path, **options: Any) -> tuple[dict[str, torch.Tensor], ...]:
    """The tensors of a random model and of what it becomes, in `folder`/made; both say the same."""
    plain, made = folder / "plain", folder / "made"
    save_random(VARIANTS[variant], plain, torch.bfloat16)
    freight.quantize(str(plain), made, calibration_data=[IDS], **options)
    logits = [freight_logits(model, IDS, "auto") for model in (plain, made)]
    assert torch.nn.functional.cosine_similarity(*logits).mean() > 0.9
    return tensors(plain), tensors(made)


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
    scale = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return data * scale[: len(data), : data.shape[1]]


def weight_of(linear: object) -> Weight:
    assert isinstance(linear, Linear)
    assert isinstance(linear.weight, Weight)
    return linear.weight


@pytest.mark.parametrize("weights", ["fp8", "fp8-channel", "fp8-block"])
def test_projections_are_quantized_whole_and_nothing_else_of_mamba(
    weights: str, tmp_path: Path
) -> None:
    """No scale is cut: z, what is convolved and dt end within blocks of 128 rows."""
    options = {"weights": weights, "kv_cache": "fp8"}
    before, stored = quantized("nemotron-h-latent", tmp_path, **options)
    kept = [name for name in before if name.endswith(EXACT)]
    assert all(torch.equal(stored[name], before[name]) for name in kept)
    assert {name for name in before if stored[name].dtype != FP8} - set(kept) == {"lm_head.weight"}
    layers = [layer.mixer for layer in decoder_of(tmp_path / "made").layers]
    mixers = {index: mixer for index, mixer in enumerate(layers) if isinstance(mixer, Mamba2)}
    assert len(mixers) == 2
    for index, mixer in mixers.items():
        for module, linear in (("in_proj", mixer.in_proj), ("out_proj", mixer.out)):
            expected = decoded(stored, f"backbone.layers.{index}.mixer.{module}")
            assert torch.equal(weight_of(linear).dequantized(), expected)
    scales = open_checkpoint(str(tmp_path / "made")).kv_scales
    assert [layer is not None for layer in scales.layers] == [False, False, True, False, False]


def test_granite_is_quantized(tmp_path: Path) -> None:
    before, stored = quantized("granite-h-moe", tmp_path, weights="fp8", activations="static")
    for part in ("mamba.in", "mamba.out", "shared_mlp.input", "shared_mlp.output"):
        module = f"model.layers.0.{part}_{'proj' if 'mamba' in part else 'linear'}"
        assert stored[f"{module}.weight"].dtype == FP8
        assert stored[f"{module}.input_scale"] > 0
    same = [name for name in before if ".mamba." in name and "proj.weight" not in name]
    assert len(same) == 2 * 8
    assert all(torch.equal(stored[name], before[name]) for name in same)


def test_a_file_of_modelopt(tmp_path: Path) -> None:
    """Scales per tensor of the projections and experts, attention and convolutions left out by
    name, KV scales beside k_proj and v_proj, and layers that predict further tokens."""
    save_random(VARIANTS["nemotron-h-moe"], tmp_path, torch.float32)
    further = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    config, changed = config_of(tmp_path) | further, tensors(tmp_path)
    for name in [name for name in changed if name.endswith("proj.weight")]:
        if ".layers.2." not in name:
            module, weight = name.removesuffix(".weight"), changed[name]
            scale = weight.abs().max() / 448
            changed[name] = (weight / scale).to(FP8)
            changed[f"{module}.weight_scale"] = scale
            changed[f"{module}.input_scale"] = torch.tensor(0.02)
    for side in "kv":
        changed[f"backbone.layers.2.mixer.{side}_proj.{side}_scale"] = torch.tensor(0.01)
    changed["mtp.layers.0.norm.weight"] = torch.ones(64)
    rewritten(tmp_path, changed, config)
    left_out = ["lm_head", "backbone.layers.*.mixer.conv1d", "backbone.layers.2.mixer*", "mtp*"]
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": left_out}
    written = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": quantization}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(written))
    layer = open_checkpoint(str(tmp_path)).kv_scales.layers[2]
    assert layer is not None
    assert layer.k == layer.v == (pytest.approx(0.01),)
    mixer = decoder_of(tmp_path).layers[0].mixer
    assert isinstance(mixer, Mamba2)
    weight = weight_of(mixer.in_proj)
    assert weight.input_scale == pytest.approx(0.02)
    assert torch.equal(weight.dequantized(), decoded(changed, "backbone.layers.0.mixer.in_proj"))
    assert freight_logits(tmp_path, IDS, "auto").isfinite().all()


def test_names_of_transformers_and_of_publishers(tmp_path: Path) -> None:
    """`backbone.` or `model.`, and a matrix for each expert or one tensor of all."""
    save_random(VARIANTS["nemotron-h-latent"], tmp_path, torch.float32)
    expected, stored = freight_logits(tmp_path, IDS, "auto"), tensors(tmp_path)
    changed = {name.replace("backbone.", "model.", 1): tensor for name, tensor in stored.items()}
    for layer, part in itertools.product((1, 3), ("up_proj", "down_proj")):
        prefix = f"model.layers.{layer}.mixer.experts."
        experts = [changed.pop(f"{prefix}{expert}.{part}.weight") for expert in range(8)]
        changed[prefix + part] = torch.stack(experts)
    rewritten(tmp_path, changed, config_of(tmp_path))
    assert torch.equal(freight_logits(tmp_path, IDS, "auto"), expected)


@pytest.mark.parametrize("model_type", ["NemotronH_Nano_VL_V2", "NemotronH_Nano_Omni_Reasoning_V3"])
def test_the_text_model_as_published(model_type: str, tmp_path: Path) -> None:
    """transformers' form of the whole model, with NVIDIA's keys and names of tensors around it."""
    theirs, published = tmp_path / "theirs", tmp_path / "published"
    save_random(VARIANTS["nemotron-h-omni"], theirs, torch.float32)
    shutil.copytree(theirs, published)
    text = config_of(theirs)["text_config"] | {"architectures": ["NemotronHForCausalLM"]}
    text["hybrid_override_pattern"] = "ME*EM"
    del text["layers_block_type"]
    names = {"model_type": model_type, "architectures": [model_type], "llm_config": text}
    others = {"dtype": "float32", "vision_config": {}, "img_context_token_id": 18}
    sound = ("sound_encoder.encoder.a.weight", "sound_projection.norm.weight")
    beside = {name: torch.ones(2) for name in sound}
    rewritten(published, tensors(theirs) | beside, others | names)
    assert torch.equal(freight_logits(published, IDS, "auto"), freight_logits(theirs, IDS, "auto"))
