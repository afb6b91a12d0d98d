"""Family: what the models of one model_type have in common, as data. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from freight.config.experts import MoEFamily
from freight.config.layer import NormKind, NormPlacement


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True)
class Family:
    """What the models of one model_type have in common. A `..._key` is the key of config.json that has the value.

    architecture       the only value of `architectures`
    defaults           of keys that a config.json lacks, as transformers' configuration class has them
    keys               keys that this family has and others do not
    constants          keys with the one value that is implemented
    lacks              keys that every other family has and this one does not
    qkv_bias           whether q, k and v have biases whatever the value of `attention_bias`
    sinks              whether each query head has a sink (`KernelSet.attention`)
    norm_kind, norm_eps  of every norm; an eps of None is read from `rms_norm_eps`
    norm_offset        what is added to a stored norm weight
    wide_norms         whether norms multiply by their weight in float32, before they round; with an offset they do
    scales_embedding   whether the embedding's rows are multiplied by the square root of `hidden_size`
    mixed_windows      whether layers may differ in their window
    gated              whether the feed-forward has a gate
    activation_key     names the activation; the other one is not read
    width_key          of the values between the projections of the feed-forward
    bias_keys          whether q, k and v, the output of attention, and the feed-forward have biases; keys that the
                       family lacks mean that they have none
    position_offset    row of the learned embedding of position 0; None: positions are rotary
    theta              of rotary embedding, where config.json names none
    rope               `rope_parameters`, where config.json has none in either spelling
    local_theta        the same of layers with a window, if these have a rope of their own (`rope_local_base_freq`)
    partial_rotary     whether `partial_rotary_factor` may leave channels unrotated
    bodies             what may precede the names of the decoder's tensors, and that of its head; the first is usual
    moe                what its config.json says of experts; None: it has none
    text_type          the model_type in `text_config`, where the decoder is described, if it is one part of the model
    wrapper_keys       keys outside of `text_config`; they describe the other parts
    """

    architecture: str
    defaults: Mapping[str, Any]
    keys: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    constants: Mapping[str, float] = field(default_factory=dict)
    qkv_bias: bool = False
    sinks: bool = False
    qk_norm: bool = False
    norms: NormPlacement = NormPlacement.PRE
    norm_kind: NormKind = NormKind.RMS
    norm_eps: float | None = None
    norm_offset: float = 0.0
    wide_norms: bool = False
    scales_embedding: bool = False
    mixed_windows: bool = True
    gated: bool = True
    activation_key: str = "hidden_act"
    width_key: str = "intermediate_size"
    bias_keys: tuple[str, str, str] = ("attention_bias", "attention_bias", "mlp_bias")
    position_offset: int | None = None
    theta: float = 10000.0
    rope: Mapping[str, Any] = field(default_factory=dict)
    local_theta: float | None = None
    partial_rotary: bool = False
    bodies: tuple[tuple[str, str], ...] = (("model.", ""),)
    moe: MoEFamily | None = None
    text_type: str | None = None
    wrapper_keys: frozenset[str] = frozenset()
