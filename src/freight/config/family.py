"""Family: what the models of one model_type have in common, as data. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from freight.config.experts import MoEFamily
from freight.config.layer import NormKind, NormPlacement
from freight.operands.activation import GateFunction


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True)
class Family:
    """What the models of one model_type have in common. A `..._key` is the key of config.json that has the value.

    architecture       the only value of `architectures`
    defaults           of keys that a config.json lacks, as transformers' configuration class has them
    keys               keys that this family has and others do not
    fixed              keys that it has, with the only values that are computed; of a list, those of its entries
    lacks              keys that every other family has and this one does not
    qkv_bias           whether q, k and v have biases whatever the value of `attention_bias`
    sinks              whether each query head has a sink (`KernelSet.attention`)
    qk_norm            whether q and k are normed, head by head; qk_norm_key: has the answer, in families that differ
    qk_norm_whole      whether that norm is over all heads of q together, and of k
    gate               what weighs the result of each head; None: nothing does. gate_key says whether heads have one
                       factor each, or one for each channel; without such a key each channel has one
    v_norm             whether the values of each head are divided by their root mean square
    own_heads          whether layers without a window have a head size and KV heads of their own (`global_head_dim`,
                       `num_global_key_value_heads`), and perhaps no projection of values (`attention_k_eq_v`)
    softmax_scale      of every layer; None: one over the square root of the head size, if no key says otherwise
    norm_kind, norm_eps  of every norm; an eps of None is read from `rms_norm_eps`
    norm_offset        what is added to a stored norm weight
    wide_norms         whether norms multiply by their weight in float32, before they round; with an offset they do
    scales_embedding   whether the embedding's rows are multiplied by the square root of `hidden_size`, rounded to the
                       compute dtype; scale_key: has the answer, and the number is not rounded
    layer_scalar       whether the output of each layer is multiplied by a number that it stores
    multipliers        whether `embedding_multiplier`, `attention_multiplier`, `residual_multiplier` and
                       `logits_scaling` are read (Granite)
    mixed_windows      whether layers may differ in their window
    gated              whether the feed-forward has a gate
    activation_key     names the activation; the other one is not read
    width_key          of the values between the projections of the feed-forward
    bias_keys          whether q, k and v, the output of attention, and the feed-forward have biases; keys that the
                       family lacks mean that they have none
    position_offset    row of the learned embedding of position 0; None: positions are rotary
    theta              of rotary embedding, where config.json names none
    local_theta        the same of layers with a window, if these have a rope of their own (`rope_local_base_freq`)
    local_rope         whether layers without a window do not rotate queries and keys, in models that have a window
    rotary_factor      share of a head's channels that are rotated, where no `partial_rotary_factor` (or `rotary_dim`,
                       their number) says it; None: all
                       are, and no key may say otherwise
    proportional       whether a rope may be of type proportional, which only this family has
    interleaved        whether the rope's pairs are neighbours (`RopeConfig.interleaved`)
    bodies             what may precede the names of the decoder's tensors, and that of its head; the first is usual
    moe                what its config.json says of experts; None: it has none
    default_rope       `rope_parameters` where config.json has neither these nor `rope_scaling`; None: a plain rope
    query_scaling      whether yarn has `llama_4_scaling_beta`: queries are multiplied by a factor of their position
    sections           whether a rope may have sections for time, height and width, which text does not tell apart
    text_type          the model_type in `text_config`, where the decoder is described, if it is one part of the model
    text_key           that key, where it has another name
    flat               whether the decoder may be described by the keys outside, without a `text_config`
    other_texts        further model_types that `text_config` may have; their own rows describe the decoder then
    next_token_keys    number of layers behind the decoder's own, which predict further tokens and do not run
    float32_head_key   whether the head multiplies in float32 (`ModelConfig.float32_head`)
    wrapper_keys       keys outside of `text_config`; they describe the other parts
    """

    architecture: str
    defaults: Mapping[str, Any]
    keys: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    qkv_bias: bool = False
    sinks: bool = False
    qk_norm: bool = False
    qk_norm_key: str | None = None
    qk_norm_whole: bool = False
    gate: GateFunction | None = None
    gate_key: str | None = None
    v_norm: bool = False
    own_heads: bool = False
    softmax_scale: float | None = None
    norms: NormPlacement = NormPlacement.PRE
    norm_kind: NormKind = NormKind.RMS
    norm_eps: float | None = None
    norm_offset: float = 0.0
    wide_norms: bool = False
    scales_embedding: bool = False
    scale_key: str | None = None
    layer_scalar: bool = False
    multipliers: bool = False
    mixed_windows: bool = True
    gated: bool = True
    activation_key: str = "hidden_act"
    width_key: str = "intermediate_size"
    bias_keys: tuple[str, str, str] = ("attention_bias", "attention_bias", "mlp_bias")
    position_offset: int | None = None
    theta: float = 10000.0
    local_theta: float | None = None
    local_rope: bool = False
    rotary_factor: float | None = None
    proportional: bool = False
    interleaved: bool = False
    bodies: tuple[tuple[str, str], ...] = (("model.", ""),)
    moe: MoEFamily | None = None
    default_rope: Mapping[str, Any] | None = None
    query_scaling: bool = False
    sections: bool = False
    text_type: str | None = None
    text_key: str = "text_config"
    flat: bool = False
    other_texts: tuple[str, ...] = ()
    wrapper_keys: frozenset[str] = frozenset()
    float32_head_key: str | None = None
    next_token_keys: frozenset[str] = frozenset()
