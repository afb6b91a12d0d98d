"""Mixers of layers, from their configs: one build function per kind, so the loader knows none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from freight.model.building import Builder
from freight.model.config.layer import (
    AttentionConfig,
    DeltaNetConfig,
    KimiDeltaConfig,
    LatentConfig,
    Mamba2Config,
    NormPlace,
    QKNormConfig,
    ShortConvConfig,
)
from freight.model.config.layer import Mixer as MixerConfig
from freight.model.decoder import AnyMixer
from freight.model.layers.attention import (
    Attention,
    GatheredQKNorm,
    NormedLast,
    OutputGate,
    QKNorm,
    ValueFactor,
    ValueNorm,
)
from freight.model.layers.delta_net import DeltaNet
from freight.model.layers.kimi_delta import KimiDelta
from freight.model.layers.latent import Latent
from freight.model.layers.linear import Projection
from freight.model.layers.mamba import Mamba2
from freight.model.layers.rope import half_pairs, places
from freight.model.layers.short_conv import ShortConv
from freight.operands.activation import GateFunction
from freight.operands.attention import AttentionCall
from freight.operands.recurrence import (
    Convolution,
    DecayParameters,
    GatedNorm,
    RecurrenceRule,
)
from freight.operands.rotary import Rotary
from freight.operands.weight import Weight

Ropes = Mapping[int | None, Rotary]  # by `AttentionConfig.rope`


def build_mixer(mixer: MixerConfig, builder: Builder, prefix: str, ropes: Ropes) -> AnyMixer | None:
    """Build the mixer of the layer whose tensors begin with `prefix`; None for a layer without one."""
    if mixer is None:
        return None
    return _BUILDERS[type(mixer)](mixer, builder, prefix, ropes)


def _attention(mixer: AttentionConfig, builder: Builder, prefix: str, ropes: Ropes) -> Attention:
    names = builder.names.attention
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
    v_transform: ValueNorm | ValueFactor | None
    if mixer.v_norm:
        v_transform = _value_norm(mixer, builder, rotary)
    else:
        v_transform = _value_factor(mixer, builder, prefix)
    sinks = builder.tensor(prefix + names.sinks).float() if mixer.sinks else None
    return Attention(
        qkv=builder.linear(prefix, *names.qkv_of(mixer), rows=_qkv_rows(mixer, builder)),
        o=builder.gathered(prefix, names.o),
        rotary=rotary,
        call=AttentionCall(mixer.softmax_scale, mixer.window, mixer.soft_cap, sinks),
        shares=mixer.kv_from is not None,
        output_gate=_output_gate(mixer, builder, prefix),
        last=last,
        norm=norm,
        v_transform=v_transform,
    )


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
    q = builder.norm_weight(prefix + builder.names.attention.q_norm)
    if mixer.kv_from is not None:
        return q, q
    return q, builder.norm_weight(prefix + builder.names.attention.k_norm)


def _output_gate(mixer: AttentionConfig, builder: Builder, prefix: str) -> OutputGate | None:
    gate = mixer.output_gate
    names = builder.names.attention
    if gate is None:
        return None
    projection: Projection | None
    if gate.in_q:
        projection = builder.linear(prefix, names.qkv[0], rows=(_of_heads(mixer, 1),))
    else:
        projection = builder.outer(prefix + names.output_gate)
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
    if len(builder.names.attention.qkv) > 1:
        return q, k, None
    v = places(sum(mixer.qkv_sizes))[len(q) + len(k) :]
    return (torch.cat((q, k + len(q), v)),)


def _latent(mixer: LatentConfig, builder: Builder, prefix: str, ropes: Ropes) -> Latent:
    names = builder.names.latent
    kernels = builder.kernels
    interleaved = mixer.rope is not None and builder.config.ropes[mixer.rope].interleaved
    of_q = _rotated_last(mixer.num_heads, mixer.nope, mixer.rotated, interleaved)
    of_kv = _rotated_last(1, mixer.latent, mixer.rotated, interleaved)
    ranked = mixer.q_rank is not None
    first = {names.q_a: None, names.kv_a: of_kv} if ranked else {names.q: of_q, names.kv_a: of_kv}
    kv_b = builder.tensor(f"{prefix}{names.kv_b}.weight")
    heads = kv_b.view(mixer.num_heads, mixer.nope + mixer.head_size, mixer.latent)
    gate = builder.outer(prefix + names.output_gate) if mixer.output_gate else None
    return Latent(
        first=builder.linear(prefix, *first, rows=tuple(first.values())),
        q_norm=builder.norm_weight(prefix + names.q_norm) if ranked else None,
        q_b=builder.linear(prefix, names.q_b, rows=(of_q,)) if ranked else None,
        kv_norm=builder.norm_weight(prefix + names.kv_norm),
        keys=kernels.pack_experts([Weight(head[: mixer.nope].t().contiguous()) for head in heads]),
        values=kernels.pack_experts([Weight(head[mixer.nope :].contiguous()) for head in heads]),
        o=builder.gathered(prefix, names.o),
        rotary=ropes[mixer.rope],
        num_heads=mixer.num_heads,
        nope=mixer.nope,
        call=AttentionCall(mixer.softmax_scale),
        eps=mixer.eps,
        shared=mixer.rotated,
        output_gate=None if gate is None else OutputGate(gate, GateFunction.SIGMOID, kernels),
        kernels=kernels,
    )


def _rotated_last(num_heads: int, plain: int, rotated: int, interleaved: bool) -> Tensor | None:
    """Return the order of the rows of heads whose last `rotated` channels have a rope; None keeps
    the order (`RopeConfig`).
    """
    if not interleaved:
        return None
    head = torch.cat(
        (
            places(plain),
            plain + half_pairs(1, rotated, rotated),
        )
    )
    return (places(num_heads)[:, None] * len(head) + head).flatten()


def _delta_net(mixer: DeltaNetConfig, builder: Builder, prefix: str, ropes: Ropes) -> DeltaNet:
    names = builder.names.delta_net
    heads = mixer.heads // mixer.key_heads  # value heads of a key head
    keys = mixer.k_dim
    values = heads * mixer.v_dim
    of_qkvz = (
        None if len(names.qkvz) > 1 else _side_by_side(mixer.key_heads, keys, keys, values, values)
    )
    of_ba = None if len(names.ba) > 1 else _side_by_side(mixer.key_heads, heads, heads)
    norm = builder.tensor(prefix + names.norm)
    return DeltaNet(
        qkvz=builder.linear(prefix, *names.qkvz, rows=(of_qkvz,)),
        ba=builder.kept([prefix + name for name in names.ba], of_ba),
        conv=Convolution(builder.tensor(prefix + names.conv).flatten(1), None, silu=True),
        decays=DecayParameters(
            builder.exact(prefix + names.a_log), builder.exact(prefix + names.dt_bias)
        ),
        norm=GatedNorm(norm, builder.config.norm_eps, group=len(norm), norm_first=True),
        out=builder.gathered(prefix, names.out),
        sizes=(mixer.key_heads * mixer.k_dim, mixer.channels),
        kernels=builder.kernels,
    )


def _kimi_delta(mixer: KimiDeltaConfig, builder: Builder, prefix: str, ropes: Ropes) -> KimiDelta:
    names = builder.names.kimi_delta
    two = mixer.rank is not None
    gates = (names.decay[0], names.beta, *((names.output_gate[0],) if two else ()))
    conv = torch.cat([builder.tensor(prefix + name).flatten(1) for name in names.conv])
    return KimiDelta(
        first=builder.linear(prefix, *names.qkv, *(() if two else names.output_gate)),
        gates=builder.kept([prefix + name for name in gates]),
        decay=builder.kept([prefix + names.decay[1]]) if two else None,
        output_gate=builder.kept([prefix + names.output_gate[1]]) if two else None,
        conv=Convolution(conv, None, silu=True),
        decays=DecayParameters(
            builder.exact(prefix + names.a_log).flatten(),
            builder.exact(prefix + names.dt_bias),
            bound=mixer.bound,
        ),
        norm=builder.tensor(prefix + names.norm),
        out=builder.gathered(prefix, names.out),
        eps=builder.config.norm_eps,
        kernels=builder.kernels,
    )


def _short_conv(mixer: ShortConvConfig, builder: Builder, prefix: str, ropes: Ropes) -> ShortConv:
    names = builder.names.short_conv
    return ShortConv(
        in_proj=builder.linear(prefix, names.in_proj),
        conv=_convolution(builder, prefix + names.conv, bias=mixer.bias, silu=False),
        out_proj=builder.gathered(prefix, names.out_proj),
        kernels=builder.kernels,
    )


def _convolution(builder: Builder, name: str, bias: bool, silu: bool) -> Convolution:
    """Build the convolution `name`."""
    return Convolution(
        builder.tensor(f"{name}.weight").flatten(1),
        builder.tensor(f"{name}.bias") if bias else None,
        silu,
    )


def _mamba2(mixer: Mamba2Config, builder: Builder, prefix: str, ropes: Ropes) -> Mamba2:
    names = builder.names.mamba
    norm = builder.tensor(prefix + names.norm)
    gathers = len(norm) > mixer.heads * mixer.head_dim  # it has the channels of all ranks
    return Mamba2(
        in_proj=builder.linear(prefix, names.in_proj),
        conv=_convolution(builder, prefix + names.conv, bias=mixer.conv_bias, silu=True),
        decays=DecayParameters(
            builder.exact(prefix + names.a_log),
            builder.exact(prefix + names.dt_bias),
            mixer.limits,
        ),
        rule=RecurrenceRule(delta=False, norm=False, skip=builder.exact(prefix + names.skip)),
        norm=GatedNorm(
            norm, builder.config.norm_eps, len(norm) // mixer.norm_groups, norm_first=False
        ),
        gathers=gathers,
        out=builder.gathered(prefix, names.out, inputs=not gathers),
        keys=mixer.groups * mixer.state_size,
        kernels=builder.kernels,
    )


def _side_by_side(groups: int, *sizes: int) -> Tensor:
    """Return the order of rows that turns `groups` groups of parts of `sizes` into parts that span
    all groups.
    """
    rows = places(groups * sum(sizes)).view(groups, -1)
    return torch.cat([part.flatten() for part in rows.split(sizes, 1)])


_BUILDERS: Mapping[type, Callable[[Any, Builder, str, Ropes], AnyMixer]] = {
    AttentionConfig: _attention,
    LatentConfig: _latent,
    DeltaNetConfig: _delta_net,
    KimiDeltaConfig: _kimi_delta,
    ShortConvConfig: _short_conv,
    Mamba2Config: _mamba2,
}
