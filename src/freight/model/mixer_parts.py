"""Parts of each kind of mixer: tensors and Linear modules, from its config alone. Imports no torch.

The shapes of tensors (`model/shapes.py`), the bytes of a loaded model (`model/sizes.py`) and the
modules that the quantizer knows (`quantizer/modules.py`) follow from these values; none of them
knows a kind. `model/mixers.py` builds the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from freight.checkpoint.headers import Shape
from freight.model.config.layer import (
    AttentionConfig,
    DeltaNetConfig,
    KimiDeltaConfig,
    LatentConfig,
    Mamba2Config,
    Mixer,
    ShortConvConfig,
)
from freight.model.config.tensor_names import TensorNames


@dataclass(frozen=True)
class Projected:
    """Linear modules that share their input and are computed together.

    modules    names within the layer; one name may have the rows of several projections
    sizes      outputs of each projection
    columns    inputs
    """

    modules: tuple[str, ...]
    sizes: tuple[int, ...]
    columns: int
    bias: bool = False

    @property
    def rows(self) -> tuple[int, ...]:
        """Outputs of each module."""
        return self.sizes if len(self.modules) > 1 else (sum(self.sizes),)


@dataclass(frozen=True)
class MixerParts:
    """The tensors and modules of a mixer. All names are relative to the layer.

    module        the mixer's module: KV scales are stored under it, and messages name it
    projections   by their field in the built mixer (`model/layers/attention.py`); these are quantized
    kept          Linear modules that stay in 16 bits -> outputs, inputs; merged, but for those
                  below
    alone         modules of `kept` with an input of their own
    cut           the module of `kept` that is split at load into the matrices of by_head
    by_head       number of matrices, outputs, inputs
    norms         the weight of an RMSNorm -> its channels
    plain         a tensor that is held in the compute dtype, whatever the matrices are -> its shape
    exact         a tensor that is held in float32 -> its shape
    made          count of float32 numbers that are made at load, not read
    factors       count of numbers in the compute dtype that are made at load
    whole         modules whose rows go head by head, regrouped at load -> rows of each part of a
                  head, inside which no block of scales may end
    """

    module: str = ""
    projections: Mapping[str, Projected] = field(default_factory=dict)
    kept: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    alone: tuple[str, ...] = ()
    cut: str = ""
    by_head: tuple[tuple[int, int, int], ...] = ()
    norms: Mapping[str, int] = field(default_factory=dict)
    plain: Mapping[str, Shape] = field(default_factory=dict)
    exact: Mapping[str, Shape] = field(default_factory=dict)
    made: int = 0
    factors: int = 0
    whole: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def mixer_parts(mixer: Mixer, hidden_size: int, names: TensorNames) -> MixerParts:
    """Return the parts of a layer's mixer; empty for a layer without one."""
    if mixer is None:
        return MixerParts()
    return _PARTS[type(mixer)](mixer, hidden_size, names)


def _attention(mixer: AttentionConfig, hidden_size: int, of_all: TensorNames) -> MixerParts:
    names = of_all.attention
    norms: dict[str, int] = {}
    qk_norm = mixer.qk_norm
    if qk_norm is not None and qk_norm.weighted:
        own = (names.q_norm,) if mixer.kv_from is not None else (names.q_norm, names.k_norm)
        norms = dict(zip(own, mixer.qk_norm_sizes, strict=False))
    made = mixer.v_dim if mixer.v_norm else 0
    if qk_norm is not None and not qk_norm.weighted:
        made += mixer.k_dim
    gate = mixer.output_gate
    kept: dict[str, tuple[int, int]] = {}
    whole: dict[str, tuple[int, ...]] = {}
    if gate is not None and gate.in_q:
        whole = {names.qkv[0]: (mixer.k_dim,)}
    elif gate is not None:
        kept = {names.output_gate: (mixer.output_gate_size, hidden_size)}
    return MixerParts(
        module=names.qkv[0].rpartition(".")[0],
        projections={
            "qkv": Projected(
                names.qkv_of(mixer), mixer.projected_sizes, hidden_size, mixer.qkv_bias
            ),
            "o": Projected((names.o,), (hidden_size,), mixer.num_heads * mixer.v_dim, mixer.o_bias),
        },
        kept=kept,
        norms=norms,
        exact={names.sinks: (mixer.num_heads,)} if mixer.sinks else {},
        made=made,
        factors=0 if mixer.v_factor is None else sum(mixer.factor_groups),
        whole=whole,
    )


def _latent(mixer: LatentConfig, hidden_size: int, of_all: TensorNames) -> MixerParts:
    names = of_all.latent
    heads = mixer.num_heads
    (of_q, first) = mixer.q_sizes
    ranked = mixer.q_rank is not None
    q_b = {"q_b": Projected((names.q_b,), (of_q,), first)} if ranked else {}
    return MixerParts(
        module=names.o.rpartition(".")[0],
        projections={
            "first": Projected(
                (names.q_a if ranked else names.q, names.kv_a), (first, mixer.k_dim), hidden_size
            ),
            **q_b,
            "o": Projected((names.o,), (hidden_size,), heads * mixer.head_size),
        },
        kept={
            names.kv_b: (heads * (mixer.nope + mixer.head_size), mixer.latent),
            **({names.output_gate: (heads, hidden_size)} if mixer.output_gate else {}),
        },
        cut=names.kv_b,
        by_head=((heads, mixer.latent, mixer.nope), (heads, mixer.head_size, mixer.latent)),
        norms={**({names.q_norm: first} if ranked else {}), names.kv_norm: mixer.latent},
    )


def _delta_net(mixer: DeltaNetConfig, hidden_size: int, of_all: TensorNames) -> MixerParts:
    names = of_all.delta_net
    values = mixer.heads * mixer.v_dim
    heads = (mixer.heads,) if len(names.ba) > 1 else (2 * mixer.heads,)
    whole = {}
    if len(names.qkvz) == 1:
        whole = {names.qkvz[0]: (mixer.k_dim, values // mixer.key_heads)}
    return MixerParts(
        module=names.out.rpartition(".")[0],
        projections={
            "qkvz": Projected(names.qkvz, (mixer.channels, values), hidden_size),
            "out": Projected((names.out,), (hidden_size,), values),
        },
        kept=dict.fromkeys(names.ba, (*heads, hidden_size)),
        whole=whole,
        exact={names.a_log: (mixer.heads,), names.dt_bias: (mixer.heads,)},
        plain={names.conv: (mixer.channels, 1, mixer.width), names.norm: (mixer.v_dim,)},
    )


def _kimi_delta(mixer: KimiDeltaConfig, hidden_size: int, of_all: TensorNames) -> MixerParts:
    names = of_all.kimi_delta
    size = mixer.size
    rank = mixer.rank
    # A full-rank gate's projection shares its input with q, k and v, and is merged with them
    gate = names.output_gate if rank is None else ()
    kept = {names.decay[0]: (rank or size, hidden_size), names.beta: (mixer.heads, hidden_size)}
    if rank is not None:
        kept |= {
            names.output_gate[0]: (rank, hidden_size),
            names.decay[1]: (size, rank),
            names.output_gate[1]: (size, rank),
        }
    first = (*names.qkv, *gate)
    return MixerParts(
        module=names.out.rpartition(".")[0],
        projections={
            "first": Projected(first, (size,) * len(first), hidden_size),
            "out": Projected((names.out,), (hidden_size,), size),
        },
        kept=kept,
        alone=() if rank is None else (names.decay[1], names.output_gate[1]),
        exact={
            names.a_log: (1, 1, mixer.heads, 1) if names.wide else (mixer.heads,),
            names.dt_bias: (size,),
        },
        plain={**dict.fromkeys(names.conv, (size, 1, mixer.width)), names.norm: (mixer.head_dim,)},
    )


def _short_conv(mixer: ShortConvConfig, hidden_size: int, of_all: TensorNames) -> MixerParts:
    names = of_all.short_conv
    channels = mixer.channels
    bias = {f"{names.conv}.bias": (channels,)} if mixer.bias else {}
    return MixerParts(
        module=names.in_proj.rpartition(".")[0],
        projections={
            "in_proj": Projected((names.in_proj,), (3 * channels,), hidden_size, mixer.bias),
            "out_proj": Projected((names.out_proj,), (hidden_size,), channels, mixer.bias),
        },
        plain={f"{names.conv}.weight": (channels, 1, mixer.width), **bias},
    )


def _mamba2(mixer: Mamba2Config, hidden_size: int, of_all: TensorNames) -> MixerParts:
    names = of_all.mamba
    values = mixer.heads * mixer.head_dim
    heads = (mixer.heads,)
    bias = {f"{names.conv}.bias": (mixer.channels,)} if mixer.conv_bias else {}
    return MixerParts(
        module=names.out.rpartition(".")[0],
        projections={
            "in_proj": Projected(
                (names.in_proj,), (values + mixer.channels + mixer.heads,), hidden_size, mixer.bias
            ),
            "out": Projected((names.out,), (hidden_size,), values, mixer.bias),
        },
        exact=dict.fromkeys((names.a_log, names.skip, names.dt_bias), heads),
        plain={
            f"{names.conv}.weight": (mixer.channels, 1, mixer.width),
            **bias,
            names.norm: (values,),
        },
    )


_PARTS: Mapping[type, Callable[[Any, int, TensorNames], MixerParts]] = {
    AttentionConfig: _attention,
    LatentConfig: _latent,
    DeltaNetConfig: _delta_net,
    KimiDeltaConfig: _kimi_delta,
    ShortConvConfig: _short_conv,
    Mamba2Config: _mamba2,
}
