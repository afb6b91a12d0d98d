"""Quantized things as data: a Linear's weight, and the pages of one layer's KV cache with the scales they belong to.

Neither tensor travels without its scales, and the format is read off the tensor, never passed beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from freight.fp8.formats import Format
from freight.fp8.quantize import format_of


class Activations(StrEnum):
    """What a Linear does with its input before the product."""

    PLAIN = "plain"  # nothing: weight-only quantization, or none
    DYNAMIC = "dynamic"  # rounds each row to E4M3 with a scale from its own amax (1 x 128 groups under block scales)
    STATIC = "static"  # rounds to E4M3 with one calibrated scale


@dataclass(frozen=True)
class Weight:
    """The matrix of a Linear.

    data           [out_features, in_features], contiguous; FP8 or 16/32-bit
    scale          None for 16/32 bits; float32 [out_features], one per output row; or float32
                   [ceil(out_features / 128), ceil(in_features / 128)], one per 128 x 128 block
    activations    what happens to the input; PLAIN unless data is FP8
    input_scale    the static activation scale, > 0; only with STATIC
    """

    data: Tensor
    scale: Tensor | None = None
    activations: Activations = Activations.PLAIN
    input_scale: float | None = None

    @staticmethod
    def concat(parts: list[Weight]) -> Weight:
        """Merge along the output features (q, k, v or gate, up): exact, rows keep their bits."""
        first = parts[0]
        if len(parts) == 1:
            return first
        assert all((p.activations, p.input_scale) == (first.activations, first.input_scale) for p in parts)
        scales = [part.scale for part in parts if part.scale is not None]
        assert len(scales) in (0, len(parts))
        return replace(first, data=torch.cat([p.data for p in parts]), scale=torch.cat(scales) if scales else None)


@dataclass(frozen=True)
class KVPages:
    """One layer's pages and the scales they were written with.

    k, v                [num_blocks, block_size, num_kv_heads, head_dim], FP8 or 16/32-bit
    k_scale, v_scale    None: stored values are the true ones (16 or 32 bits, or `unit`);
                        [num_kv_heads, head_dim] float32: static, whatever the granularity they came in;
                        [num_blocks, block_size, num_kv_heads] bfloat16: `token`
    nan_count           [1] int64: NaNs that were stored so far; FP8 keeps them NaN
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    nan_count: Tensor

    @property
    def format(self) -> Format:
        return format_of(self.k)

    @property
    def block_size(self) -> int:
        return self.k.shape[1]

    @property
    def dynamic(self) -> bool:
        """Whether scales are measured per token as it is stored."""
        return self.k_scale is not None and self.k_scale.ndim == 3
