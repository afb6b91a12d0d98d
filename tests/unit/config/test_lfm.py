"""LFM2: config.json files as Liquid AI writes them, and what they may not say."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.unit.config.test_model import config

from freight.cache.spec import cache_spec
from freight.errors import CheckpointError
from freight.fp8.formats import Format
from freight.model.config.layer import MoEConfig
from freight.model.config.model import ModelConfig
from freight.model.config.parse import parse_model_config
from freight.model.mixers.attention.spec import AttentionConfig
from freight.model.mixers.short_conv.spec import ShortConvConfig
from freight.model.open import read_model_config
from freight.model.shapes import tensor_shapes
from freight.settings.engine import KVCacheConfig

Json = dict[str, Any]
CONV, FULL = "conv", "full_attention"
ATTENTION = (2, 5, 8, 10, 12, 14)
LAYER_TYPES = [FULL if index in ATTENTION else CONV for index in range(16)]
MOE_ATTENTION = (2, 6, 10, 14, 18, 21)

LFM2_1_2B: Json = {  # the first spelling, with full_attn_idxs and block_ff_dim
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True, "bos_token_id": 1,
    "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": True,
    "eos_token_id": 7, "full_attn_idxs": list(ATTENTION), "hidden_size": 2048, "initializer_range": 0.02,
    "max_position_embeddings": 128000, "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 32,
    "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16", "transformers_version": "4.53.0.dev0", "use_cache": True, "use_pos_enc": True,
    "vocab_size": 65536,
}  # fmt: skip
LFM2_5_350M: Json = {  # the later one, with layer_types
    **{key: value for key, value in LFM2_1_2B.items() if key not in ("block_ff_dim", "conv_dim_out", "rope_theta")},
    **dict.fromkeys(("hidden_size", "block_dim", "conv_dim"), 1024), "num_attention_heads": 16, "num_heads": 16,
    "intermediate_size": 6656, "full_attn_idxs": None, "layer_types": LAYER_TYPES, "dtype": "bfloat16",
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}, "tie_embedding": True,
    "tie_word_embeddings": True,
}  # fmt: skip
LFM2_8B_A1B: Json = {
    "architectures": ["Lfm2MoeForCausalLM"], "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False,
    "dtype": "bfloat16", "eos_token_id": 7, "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 7168,
    "layer_types": [FULL if index in MOE_ATTENTION else CONV for index in range(24)],
    "max_position_embeddings": 128000, "model_type": "lfm2_moe", "moe_intermediate_size": 1792, "norm_eps": 1e-05,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "pad_token_id": 0,
    "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "use_cache": True, "use_expert_bias": True,
    "vocab_size": 65536,
}  # fmt: skip
LFM2_VL_450M: Json = {
    "architectures": ["Lfm2VlForConditionalGeneration"], "do_image_splitting": True, "downsample_factor": 2,
    "encoder_patch_size": 16, "image_token_id": 396, "max_image_tokens": 256, "max_num_patches": 1024,
    "max_pixels_tolerance": 2.0, "max_tiles": 10, "min_image_tokens": 64, "min_tiles": 2, "model_type": "lfm2_vl",
    "projector_bias": True, "projector_hidden_act": "gelu", "projector_hidden_size": 2560,
    "projector_use_layernorm": True, "text_config": LFM2_5_350M, "tile_size": 512, "torch_dtype": "bfloat16",
    "use_image_special_tokens": True, "use_thumbnail": True, "vision_feature_layer": -1,
    "vision_config": {"hidden_size": 768, "intermediate_size": 3072, "model_type": "siglip2_vision_model",
                      "num_attention_heads": 12, "num_hidden_layers": 12},
}  # fmt: skip


def read(written: Json) -> ModelConfig:
    model = read_model_config(written)
    assert model.unread_keys.unknown == ()
    return model


def num_parameters(model: ModelConfig) -> int:
    """Without what transformers holds as a buffer."""
    shapes = tensor_shapes(model).items()
    return sum(math.prod(shape) for name, shape in shapes if not name.endswith("expert_bias"))


def cache_bytes(model: ModelConfig) -> tuple[int, int]:
    """Of a token's pages and of a sequence's states, in 16 bits."""
    spec = cache_spec(KVCacheConfig(Format.BFLOAT16, None, None, None), model, 16)
    return spec.bytes_per_token, spec.bytes_per_state


@pytest.mark.parametrize(
    ("written", "parameters", "attending", "states"),
    [
        (LFM2_1_2B, 1_170_340_608, ATTENTION, 10 * 2 * 2048 * 2),
        (LFM2_5_350M, 354_483_968, ATTENTION, 10 * 2 * 1024 * 2),
        (LFM2_8B_A1B, 8_339_929_856, MOE_ATTENTION, 18 * 2 * 2048 * 2),
        (LFM2_VL_450M, 354_483_968, ATTENTION, 10 * 2 * 1024 * 2),
    ],
    ids=["1.2B", "350M", "8B-A1B", "VL-450M"],
)
def test_as_published(
    written: Json, parameters: int, attending: tuple[int, ...], states: int
) -> None:
    """Numbers of parameters as Liquid AI states them, of the text alone; states are the last 2
    inputs of layers.
    """
    model = read(written)
    assert num_parameters(model) == parameters
    assert tuple(model.attention) == attending
    kinds = {
        type(layer.mixer) for index, layer in enumerate(model.layers) if index not in attending
    }
    assert kinds == {ShortConvConfig}
    assert cache_bytes(model) == (6 * 8 * 64 * 2 * 2, states)
    assert all(
        isinstance(mixer, AttentionConfig) and mixer.qk_norm for mixer in model.attention.values()
    )
    assert (model.ropes[0].theta, model.norm_eps, model.tie_word_embeddings) == (1e6, 1e-5, True)
    assert (model.bos_token_id, model.eos_token_ids) == (1, (7,))


def test_the_first_layers_of_a_mixture_are_dense() -> None:
    layers = read(LFM2_8B_A1B).layers
    assert [isinstance(layer.feed_forward, MoEConfig) for layer in layers] == [False] * 2 + [
        True
    ] * 22
    assert [layer.feed_forward.intermediate_size for layer in layers] == [7168] * 2 + [1792] * 22


def test_both_spellings_of_the_layers_are_one() -> None:
    without = {key: value for key, value in LFM2_1_2B.items() if key != "full_attn_idxs"}
    assert read(without | {"layer_types": LAYER_TYPES}) == read(LFM2_1_2B)
    assert read(LFM2_1_2B | {"layer_types": LAYER_TYPES}) == read(LFM2_1_2B)
    assert len(read(without).attention) == 16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"full_attn_idxs": [2, 16]},
            r"full_attn_idxs = \[2, 16\] must be a list of layers below num_hidden_layers",
        ),
        ({"full_attn_idxs": "all"}, "full_attn_idxs = 'all' must be a list"),
        ({"full_attn_idxs": [True]}, r"full_attn_idxs = \[True\] must be a list"),
        ({"layer_types": [CONV] * 16}, "contradicts itself: layer_types"),
        ({"conv_L_cache": 1}, "conv_L_cache = 1 is not implemented; 2 to 8 are"),
        ({"conv_L_cache": 9}, "conv_L_cache = 9 is not implemented"),
        ({"conv_bias": 3}, "conv_bias"),
        ({"block_use_swiglu": False}, "block_use_swiglu = False"),
        ({"use_pos_enc": False}, "use_pos_enc = False"),
        ({"conv_dim": 1024}, "conv_dim = 1024, but hidden_size = 2048"),
        ({"num_heads": 8}, "num_heads = 8, but num_attention_heads = 32"),
        ({"block_ffn_dim_multiplier": "x"}, "block_ffn_dim_multiplier"),
        ({"block_multiple_of": 0}, "block_multiple_of"),
        ({"block_ff_dim": 0}, "block_ff_dim"),
    ],
    ids=str,
)
def test_what_contradicts_or_is_not_there_is_refused(change: Json, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        parse_model_config(LFM2_1_2B | change)


@pytest.mark.parametrize("kind", ["sliding_attention", "linear_attention", None])
def test_other_kinds_of_layers_are_refused(kind: str | None) -> None:
    with pytest.raises(CheckpointError, match=r"layer_types|sliding_window"):
        parse_model_config(LFM2_5_350M | {"layer_types": [kind, *LAYER_TYPES[1:]]})


def test_a_convolution_is_of_this_family_alone() -> None:
    with pytest.raises(CheckpointError, match="layer_types"):
        parse_model_config(config("qwen3", layer_types=[CONV, FULL, CONV, FULL]))
