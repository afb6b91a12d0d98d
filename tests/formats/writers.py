"""A tiny model in every form that producers of FP8 checkpoints write, built from the formats'
descriptions.

Nothing below comes from Freight: bytes are decoded by a table made from the definition of E4M3FN
(OCP OFP8 1.0), and each form says what its producer takes the matrix for (`dequantized`), in the
dtype in which the producer says so. Sizes are chosen so that 128 x 128 blocks end in the middle of
q, k, v, gate and up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES = {
    "self_attn.q_proj": (192, 192),
    "self_attn.k_proj": (96, 192),
    "self_attn.v_proj": (96, 192),
    "self_attn.o_proj": (192, 192),
    "mlp.gate_proj": (320, 192),
    "mlp.up_proj": (320, 192),
    "mlp.down_proj": (192, 320),
}
MODULES = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in SHAPES.items()}
BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn

Tensors = dict[str, Tensor]
Rounded = tuple[
    Tensors, Tensor
]  # tensors by suffix of the module's name, and the matrix that they stand for


def value_of(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return (-1 if byte >> 7 else 1) * (float("nan") if byte & 127 == 127 else magnitude)


VALUES = torch.tensor([value_of(byte) for byte in range(256)])


def decoded(stored: Tensor) -> Tensor:
    return VALUES[stored.view(torch.uint8).long()]


def unrounded() -> Tensors:
    """The 16-bit model."""
    draw = torch.Generator().manual_seed(7)
    tensors = {
        f"{name}.weight": torch.randn(*shape, generator=draw) / shape[1] ** 0.5
        for name, shape in MODULES.items()
    }
    tensors |= {
        f"{name}.weight": torch.randn(64, 192, generator=draw) / 14
        for name in ("model.embed_tokens", "lm_head")
    }
    norms = [
        f"model.layers.{i}.{name}_layernorm"
        for i in range(2)
        for name in ("input", "post_attention")
    ]
    tensors |= {f"{name}.weight": torch.ones(192) for name in (*norms, "model.norm")}
    return {name: tensor.to(BF16) for name, tensor in tensors.items()}


def spread(grid: Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    """[rows, columns] of the scales of blocks; the last ones may be cut short."""
    return torch.kron(grid.float(), torch.ones(block))[: shape[0], : shape[1]].to(grid.dtype)


def block_amax(w: Tensor, block: tuple[int, int]) -> Tensor:
    rows = [
        torch.stack([part.abs().amax() for part in band.split(block[1], 1)])
        for band in w.split(block[0])
    ]
    return torch.stack(rows)


def saturated(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(E4M3)


def autofp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """AutoFP8: scale and product rounded to the model's dtype; what is stored is the reciprocal, in
    float32.
    """
    scale = 448 / w.abs().amax().clamp(min=1e-12)
    return saturated(w * scale), scale.float().reciprocal()


def by(
    amax: Tensor, w: Tensor, wide: Callable[[Tensor], Tensor], dtype: torch.dtype = F32
) -> Rounded:
    """amax / 448 in `dtype`, spread over the matrix by `wide`; (weight, weight_scale), dequantized
    in `dtype`.
    """
    scale = (amax.to(dtype) / 448).to(dtype)
    stored = saturated(w.to(dtype) / wide(scale))
    return {"weight": stored, "weight_scale": scale}, decoded(stored).to(dtype) * wide(scale)


def per_tensor(w: Tensor, dtype: torch.dtype = F32, shape: tuple[int, ...] = ()) -> Rounded:
    return by(w.abs().amax().reshape(shape), w, lambda scale: scale.reshape(()), dtype)


def per_row(w: Tensor, dtype: torch.dtype = F32) -> Rounded:
    return by(w.abs().amax(1, keepdim=True), w, lambda scale: scale, dtype)


def per_block(w: Tensor, block: tuple[int, int] = (128, 128), dtype: torch.dtype = F32) -> Rounded:
    return by(block_amax(w, block), w, lambda scale: spread(scale, block, tuple(w.shape)), dtype)


def renamed(rounded: Rounded, names: dict[str, str], extra: Tensors | None = None) -> Rounded:
    tensors, dequantized = rounded
    return {names.get(name, name): tensor for name, tensor in tensors.items()} | (
        extra or {}
    ), dequantized


@dataclass(frozen=True)
class Form:
    """What a producer writes.

    linear         what becomes of one matrix, by module; None leaves all as they are
    plain          modules (an expression) that stay unquantized
    activations    as `said` declares them
    kv             tensors of one layer, by suffix: the KV scales
    """

    said: dict[str, Any] | None
    linear: Callable[[str, Tensor], Rounded] | None = None
    activations: str = "plain"
    input_limit: float | None = None
    plain: str = "lm_head|model.embed_tokens"
    kv: Callable[[int], Tensors] = lambda layer: {}
    config: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass
class Written:
    form: Form
    config: dict[str, Any]
    tensors: Tensors
    dequantized: Tensors  # by module, of those that are quantized

    def save(self, folder: Path) -> str:
        save_file(
            self.tensors,
            folder / "model.safetensors",
            metadata={"format": "pt"} | self.form.metadata,
        )
        for name, content in {"config.json": self.config, **self.form.files}.items():
            (folder / name).write_text(json.dumps(content))
        return str(folder)


BASE = unrounded()


def write(form: Form) -> Written:
    """The tiny model in that form; its tensors may be changed before they are saved."""
    tensors, dequantized = dict(BASE), {}
    for module in (*MODULES, "lm_head", "model.embed_tokens"):
        if form.linear is not None and not re.search(form.plain, module):
            rounded, dequantized[module] = form.linear(module, tensors.pop(f"{module}.weight"))
            tensors |= {
                f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in rounded.items()
            }
    for layer in range(2):
        tensors |= {f"model.layers.{layer}.{name}": t for name, t in form.kv(layer).items()}
    said = {} if form.said is None else {"quantization_config": form.said}
    return Written(form, {**CONFIG, **said, **form.config}, tensors, dequantized)
