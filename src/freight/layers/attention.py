"""Attention of one layer: project; norm, rotate and store; attend; project back.

The keys and values of this step are stored first and read back from the pages, so attention reads the same bits
for a token of this step as for an earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freight.cache.pool import LayerCache, LayerKV, PagedState
from freight.kernels.interface import KernelSet
from freight.layers.linear import Projection
from freight.operands.activation import GateFunction
from freight.operands.batch import ForwardBatch
from freight.operands.packed import PackedWeight, Rows, plain
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
class NormedLast:
    """Queries and keys rotated, and RMSNorm of each head of both behind that (Hunyuan).

    It is made of operations that every kernel set has: the heads are rotated as those of a layer
    that stores nothing, and what follows stores them unrotated. k_dim is v_dim, so that v passes
    through as heads, too; its own are kept.
    """

    rotary: Rotary
    q: Tensor
    k: Tensor
    sizes: tuple[int, int]
    eps: float
    kernels: KernelSet

    def __call__(self, qkv: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """[num_tokens, q's size + k's size + v's size], before and after. `sizes` are those of q
        and k.
        """
        rotated, first, second = (
            kv.rotate(qkv, self.rotary, batch).flatten(1),
            self.sizes[0],
            sum(self.sizes),
        )
        parts = (
            (rotated[:, :first], self.q),
            (rotated[:, first:second], self.k),
            (qkv[:, second:], None),
        )
        return self.kernels.join(parts, self.eps)


@dataclass(frozen=True)
class ValueFactor:
    """Values multiplied by a number (MiMo-V2).

    factors   [1, sum of `AttentionConfig.factor_groups`] in the compute dtype: 1 for the parts of q
              and k
    """

    factors: Tensor
    kernels: KernelSet

    def __call__(self, qkv: Tensor) -> Tensor:
        """[num_tokens, q's size + k's size + v's size], before and after; q and k keep their bits."""
        return self.kernels.gate(qkv, self.factors, GateFunction.IDENTITY)


@dataclass(frozen=True)
class OutputGate:
    """Factors of what attention returns, of the layer's input: one for each head, or for each
    channel of a head.
    """

    projection: Projection
    function: GateFunction
    kernels: KernelSet

    def __call__(self, x: Tensor, attended: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size], attended: [num_tokens, num_heads, v_dim] -> [num_tokens,
        num_heads * v_dim]
        """
        return self.kernels.gate(attended.flatten(1), self.projection(x), self.function)


@dataclass(frozen=True)
class Attention:
    """Grouped-query self-attention (Ainslie et al. 2023). `qkv` computes q, k and v, concatenated
    along the output.

    norm         of q and k over all their heads; norms of single heads are in `rotary`
    last         rotation of q and k with norms behind it, in layers that have these: `rotary` then
                 rotates nothing
    v_norm       of each head of v, which may be k too, or a factor of v; None: v is as it is
                 projected
    shares       whether keys and values are those of another layer, which has stored them: `qkv`
                 computes q alone
    sinks        [num_heads] float32, or None (`KernelSet.attention`)
    output_gate  of the result of each head; None: there is none
    """

    qkv: Projection
    o: Projection
    rotary: Rotary
    softmax_scale: float
    window: int | None
    soft_cap: float | None
    norm: QKNorm | None = None
    last: NormedLast | None = None
    v_norm: ValueNorm | ValueFactor | None = None
    sinks: Tensor | None = None
    shares: bool = False
    output_gate: OutputGate | None = None

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """All whose tables the layer reads."""
        return (self.rotary,) if self.last is None else (self.rotary, self.last.rotary)

    @property
    def consumer(self) -> PackedWeight | None:
        """As `Linear.consumer`."""
        return self.qkv.consumer if self.output_gate is None else None

    def __call__(self, x: Rows, batch: ForwardBatch, kv: LayerCache) -> Tensor:
        """x: [num_tokens, hidden_size], a tensor or what the norm returned for `consumer`; returns
        x's shape.
        """
        assert kv is not None, "a layer with attention has pages"
        assert not isinstance(kv, PagedState)
        qkv = self.qkv(x) if self.norm is None else self.norm(self.qkv(x))
        if self.v_norm is not None:
            qkv = self.v_norm(qkv)
        if self.last is not None:
            qkv = self.last(qkv, batch, kv)
        q = kv.rotate(qkv, self.rotary, batch) if self.shares else kv.store(qkv, self.rotary, batch)
        consumer = self.o.consumer if self.output_gate is None else None
        attended = kv.attend(
            q, batch, self.softmax_scale, self.window, self.soft_cap, self.sinks, consumer
        )
        if self.output_gate is not None:
            attended = self.output_gate(plain(x), plain(attended))
        return self.o(attended.flatten(1) if isinstance(attended, Tensor) else attended)
