"""Attention of one layer: project; norm, rotate and store; attend; project back.

The keys and values of this step are stored first and read back from the pages, so attention reads the same bits
for a token of this step as for an earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from freight.cache.pool import LayerKV
from freight.layers.linear import Projection
from freight.operands.batch import ForwardBatch
from freight.operands.rotary import Rotary


@dataclass(frozen=True)
class Attention:
    """Grouped-query self-attention (Ainslie et al. 2023). `qkv` computes q, k and v, concatenated along the output.

    sinks   [num_heads] float32, or None (`KernelSet.attention`)
    """

    qkv: Projection
    o: Projection
    rotary: Rotary
    softmax_scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None = None

    def __call__(self, x: Any, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """x: [num_tokens, hidden_size], a tensor or what the norm returned for `qkv.consumer`; returns x's shape."""
        q = kv.store(self.qkv(x), self.rotary, batch)
        attended = kv.attend(q, batch, self.softmax_scale, self.window, self.soft_cap, self.sinks)
        return self.o(attended.flatten(1))
