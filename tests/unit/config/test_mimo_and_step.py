"""Keys that only MiMo-V2-Flash and Step-3.7 have, in the hub's spelling and in transformers'."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.config.test_model import SHAPE, config

from freight.errors import CheckpointError
from freight.model.config.layer import DenseConfig, MoEConfig
from freight.model.config.model import ModelConfig
from freight.model.config.parse import parse_model_config
from freight.operands.activation import GatedActivation, clamped_silu

FULL, SLIDING = "full_attention", "sliding_attention"
LAYERS = [FULL, SLIDING, SLIDING, FULL]
SILU = GatedActivation.SILU


def mimo(**more: Any) -> ModelConfig:
    return parse_model_config(config("mimo_v2_flash", **more))


def step(**more: Any) -> ModelConfig:
    text = {**SHAPE, "model_type": "step3p5", "head_dim": 64, "sliding_window": 24, **more}
    text = {key: value for key, value in text.items() if value is not None}
    return parse_model_config({"model_type": "step3p7", "text_config": text})


def test_mimo_in_the_hubs_keys_means_the_same() -> None:
    ropes = {"rope_type": "default", "partial_rotary_factor": 0.25}
    ours = mimo(
        sliding_window=17, layer_types=LAYERS, mlp_layer_types=["dense", "sparse", "dense", "sparse"],
        rope_parameters={FULL: {**ropes, "rope_theta": 7e5}, SLIDING: {**ropes, "rope_theta": 30.0}},
    )  # fmt: skip
    hub = mimo(
        sliding_window=16, sliding_window_size=16, attention_chunk_size=16, hybrid_layer_pattern=[0, 1, 1, 0],
        moe_layer_freq=[0, 1, 0, 1], rope_theta=7e5, swa_rope_theta=30.0, partial_rotary_factor=0.25,
        layernorm_epsilon=1e-5, swa_num_attention_heads=4, swa_num_key_value_heads=4, swa_head_dim=192,
        swa_v_head_dim=128, add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False,
        routed_scaling_factor=None, n_shared_experts=None, scoring_func="sigmoid", topk_method="noaux_tc",
    )  # fmt: skip
    assert (hub.layers, hub.ropes, hub.norm_eps) == (ours.layers, ours.ropes, ours.norm_eps)


def test_the_factor_of_values_and_its_absence() -> None:
    assert [
        mimo(attention_value_scale=value).layers[0].mixer.v_factor for value in (0.5, None)
    ] == [0.5, None]
    assert mimo().layers[0].mixer.v_factor == 0.707
    mixers = [layer.mixer for layer in mimo(layer_types=LAYERS).layers]
    assert [mixer.factor_groups for mixer in mixers] == [(9, 2), (3, 1), (3, 1), (9, 2)]
    assert all(sum(mixer.qkv_sizes) % sum(mixer.factor_groups) == 0 for mixer in mixers)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("swa_num_key_value_heads", 2),
        ("swa_num_attention_heads", 8),
        ("swa_head_dim", 128),
        ("swa_v_head_dim", 192),
        ("num_key_value_heads", 4),  # twice as many in layers with a window: more than query heads
        ("add_swa_attention_sink_bias", False),
        ("add_full_attention_sink_bias", True),
        ("hybrid_layer_pattern", [0, 1, 2, 1]),
        ("moe_layer_freq", 1),
        ("attention_value_scale", -1.0),
        ("scoring_func", "softmax"),
        ("n_shared_experts", 1),
    ],
)
def test_what_transformers_does_not_compute_of_mimo_is_refused(key: str, value: object) -> None:
    with pytest.raises(
        CheckpointError, match=key if "num_key" not in key else "num_key_value_heads"
    ):
        mimo(**{key: value})


def test_step_in_the_hubs_lists_means_the_same() -> None:
    ours = step(
        layer_types=LAYERS, mlp_layer_types=["dense", "sparse", "dense", "sparse"], num_sliding_attention_heads=6,
        swiglu_limits=[0, 7, 0, 0], swiglu_limits_shared=[None, 0.0, 16, 5],
        rope_parameters={
            FULL: {"rope_type": "llama3", "rope_theta": 5e6, "partial_rotary_factor": 0.5, "factor": 2.0,
                   "low_freq_factor": 1.0, "high_freq_factor": 32.0, "original_max_position_embeddings": 1024},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    )  # fmt: skip
    text = {
        "layer_types": [*LAYERS, SLIDING], "num_nextn_predict_layers": 1, "moe_layers_enum": "1,3,4",
        "attention_other_setting": {"attention_type": SLIDING, "num_attention_heads": 6, "num_attention_groups": 2,
                                    "head_dim": 64},
        "swiglu_limits": [0, 7, 0, 0, 0], "swiglu_limits_shared": [None, 0.0, 16, 5, 0],
        "rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
        "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0,
                         "original_max_position_embeddings": 1024},
        "yarn_only_types": [FULL], "use_head_wise_attn_gate": True, "moe_router_activation": "sigmoid",
        "moe_num_experts": 288, "moe_top_k": 8, "share_expert_dims": 1280, "num_attention_groups": 2,
        "num_key_value_heads": None, "norm_expert_weight": True, "need_fp32_gate": True, "att_impl_type": "GQA",
    }  # fmt: skip
    hub = step(**text)
    assert (hub.layers, hub.ropes, hub.prediction_layers) == (ours.layers, ours.ropes, 1)
    feed_forwards = [layer.feed_forward for layer in ours.layers]
    expected = [SILU, clamped_silu(7.0), clamped_silu(16.0), SILU]
    assert [one.activation for one in feed_forwards] == expected
    assert [
        one.shared.activation for one in feed_forwards if isinstance(one, MoEConfig) and one.shared
    ] == [SILU, clamped_silu(5.0)]
    assert isinstance(feed_forwards[0], DenseConfig)
    assert [layer.mixer.num_heads for layer in ours.layers] == [4, 6, 6, 4]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("swiglu_limits", [7.0]),
        ("swiglu_limits_shared", [-1.0, 0, 0, 0]),
        ("num_sliding_attention_heads", 5),
        ("attention_other_setting", {"head_dim": 128}),
        ("attention_other_setting", [6]),
        ("per_layer_config", {"0": {"num_attention_heads": 6}}),
        ("per_layer_config", {"1": {"head_dim": 32}}),
        ("moe_layers_enum", "1,x"),
        ("rope_theta", [1e4, 1e4, 5e6, 5e6]),
        ("mlp_bias", True),
        ("yarn_only_types", [SLIDING]),
        ("use_moe_router_bias", False),
        ("moe_router_activation", "softmax"),
        ("first_k_dense_replace", 1),
    ],
)
def test_what_transformers_does_not_compute_of_step_is_refused(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=key):
        step(layer_types=LAYERS, **{key: value})


def test_a_bound_belongs_to_one_function() -> None:
    with pytest.raises(AssertionError, match="limit"):
        clamped_silu(0.0)
    assert (str(clamped_silu(7.0)), str(SILU)) == ("clamped_silu", "silu")
