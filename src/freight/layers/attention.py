"""Attention of one layer: project; norm, rotate and store; attend; project back.

The keys and values of this step are stored first and read back from the pages, so attention reads the same bits
for a token of this step as for an earlier one.

If the cache has centers, the kernel that stores keys and values subtracts them. The attention kernel adds the center of
keys back to the scores; the center of values is added back to the output here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from freight.batch import ForwardBatch
from freight.cache.pool import LayerKV
from freight.kernels.kernel_set import KernelSet
from freight.kernels.rotary import Rotary
from freight.layers.linear import Projection


@dataclass(frozen=True)
class Attention:
    """Grouped-query self-attention (Ainslie et al. 2023). `qkv` computes q, k and v, concatenated along the output."""

    qkv: Projection
    o: Projection
    rotary: Rotary
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    soft_cap: float | None
    kernels: KernelSet

    def __call__(self, x: Any, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """x: [num_tokens, hidden_size], a tensor or what the norm returned for `qkv.consumer`; returns x's shape."""
        heads = self.qkv(x).view(batch.num_tokens, -1, self.head_dim)
        q = kv.store(heads, self.rotary, batch.positions, batch.slots)
        attended = self.kernels.attention(q, kv.pages, batch, self.head_dim**-0.5, self.window, self.soft_cap)
        if kv.pages.v_center is not None:  # probabilities sum to 1
            center = kv.pages.v_center.repeat_interleave(self.num_heads // self.num_kv_heads, 0)
            attended = (attended.float() + center).to(attended.dtype)
        return self.o(attended.flatten(1))
