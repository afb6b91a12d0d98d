"""Attention of one layer: project; norm, rotate and store; attend; project back.

The keys and values of this step are stored first and read back from the pages, so that attention
reads the same bits for a token of this step as for an earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freight.cache.pool import LayerKV
from freight.kernels.interface import KernelSet
from freight.model.layers.linear import Projection
from freight.operands.activation import GateFunction
from freight.operands.attention import AttentionCall
from freight.operands.batch import ForwardBatch
from freight.operands.packed import PackedWeight, Rows, as_tensor
from freight.operands.rotary import Rotary


@dataclass(frozen=True)
class QKNorm:
    """RMSNorm over all heads of q together, and over those of k (OLMo 2, MiniMax-M2)."""

    q: Tensor
    k: Tensor
    eps: float
    kernels: KernelSet

    def __call__(self, qkv: Tensor) -> Tensor:
        """Norm q and k of `qkv`, [num_tokens, q's size + k's size + v's size]."""
        first = len(self.q)
        second = len(self.q) + len(self.k)
        parts = ((qkv[:, :first], self.q), (qkv[:, first:second], self.k), (qkv[:, second:], None))
        return self.kernels.join(parts, self.eps)


@dataclass(frozen=True)
class GatheredQKNorm:
    """`QKNorm` where each rank has some heads: all are gathered and normed, and its own are kept.

    q, k         weights of all heads
    rank, size   this rank, and how many there are
    """

    q: Tensor
    k: Tensor
    eps: float
    rank: int
    size: int
    kernels: KernelSet

    def __call__(self, qkv: Tensor) -> Tensor:
        """Norm this rank's q and k of `qkv`, [num_tokens, q's size + k's size + v's size]."""
        first = len(self.q) // self.size
        second = first + len(self.k) // self.size
        q = self._normed(qkv[:, :first], self.q)
        k = self._normed(qkv[:, first:second], self.k)
        return self.kernels.join(((q, None), (k, None), (qkv[:, second:], None)))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """Norm x [num_tokens, size], columns of a larger tensor, together with those of others."""
        gathered = self.kernels.gather(self.kernels.join(((x, None),)))
        normed = self.kernels.join(((gathered, weight),), self.eps)
        begin = self.rank * x.shape[1]
        return normed[:, begin : begin + x.shape[1]]


@dataclass(frozen=True)
class ValueNorm:
    """RMSNorm, without a weight, of the values of each head (Gemma 4).

    ones     [v_dim] float32: stands for the weight that this RMSNorm does not have
    size     channels of all heads of v
    k_eq_v   True if v is the projected k, and has no projection
    """

    ones: Tensor
    size: int
    k_eq_v: bool
    eps: float
    kernels: KernelSet

    def __call__(self, qkv: Tensor) -> Tensor:
        """Return [num_tokens, q's size + k's size + v's size], v normed.

        `qkv` has the same columns, or with `k_eq_v` only those of q and k.
        """
        unnormed = qkv if self.k_eq_v else qkv[:, : -self.size]
        return self.kernels.join(((unnormed, None), (qkv[:, -self.size :], self.ones)), self.eps)


@dataclass(frozen=True)
class NormedLast:
    """Rotary embedding of queries and keys, followed by RMSNorm of each head of both (Hunyuan).

    It uses operations that every kernel set has: all heads are rotated as queries, without being
    stored; the layer then stores the normed result with an empty rotation. v has to pass through
    the rotation as heads of the same size, so k_dim is v_dim; the rotated v is discarded.
    """

    rotary: Rotary
    q: Tensor
    k: Tensor
    sizes: tuple[int, int]
    eps: float
    kernels: KernelSet

    def __call__(self, qkv: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """Rotate and norm q and k of `qkv`, [num_tokens, q's size + k's size + v's size].

        `sizes` are the channels of q and of k.
        """
        rotated = kv.rotate(qkv, self.rotary, batch).flatten(1)
        first = self.sizes[0]
        second = sum(self.sizes)
        parts = (
            (rotated[:, :first], self.q),
            (rotated[:, first:second], self.k),
            (qkv[:, second:], None),
        )
        return self.kernels.join(parts, self.eps)


@dataclass(frozen=True)
class ValueFactor:
    """A number that multiplies the values (MiMo-V2).

    factors   [1, sum of `AttentionConfig.factor_groups`] in the compute dtype: 1 for the parts of q
              and k
    """

    factors: Tensor
    kernels: KernelSet

    def __call__(self, qkv: Tensor) -> Tensor:
        """Scale v in `qkv`, [num_tokens, q's size + k's size + v's size]; q and k do not change."""
        return self.kernels.gate(qkv, self.factors, GateFunction.IDENTITY)


@dataclass(frozen=True)
class OutputGate:
    """Factors of the result of attention, projected from the layer's input.

    One for each head, or one for each channel of each head.
    """

    projection: Projection
    function: GateFunction
    kernels: KernelSet

    def __call__(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the gated result, [num_tokens, num_heads * v_dim].

        x: [num_tokens, hidden_size]; attended: [num_tokens, num_heads, v_dim]
        """
        return self.kernels.gate(attended.flatten(1), self.projection(x), self.function)


@dataclass(frozen=True)
class Attention:
    """Grouped-query self-attention (Ainslie et al. 2023).

    qkv          computes q, k and v, concatenated along the output
    norm         norm of q and k over all their heads; norms of single heads are in `rotary`
    last         rotation of q and k followed by norms; `rotary` then rotates nothing
    v_transform  norm of each head of v, which may be k, or a factor of v; None: v is used as
                 projected
    shares       True if another layer has stored the keys and values: `qkv` computes only q
    output_gate  gate of the result of each head, or None
    """

    qkv: Projection
    o: Projection
    rotary: Rotary
    call: AttentionCall
    norm: QKNorm | GatheredQKNorm | None = None
    last: NormedLast | None = None
    v_transform: ValueNorm | ValueFactor | None = None
    shares: bool = False
    output_gate: OutputGate | None = None

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """Return every `Rotary` whose tables the layer reads."""
        return (self.rotary,) if self.last is None else (self.rotary, self.last.rotary)

    @property
    def consumer(self) -> PackedWeight | None:
        """Return the `consumer` of the layer's input (`Linear.consumer`)."""
        return self.qkv.consumer if self.output_gate is None else None

    def __call__(self, x: Rows, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """Compute attention of this step's tokens, [num_tokens, hidden_size].

        x: [num_tokens, hidden_size], a tensor or the norm's result for `consumer`
        """
        qkv = self.qkv(x) if self.norm is None else self.norm(self.qkv(x))
        if self.v_transform is not None:
            qkv = self.v_transform(qkv)
        if self.last is not None:
            qkv = self.last(qkv, batch, kv)
        q = kv.rotate(qkv, self.rotary, batch) if self.shares else kv.store(qkv, self.rotary, batch)
        consumer = self.o.consumer if self.output_gate is None else None
        attended = kv.attend(q, batch, self.call, consumer)
        if self.output_gate is not None:
            attended = self.output_gate(as_tensor(x), as_tensor(attended))
        return self.o(attended.flatten(1) if isinstance(attended, Tensor) else attended)
