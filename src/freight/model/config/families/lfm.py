"""LFM2 and LFM2.5 of Liquid AI: short convolutions, attention in some layers. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from freight.base.fields import JsonObject, flag, integer, number
from freight.errors import CheckpointError
from freight.model.config.deriving import conv_width, with_layers
from freight.model.config.family import LANGUAGE_MODEL, Family, words
from freight.model.config.layer import MoEConfig
from freight.model.config.model import ModelConfig
from freight.model.config.moe import MoEFamily
from freight.model.config.tensor_names import VISION_TOWER, TensorNames
from freight.model.mixers.attention.spec import AttentionNames, QKNormConfig
from freight.model.mixers.short_conv.spec import ShortConvConfig
from freight.operands.routing import Scoring

_CONV = "conv"  # in `layer_types`


def _translate(config: JsonObject) -> JsonObject:
    """Derive the kinds of layers from `full_attn_idxs`, the older spelling, and the width of the
    feed-forward.
    """
    return {**config, "layer_types": _layer_types(config), "intermediate_size": _width(config)}


def _layer_types(config: JsonObject) -> Any:
    """Return `layer_types`, or the kinds from `full_attn_idxs`, the layers with attention. Without
    either all layers attend.
    """
    declared = config.get("layer_types")
    indices = config.get("full_attn_idxs")
    count = integer(config, "num_hidden_layers")
    if indices is None:
        return declared or ["full_attention"] * count
    if not isinstance(indices, list) or not all(
        type(layer) is int and 0 <= layer < count for layer in indices
    ):
        raise CheckpointError(
            f"config.json: full_attn_idxs = {indices!r} must be a list of layers below num_hidden_layers = {count}"
        )
    types = ["full_attention" if index in indices else _CONV for index in range(count)]
    if declared and declared != types:
        raise CheckpointError(
            f"config.json contradicts itself: layer_types = {declared!r}, but full_attn_idxs = {indices!r}"
        )
    return types


def _width(config: JsonObject) -> int:
    """Return the width of the feed-forward. With `block_auto_adjust_ff_dim` it is two thirds of the
    written width, times a factor, rounded up to a multiple. `block_ff_dim` is the older name of the
    written width, and takes precedence.
    """
    width = integer(
        config, "block_ff_dim" if config.get("block_ff_dim") is not None else "intermediate_size"
    )
    if not config.get("block_auto_adjust_ff_dim"):
        return width
    width = int(2 * width / 3)
    if config.get("block_ffn_dim_multiplier") is not None:
        multiple = integer(config, "block_multiple_of")
        width = int(number(config, "block_ffn_dim_multiplier") * width)
        width = multiple * -(-width // multiple)
    return width


def _derive(config: JsonObject, model: ModelConfig) -> ModelConfig:
    conv = ShortConvConfig(
        model.hidden_size, conv_width(config, "conv_L_cache"), flag(config, "conv_bias")
    )
    return with_layers(config, model, {_CONV: conv})


def _derive_moe(config: JsonObject, model: ModelConfig) -> ModelConfig:
    biased = flag(config, "use_expert_bias")
    layers = []
    for layer in model.layers:
        mlp = layer.feed_forward
        if isinstance(mlp, MoEConfig):
            layer = replace(layer, feed_forward=replace(mlp, choice_bias=biased))
        layers.append(layer)
    return _derive(config, replace(model, layers=tuple(layers)))


_TENSORS = TensorNames(
    norm="embedding_norm.weight",
    mixers=(
        AttentionNames(
            o="self_attn.out_proj",
            q_norm="self_attn.q_layernorm.weight",
            k_norm="self_attn.k_layernorm.weight",
        ),
    ),
    attention_norm="operator_norm.weight",
    mlp_norm="ffn_norm.weight",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    router="feed_forward.gate",
    choice_bias="feed_forward.expert_bias",
    expert="feed_forward.experts.{}.",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
    stacked=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
)
_DEFAULTS = {
    "vocab_size": 65536,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
}
_LFM2 = Family(
    "Lfm2ForCausalLM",
    {
        **_DEFAULTS,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    words(
        """
        layer_types full_attn_idxs conv_bias conv_L_cache block_ff_dim block_multiple_of block_ffn_dim_multiplier
        block_auto_adjust_ff_dim
        """
    ),
    fixed={"use_pos_enc": (True,), "block_use_swiglu": (True,)},
    synonyms={
        "norm_eps": "rms_norm_eps",
        "block_norm_eps": "rms_norm_eps",
        "tie_embedding": "tie_word_embeddings",
        "num_heads": "num_attention_heads",
        **dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), "hidden_size"),
    },
    qk_norm=QKNormConfig(),
    theta=1e6,
    other_layers=(_CONV,),
    tensors=_TENSORS,
    translate=_translate,
    derive=_derive,
)

ROWS = {
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        architecture="Lfm2MoeForCausalLM",
        defaults={
            **_DEFAULTS,
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "use_expert_bias": True,
        },
        keys=words("layer_types conv_bias conv_L_cache use_expert_bias"),
        moe=MoEFamily(
            32,
            scoring=Scoring.SIGMOID,
            factor_key="routed_scaling_factor",
            choice_bias=True,
            dense_keys=words("num_dense_layers"),
        ),
        derive=_derive_moe,
    ),
    "lfm2_vl": replace(
        _LFM2,
        architecture="Lfm2VlForConditionalGeneration",
        text_type="lfm2",
        other_texts=("lfm2_moe",),
        wrapper_keys=words(
            """
            vision_config image_token_id image_token_index projector_hidden_act projector_hidden_size projector_bias
            projector_use_layernorm downsample_factor tie_embedding vision_feature_layer
            do_image_splitting encoder_patch_size max_image_tokens max_num_patches max_pixels_tolerance max_tiles
            min_image_tokens min_tiles tile_size use_image_special_tokens use_thumbnail
            """
        ),
        bodies=LANGUAGE_MODEL,
        tensors=replace(_TENSORS, unused=VISION_TOWER),
    ),
}
