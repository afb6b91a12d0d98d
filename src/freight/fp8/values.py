"""Quantized things as data: a Linear's weight, and the pages of one layer's KV cache with the scales they belong to.

Neither tensor travels without its scales, and the format is read off the tensor, never passed beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freight.fp8.formats import Format
from freight.fp8.quantize import format_of


@dataclass(frozen=True)
class Weight:
    """The matrix of a Linear, `data` [out_features, in_features], contiguous."""

    data: Tensor

    @staticmethod
    def concat(parts: list[Weight]) -> Weight:
        """Merge along the output features (q, k, v or gate, up): exact, rows keep their bits."""
        return parts[0] if len(parts) == 1 else Weight(torch.cat([part.data for part in parts]))


@dataclass(frozen=True)
class KVPages:
    """One layer's pages and the scales they were written with.

    k, v                [num_blocks, block_size, num_kv_heads, head_dim], FP8 or 16/32-bit
    k_scale, v_scale    None: stored values are the true ones (16 or 32 bits, or `unit`);
                        [num_kv_heads, head_dim] float32: static, whatever the granularity they came in;
                        [num_blocks, block_size, num_kv_heads] uint8: `token`, E8M0 bytes (2 ** (byte - 127))
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
