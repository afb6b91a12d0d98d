"""The rounding of vLLM's CPU kernels, which is not that of its GPU kernels: towards zero instead of
to nearest.

Read in vLLM's csrc/cpu/cpu_attn_fp8.hpp (0.32): the value is multiplied by 1 / scale, clipped to
±448, and the bits that E4M3 has no room for are dropped. `VllmCpuKernels` stores that way;
everything else is the reference kernels'. The truncated value times its scale is what the ordinary
store then rounds to the same number, so no cast is needed here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freight.fp8.formats import Format
from freight.kernels.reference import rotate, rotate_queries, split_heads, store_kv
from freight.kernels.reference_set import ReferenceKernels
from freight.operands.kv_pages import KVPages
from freight.operands.rotary import Rotary

_MIN_EXPONENT = -6  # of E4M3's normal numbers
_MANTISSA_BITS = 3


@dataclass(frozen=True)
class VllmCpuKernels(ReferenceKernels):
    """The reference kernels, with keys and values truncated as vLLM's CPU kernels do. For static
    scales in E4M3FN.
    """

    name: str = "vllm-cpu"

    def rotate_store(
        self, qkv: Tensor, rotary: Rotary, positions: Tensor, slots: Tensor | None, pages: KVPages
    ) -> Tensor:
        if slots is None:
            return super().rotate_store(qkv, rotary, positions, slots, pages)
        q, k, v = split_heads(qkv, rotary, pages)
        k = rotate(k, rotary.cos[positions], rotary.sin[positions])
        if pages.format is Format.E4M3FN and not pages.dynamic:
            k = _stored_value(k, pages.k_scale)
            v = _stored_value(v, pages.v_scale)
        store_kv(k, v, slots, pages)
        return rotate_queries(q, rotary, positions)


def truncated(x: Tensor) -> Tensor:
    """float32 -> the next E4M3FN value towards zero, saturated; float32 in x's shape."""
    clipped = x.float().clamp(-Format.E4M3FN.max, Format.E4M3FN.max)
    exponent = torch.frexp(clipped).exponent - 1  # of 1 ≤ mantissa < 2
    step = torch.exp2((exponent.clamp(min=_MIN_EXPONENT) - _MANTISSA_BITS).float())
    return (clipped / step).trunc() * step


def _stored_value(x: Tensor, scale: Tensor | None) -> Tensor:
    """Return the value that x has once it is stored, float32."""
    if scale is None:
        return truncated(x)
    return truncated(x.float() * (1.0 / scale)) * scale
