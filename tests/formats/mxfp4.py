"""Tiny models of gpt-oss whose experts are in MXFP4, as OpenAI's own files have them, from random
codes.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.parity.random_models import save_random
from tests.parity.variants import VARIANTS
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

LEFT_OUT = [
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
]
EXPERTS = "model.layers.{}.mlp.experts."


def save_mxfp4(
    folder: Path, dtype: torch.dtype = torch.bfloat16, lowest: int = 115, wide: str = ""
) -> Path:
    """`folder`/plain, dequantized by transformers' own code, and `folder`/mxfp4 of the same values,
    which is returned.

    Scales are drawn from `lowest` to 124; one row of the tensor `wide` has 100 and 124.
    """
    plain, packed = folder / "plain", folder / "mxfp4"
    save_random(VARIANTS["gpt-oss"], plain, dtype)
    packed.mkdir()
    stored = load_file(plain / "model.safetensors")
    tensors, generator = {}, torch.Generator().manual_seed(5)
    for name, tensor in stored.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(lowest, 125, shape, generator=generator, dtype=torch.uint8)
        if name == wide:
            scales[3, 5, 0], scales[3, 5, 1] = 100, 124
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        stored[name] = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    save_file(stored, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    declared = {"modules_to_not_convert": LEFT_OUT, "quant_method": "mxfp4"}
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": declared}
    (packed / "config.json").write_text(json.dumps(config))
    return packed
