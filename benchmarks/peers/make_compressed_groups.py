"""Make tiny Llamas whose weights have scales of groups, with compressed-tensors alone.

    python benchmarks/peers/make_compressed_groups.py tests/fixtures/four_bits

Needs compressed-tensors 0.20.1 and transformers 5. `mxfp8` and `mxfp8_weights` are the presets MXFP8 and
MXFP8A16. `w4a8` and `w4a8_fp8` are W4A8 and W4AFP8 with groups of 32, which divide the model's sizes;
`w4a8_packed` is W4A8 in the format of earlier versions, pack-quantized, and `w4a8_zeros` has zero points
and one static scale of inputs. Each folder gets config.json and model.safetensors as `save_pretrained`
writes them, and `expected.safetensors`: token ids, the logits in float32 of transformers' model with the
values that the library's `decompress` makes of the tensors, inputs not rounded, and as metadata the
SHA-256 of each matrix of these values.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, max_position_embeddings=64, tie_word_embeddings=False,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
IDS = torch.randint(3, 64, (24,), generator=torch.Generator().manual_seed(7))
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}


def scheme_of(name: str) -> QuantizationScheme:
    """Return the preset, with groups that divide the tiny model."""
    presets = {
        "mxfp8": "MXFP8", "mxfp8_weights": "MXFP8A16", "w4a8": "W4A8", "w4a8_fp8": "W4AFP8",
        "w4a8_packed": "W4A8", "w4a8_zeros": "W4A8",
    }  # fmt: skip
    scheme = preset_name_to_scheme(presets[name], ["Linear"])
    if name.startswith("w4a8"):
        scheme.weights = QuantizationArgs(**INT4, symmetric=name != "w4a8_zeros")
    if name == "w4a8_packed":
        scheme.format = "pack-quantized"
    if name == "w4a8_zeros":
        scheme.input_activations = QuantizationArgs(**INT8, strategy="tensor", dynamic=False)
    return scheme


def set_scales(linear: nn.Module, args: QuantizationArgs) -> None:
    """Set the scales, and zero points, of the extremes of each group."""
    groups = linear.weight.unflatten(1, (-1, args.group_size))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    linear.weight_scale.copy_(scale)
    if hasattr(linear, "weight_zero_point"):
        linear.weight_zero_point.copy_(zero)
    if hasattr(linear, "input_scale"):
        linear.input_scale.fill_(0.03)
    linear.quantization_status = QuantizationStatus.FROZEN


def values_of(folder: Path) -> dict[str, Tensor]:
    """Return the matrices that the library makes of the tensors in a folder, float32."""
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(said).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(said["format"])
    stored = load_file(folder / "model.safetensors")
    values = {}
    for key in [key for key in stored if key.endswith("weight_scale")]:
        module = key.rpartition(".")[0]
        own = {k.rpartition(".")[2]: v for k, v in stored.items() if k.startswith(f"{module}.")}
        # in float32: the library multiplies in bfloat16, the dtype of scales
        if own["weight_scale"].dtype == torch.bfloat16:
            own["weight_scale"] = own["weight_scale"].float()
        values[f"{module}.weight"] = compressor.decompress(own, scheme)["weight"].float()
    return values


@torch.no_grad()
def make(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(SHAPE).to(torch.bfloat16).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5)
    with tempfile.TemporaryDirectory() as base:
        model.save_pretrained(base)
        plain = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    scheme = scheme_of(name)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"],
        quantization_status=QuantizationStatus.INITIALIZED,
    )  # fmt: skip
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            set_scales(module, scheme.weights)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    (folder / "generation_config.json").unlink(missing_ok=True)
    digests = {}
    for key, matrix in values_of(folder).items():
        plain.get_parameter(key).copy_(matrix)
        digests[key] = hashlib.sha256(matrix.numpy().tobytes()).hexdigest()
    expected = {"input_ids": IDS, "logits": plain(IDS[None]).logits[0].contiguous()}
    save_file(expected, folder / "expected.safetensors", metadata=digests)


if __name__ == "__main__":
    for form in ("mxfp8", "mxfp8_weights", "w4a8", "w4a8_fp8", "w4a8_packed", "w4a8_zeros"):
        make(form, Path(sys.argv[1]) / form)
