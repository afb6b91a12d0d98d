"""Family: the properties shared by the models of one model_type, as data. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from freight.base.fields import JsonObject
from freight.model.config.layer import NormPlacement
from freight.model.config.model import ModelConfig
from freight.model.config.moe import MoEFamily
from freight.model.config.tensor_names import TensorNames
from freight.model.mixers.attention.spec import QKNormConfig


def words(text: str) -> frozenset[str]:
    """Return the words of a text, separated by white space."""
    return frozenset(text.split())


WINDOW_KEYS = words("sliding_window use_sliding_window layer_types")
# `Family.bodies` of a text model that comes with a vision model
LANGUAGE_MODEL = (("model.language_model.", ""), ("language_model.model.", "language_model."))
# `Family.bias_keys` where there are such keys
ATTENTION_BIAS = ("attention_bias", "attention_bias", "mlp_bias")


class RopeForm(StrEnum):
    """A rope feature that only some families may have."""

    PROPORTIONAL = "proportional"  # `RopeConfig.kind` proportional
    # `llama_4_scaling_beta` of yarn: queries are multiplied by a factor of position
    QUERY_SCALING = "query scaling"
    # for time, height and width (M-RoPE): a text token has one position in all of them
    SECTIONS = "sections"


M_ROPE = frozenset({RopeForm.SECTIONS})  # `Family.ropes` of models with pictures


@dataclass(frozen=True)
class PredictingForm:
    """How a family's checkpoints store layers that predict further tokens: each joins the norms of a
    token's embedding and of the states before it, projects them to the hidden size, and has a decoder
    layer and a norm (DeepSeek-V3, section 2.2, arXiv:2412.19437). Embedding and head are the model's.

    layer            prefix of the tensors of layer `{}`, after that of the model's body or `outside`
    follows          whether these layers are numbered after the model's; else from 0
    outside          prefix of all of them, outside the model's body, where the layers share the four
                     modules below; None: each layer has its own
    embedding_norm, features_norm, projection, norm
                     modules, after the prefix of their layer or `outside`
    features_first   whether the projection's first columns are of the states; else of the embedding
    masks_first      whether the embedding is 0 in the row of position 0
    copies           modules of a layer that repeat the model's embedding and head, and are not read
    """

    layer: str
    embedding_norm: str
    features_norm: str
    projection: str
    norm: str
    follows: bool = False
    outside: str | None = None
    features_first: bool = False
    masks_first: bool = False
    copies: tuple[str, ...] = ()


# github.com/vllm-project/vllm, vllm/model_executor/models/deepseek_mtp.py (055e47c) and glm4_moe_mtp.py
# (028aedf); github.com/sgl-project/sglang, python/sglang/srt/models/deepseek_nextn.py (0114f9c) and
# glm4_moe_nextn.py (008b79d), which use the model's embedding and head, and do not mask
NEXTN = PredictingForm(
    "layers.{}.",
    "enorm",
    "hnorm",
    "eh_proj",
    "shared_head.norm",
    follows=True,
    masks_first=True,
    copies=("embed_tokens", "shared_head.head"),
)

Translate: TypeAlias = Callable[[JsonObject], JsonObject]
Derive: TypeAlias = Callable[[JsonObject, ModelConfig], ModelConfig]


@dataclass(frozen=True)
class Family:
    """The properties shared by the models of one model_type. A `..._key` is the key of config.json
    that holds the value.

    architecture       the only value of `architectures`, apart from its other names, `same`
    tensors            names of its tensors
    defaults           values of keys that a config.json lacks, from transformers' configuration
                       class
    keys               keys that this family has and others do not
    fixed              keys that it has, with the only values that are implemented; for a list,
                       those of its entries
    synonyms           further names of keys that this family has
    lacks              keys that every other family has and this one does not
    qkv_bias           whether q, k and v have biases whatever the value of `attention_bias`
    bias_keys          keys that give biases to q, k and v, to the output of attention, and to the
                       feed-forward; "": none
    qk_norm            norm of q and k; None: there is none
    norms              placement of the norms in a layer
    wide_norms         whether norms multiply by their weight in float32, before they round
    scales_embedding   whether the embedding's rows are multiplied by the square root of
                       `hidden_size`, rounded to the compute dtype
    mixed_windows      whether layers may differ in their window
    other_layers       kinds in `layer_types` whose mixer is not plain attention: `derive` sets it
    gated              whether the feed-forward has a gate
    activation_key     key of the activation. The other spelling must not contradict it
    theta              base of rotary embedding, if config.json names none
    local_theta        the same for layers with a window, if these have a separate rope
                       (`rope_local_base_freq`)
    rotary_factor      share of a head's channels that are rotated, without a
                       `partial_rotary_factor`; None: all channels are, and no key may differ
    interleaved        whether the rope rotates adjacent channels (`RopeConfig.interleaved`)
    ropes              rope features that this family may have
    bodies             possible prefixes of the decoder's tensors and of its head; the first is the
                       default
    moe                description of its experts in a config.json; None: it has none
    text_type          the model_type in `text_config`, if the decoder is one part of the model and
                       described there
    text_key           the name of that key
    flat               whether the outer keys may describe the decoder, without a `text_config`
    other_texts        further model_types of `text_config`; their rows then describe the decoder
    wrapper_keys       keys outside of `text_config` that describe the other parts
    next_token_keys    keys for the number of layers after the decoder's that predict further
                       tokens; the model runs without them
    predicting         the form of these layers; None: they are not read
    translate          maps the keys of this family to those that the common parser reads; None:
                       they are the same
    derive             adapts the ModelConfig of the common parser where this family differs; ropes
                       are parsed afterwards, for the returned layers. None: no change
    """

    architecture: str
    defaults: JsonObject
    same: tuple[str, ...] = field(default=(), kw_only=True)
    keys: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    synonyms: Mapping[str, str] = field(default_factory=dict)
    qkv_bias: bool = False
    qk_norm: QKNormConfig | None = None
    norms: NormPlacement = NormPlacement.PRE
    wide_norms: bool = False
    scales_embedding: bool = False
    mixed_windows: bool = True
    other_layers: tuple[str, ...] = ()
    gated: bool = True
    activation_key: str = "hidden_act"
    bias_keys: tuple[str, str, str] = ("", "", "mlp_bias")
    theta: float = 10000.0
    local_theta: float | None = None
    rotary_factor: float | None = None
    interleaved: bool = False
    ropes: frozenset[RopeForm] = frozenset()
    bodies: tuple[tuple[str, str], ...] = (("model.", ""),)
    moe: MoEFamily | None = None
    text_type: str | None = None
    text_key: str = "text_config"
    flat: bool = False
    other_texts: tuple[str, ...] = ()
    wrapper_keys: frozenset[str] = frozenset()
    next_token_keys: frozenset[str] = frozenset()
    predicting: PredictingForm | None = None
    tensors: TensorNames = field(default_factory=TensorNames)
    translate: Translate | None = None
    derive: Derive | None = None
