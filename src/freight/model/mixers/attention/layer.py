"""Attention of one layer: project; norm, rotate and store; attend; project back.

The keys and values of this step are stored first and read back from the pages, so that attention
reads the same bits for a token of this step as for an earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freight.cache.pool import LayerKV
from freight.kernels.interface import KernelSet
from freight.model.building import Builder, Ropes
from freight.model.layers.linear import (
    AdaptedLinear,
    GatheredLinear,
    Linear,
    Projection,
    UnmergedLinear,
)
from freight.model.layers.rope import half_pairs, places
from freight.model.mixers.attention.spec import (
    AttentionConfig,
    AttentionNames,
    NormPlace,
    QKNormConfig,
)
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

    def __call__(self, x: Tensor, attended: Tensor, adapters: Tensor | None) -> Tensor:
        """Return the gated result, [num_tokens, num_heads * v_dim].

        x: [num_tokens, hidden_size]; attended: [num_tokens, num_heads, v_dim]; adapters: as in
        `ForwardBatch`
        """
        return self.kernels.gate(attended.flatten(1), self.projection(x, adapters), self.function)


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
        adapters = batch.adapters
        qkv = self.qkv(x, adapters)
        if self.norm is not None:
            qkv = self.norm(qkv)
        if self.v_transform is not None:
            qkv = self.v_transform(qkv)
        if self.last is not None:
            qkv = self.last(qkv, batch, kv)
        q = kv.rotate(qkv, self.rotary, batch) if self.shares else kv.store(qkv, self.rotary, batch)
        consumer = self.o.consumer if self.output_gate is None else None
        attended = kv.attend(q, batch, self.call, consumer)
        if self.output_gate is not None:
            attended = self.output_gate(as_tensor(x), as_tensor(attended), adapters)
        if isinstance(attended, Tensor):
            attended = attended.flatten(1)
        return self.o(attended, adapters)


def build(mixer: AttentionConfig, builder: Builder, prefix: str, ropes: Ropes) -> Attention:
    """Build the mixer of the layer whose tensors begin with `prefix`."""
    names = builder.names.of(AttentionNames)
    eps = builder.config.norm_eps
    kernels = builder.kernels
    rotary = replace(ropes[mixer.rope], eps=eps)
    last = None
    norm = None
    if mixer.qk_norm is not None:
        weights = _qk_norms(mixer, mixer.qk_norm, builder, prefix, rotary.cos.device)
        if mixer.qk_norm.place is NormPlace.AFTER_ROPE:
            assert mixer.k_dim == mixer.v_dim
            assert mixer.kv_from is None
            last = NormedLast(rotary, *weights, mixer.qkv_sizes[:2], eps, kernels)
            rotary = ropes[None]
        elif mixer.norms_all_heads:
            norm = _norm_of_all_heads(weights, builder)
        else:
            rotary = replace(rotary, norms=weights)
    qkv = builder.linear(prefix, *names.qkv_of(mixer), rows=_qkv_rows(mixer, builder))
    if mixer.qk_norm is None and mixer.kv_from is None:
        rotary = replace(rotary, key_bias=_key_bias(qkv, mixer))
    v_transform: ValueNorm | ValueFactor | None
    if mixer.v_norm:
        v_transform = _value_norm(mixer, builder, rotary)
    else:
        v_transform = _value_factor(mixer, builder, prefix)
    sinks = builder.tensor(prefix + names.sinks).float() if mixer.sinks else None
    return Attention(
        qkv=qkv,
        o=builder.gathered(prefix, names.o),
        rotary=rotary,
        call=AttentionCall(
            mixer.softmax_scale,
            mixer.window,
            mixer.soft_cap,
            sinks,
            causal=not builder.config.attends_both_ways,
            group=mixer.group,
        ),
        shares=mixer.kv_from is not None,
        output_gate=_output_gate(mixer, builder, prefix),
        last=last,
        norm=norm,
        v_transform=v_transform,
    )


def _key_bias(qkv: Projection, mixer: AttentionConfig) -> Tensor | None:
    """Return the bias of the keys, [num_kv_heads, k_dim], a part of the projection's; None where
    there is none.
    """
    linear = qkv.linear if isinstance(qkv, AdaptedLinear | GatheredLinear) else qkv
    assert isinstance(linear, Linear | UnmergedLinear), "only o is gathered"
    parts = linear.parts if isinstance(linear, UnmergedLinear) else (linear,)
    begin, size, _ = mixer.qkv_sizes
    for part in parts:
        if part.bias is None:  # a model has a bias for all three, or for none
            return None
        if begin + size <= len(part.bias):
            return part.bias[begin : begin + size].view(mixer.num_kv_heads, mixer.k_dim)
        begin -= len(part.bias)
    raise AssertionError("no part has all keys")


def _norm_of_all_heads(weights: tuple[Tensor, Tensor], builder: Builder) -> QKNorm | GatheredQKNorm:
    """Build the norm over all heads of q, and of k, from its weights."""
    eps = builder.config.norm_eps
    share = builder.share
    if share is None:
        return QKNorm(*weights, eps, builder.kernels)
    return GatheredQKNorm(*weights, eps, share.rank, share.size, builder.kernels)


def _qk_norms(
    mixer: AttentionConfig, norm: QKNormConfig, builder: Builder, prefix: str, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the weights of the norms of q and k.

    A layer that reads another layer's keys has no weight for k; q's is returned in its place and
    never used.
    """
    if not norm.weighted:
        ones = torch.ones(mixer.k_dim, dtype=torch.float32, device=device)
        return ones, ones
    q = builder.norm_weight(prefix + builder.names.of(AttentionNames).q_norm)
    if mixer.kv_from is not None:
        return q, q
    return q, builder.norm_weight(prefix + builder.names.of(AttentionNames).k_norm)


def _output_gate(mixer: AttentionConfig, builder: Builder, prefix: str) -> OutputGate | None:
    gate = mixer.output_gate
    names = builder.names.of(AttentionNames)
    if gate is None:
        return None
    projection: Projection | None
    if gate.in_q:
        projection = builder.linear(prefix, names.qkv[0], rows=(_of_heads(mixer, 1),))
    else:
        projection = builder.gate(prefix + names.output_gate)
    if projection is None:
        return None
    return OutputGate(projection, gate.function, builder.kernels)


def _of_heads(mixer: AttentionConfig, part: int) -> Tensor:
    """Return the rows of q (part 0) or of its gate (part 1), where each head has its q rows, then
    its gate rows.
    """
    rows = places(2 * mixer.num_heads * mixer.k_dim)
    return rows.view(mixer.num_heads, 2, mixer.k_dim)[:, part].flatten()


def _value_factor(mixer: AttentionConfig, builder: Builder, prefix: str) -> ValueFactor | None:
    if mixer.v_factor is None:
        return None
    of_qk, of_v = mixer.factor_groups
    # Any tensor of the layer: it gives the compute dtype and the device
    like = builder.tensor(prefix + builder.names.attention_norm)
    return ValueFactor(like.new_tensor([[1.0] * of_qk + [mixer.v_factor] * of_v]), builder.kernels)


def _value_norm(mixer: AttentionConfig, builder: Builder, rotary: Rotary) -> ValueNorm:
    assert mixer.v_factor is None, "the norm would cancel the factor"
    ones = torch.ones(mixer.v_dim, dtype=torch.float32, device=rotary.cos.device)
    return ValueNorm(
        ones, mixer.qkv_sizes[2], mixer.k_eq_v, builder.config.norm_eps, builder.kernels
    )


def _qkv_rows(mixer: AttentionConfig, builder: Builder) -> tuple[Tensor | None, ...]:
    """Return the order of the rows of each matrix that stores q, k and v; None keeps the order
    (`RopeConfig`).
    """
    if mixer.output_gate is not None and mixer.output_gate.in_q:
        assert mixer.rope is None or not builder.config.ropes[mixer.rope].interleaved
        return (_of_heads(mixer, 0), None, None)
    if mixer.rope is None or not builder.config.ropes[mixer.rope].interleaved:
        return ()
    assert mixer.qk_norm is None, "the weights of these norms would need the same order"
    rotary_dim = builder.config.ropes[mixer.rope].rotary_dim
    q = half_pairs(mixer.num_heads, mixer.k_dim, rotary_dim)
    k = half_pairs(mixer.num_kv_heads, mixer.k_dim, rotary_dim)
    if len(builder.names.of(AttentionNames).qkv) > 1:
        return q, k, None
    v = places(sum(mixer.qkv_sizes))[len(q) + len(k) :]
    return (torch.cat((q, k + len(q), v)),)
