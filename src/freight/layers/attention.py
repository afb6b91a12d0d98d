"""Attention of one layer: project; norm, rotate and store; attend; project back.

The keys and values of this step are stored first and read back from the pages, so attention reads the same bits
for a token of this step as for an earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from freight.cache.pool import LayerKV
from freight.kernels.interface import KernelSet
from freight.layers.linear import Linear, Projection
from freight.operands.activation import GateFunction
from freight.operands.batch import ForwardBatch
from freight.operands.rotary import Rotary


@dataclass(frozen=True)
class QKNorm:
    """RMSNorm over all heads of q together, and over those of k (OLMo 2, MiniMax-M2)."""

    q: Tensor
    k: Tensor
    eps: float
    kernels: KernelSet

    def __call__(self, qkv: Tensor) -> Tensor:
        """[num_tokens, q's size + k's size + v's size], before and after."""
        first, second = len(self.q), len(self.q) + len(self.k)
        parts = ((qkv[:, :first], self.q), (qkv[:, first:second], self.k), (qkv[:, second:], None))
        return self.kernels.join(parts, self.eps)


@dataclass(frozen=True)
class ValueNorm:
    """Values of each head divided by their root mean square (Gemma 4).

    ones     [v_dim] float32: the weight of an RMSNorm that has none
    size     values of all heads of v
    k_eq_v   whether v is k as it is projected, and not a projection of its own
    """

    ones: Tensor
    size: int
    k_eq_v: bool
    eps: float
    kernels: KernelSet

    def __call__(self, qkv: Tensor) -> Tensor:
        """[num_tokens, q's size + k's size + v's size]; of `qkv`, v's size is 0 with `k_eq_v`."""
        kept = qkv if self.k_eq_v else qkv[:, : -self.size]
        return self.kernels.join(((kept, None), (qkv[:, -self.size :], self.ones)), self.eps)


@dataclass(frozen=True)
class HeadGate:
    """Factors of what attention returns, of the layer's input: one for each head, or for each channel of a head."""

    projection: Linear
    function: GateFunction

    def __call__(self, x: Tensor, attended: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size], attended: [num_tokens, num_heads, v_dim] -> [num_tokens, num_heads * v_dim]"""
        return self.projection.kernels.gate(attended.flatten(1), self.projection(x), self.function)


@dataclass(frozen=True)
class Attention:
    """Grouped-query self-attention (Ainslie et al. 2023). `qkv` computes q, k and v, concatenated along the output.

    norm    of q and k over all their heads; norms of single heads are in `rotary`
    v_norm  of each head of v, which may be k too; None: v is as it is projected
    shares  whether keys and values are those of another layer, which has stored them: `qkv` computes q alone
    sinks   [num_heads] float32, or None (`KernelSet.attention`)
    gate    of the result of each head; None: there is none
    """

    qkv: Projection
    o: Projection
    rotary: Rotary
    softmax_scale: float
    window: int | None
    soft_cap: float | None
    norm: QKNorm | None = None
    v_norm: ValueNorm | None = None
    sinks: Tensor | None = None
    shares: bool = False
    gate: HeadGate | None = None

    @property
    def consumer(self) -> Any:
        """As `Linear.consumer`."""
        return self.qkv.consumer if self.gate is None else None

    def __call__(self, x: Any, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """x: [num_tokens, hidden_size], a tensor or what the norm returned for `consumer`; returns x's shape."""
        qkv = self.qkv(x) if self.norm is None else self.norm(self.qkv(x))
        if self.v_norm is not None:
            qkv = self.v_norm(qkv)
        q = kv.rotate(qkv, self.rotary, batch) if self.shares else kv.store(qkv, self.rotary, batch)
        consumer = self.o.consumer if self.gate is None else None
        attended = kv.attend(q, batch, self.softmax_scale, self.window, self.soft_cap, self.sinks, consumer)
        if self.gate is not None:
            attended = self.gate(x, attended)
        return self.o(attended.flatten(1) if isinstance(attended, Tensor) else attended)
