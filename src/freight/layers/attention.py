"""Attention of one layer: project, norm, rotate, store, attend, project back.

The keys and values of this step are stored first and read back from the pages, so a token is attended to in the same
bits whether it came in this step or long ago.

Where the cache has centers, they come off keys and values here. Attention puts the keys' back into the scores; the
values' comes back into the output here.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freight.batch import ForwardBatch
from freight.cache.pool import LayerKV
from freight.kernels.kernel_set import KernelSet
from freight.layers.linear import Projection
from freight.layers.norm import RMSNorm
from freight.layers.rope import Rope


@dataclass(frozen=True)
class Attention:
    """Grouped-query self-attention (Ainslie et al. 2023). `qkv` is q, k and v along the output."""

    qkv: Projection
    o: Projection
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    rope: Rope
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    soft_cap: float | None
    kernels: KernelSet

    def __call__(self, x: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """x: [num_tokens, hidden_size]; returns the same shape."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        k_center, v_center = kv.pages.k_center, kv.pages.v_center
        if k_center is not None:
            k = _shifted(k, -k_center.b)
        if v_center is not None:
            v = _shifted(v, -v_center)
        q, k = self.rope(q, k, batch.positions)
        kv.store(k, v, batch.slots)
        attended = self.kernels.attention(q, kv.pages, batch, self.head_dim**-0.5, self.window, self.soft_cap)
        if v_center is not None:  # probabilities sum to 1
            attended = _shifted(attended, v_center.repeat_interleave(self.num_heads // self.num_kv_heads, 0))
        return self.o(attended.flatten(1))


def _shifted(x: Tensor, by: Tensor) -> Tensor:
    """x + by in float32, rounded to x's dtype. x: [rows, heads, head_dim], by: [heads, head_dim]."""
    return (x.float() + by).to(x.dtype)
