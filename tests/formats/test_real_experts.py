"""Mixtures of experts that llm-compressor and NVIDIA ModelOpt quantized themselves: bytes times
scales, and a run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.formats.test_experts import logprobs

from freight.checkpoint.linears import find_linears
from freight.fp8.formats import Format
from freight.model.open import open_checkpoint
from freight.model.shapes import kept_in_16_bits, tensor_shapes
from freight.model.sources import CheckpointSource

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = (
    "llmcompressor_qwen3_moe",
    "llmcompressor_qwen3_moe_blocks",
    "llmcompressor_mixtral",
    "modelopt_qwen3_moe",
    "modelopt_mixtral",
)
HALFWAY = {
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
}  # llm-compressor's names in Mixtral


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_bytes_times_scales(name: str):
    stored, opened = (
        load_file(FIXTURES / name / "model.safetensors"),
        open_checkpoint(str(FIXTURES / name)),
    )
    shapes, checkpoint = tensor_shapes(opened.model), opened.checkpoint
    found = find_linears(checkpoint, opened.scheme, shapes, kept_in_16_bits(opened.model))
    assert len(found) >= 4 + 3 * 2
    source = CheckpointSource(checkpoint, Format.BFLOAT16, Format.E4M3FN, "cpu", found)
    for weight, shape in shapes.items():
        module, _, suffix = weight.rpartition(".")
        if suffix != "weight" or weight not in found:
            continue
        if name == "llmcompressor_mixtral" and "experts" in module:
            module = module[:-2] + HALFWAY[module[-2:]]
        scale = stored[f"{module}.weight_scale"].float()
        rows = stored[f"{module}.weight"].float() * (
            scale if scale.numel() > 1 else scale.reshape(())
        )
        made = source.weight(weight, shape)
        assert torch.equal(made.dequantized(), rows), weight
        inputs = stored.get(f"{module}.input_scale")
        assert made.input_scale == (None if inputs is None else float(inputs))


@pytest.mark.parametrize("name", NAMES)
def test_they_run_with_their_kv_scales(name: str):
    stored, opened = (
        load_file(FIXTURES / name / "model.safetensors"),
        open_checkpoint(str(FIXTURES / name)),
    )
    scales = {n: float(t) for n, t in stored.items() if n.endswith(("k_scale", "v_scale"))}
    assert bool(scales) == (
        name in ("llmcompressor_qwen3_moe", "modelopt_qwen3_moe", "modelopt_mixtral")
    )
    (layer,) = opened.kv_scales.layers
    assert (layer is not None) == bool(scales)
    assert layer is None or {*layer.k, *layer.v} == set(scales.values())
    assert logprobs(str(FIXTURES / name), "auto").isfinite().all()
