"""Ling 3.0 (bailing_hybrid) in config.json: the publisher's spelling and that of transformers, and
what is refused.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.config.test_model import num_parameters

from freight.errors import CheckpointError
from freight.model.config.layer import DenseConfig, MoEConfig
from freight.model.mixers.kimi_delta.spec import KimiDeltaConfig
from freight.model.mixers.latent.spec import LatentConfig
from freight.model.open import read_model_config
from freight.model.shapes import kept_in_16_bits, tensor_shapes

Json = dict[str, Any]
PUBLISHERS: Json = {  # keys and values of Ling-3.0-flash
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "dtype": "bfloat16",
    "eos_token_id": 156895,
    "first_k_dense_replace": 2,
    "gated_attention_proj_granularity_type": "head_wise",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 6144,
    "kda_lower_bound": -5.0,
    "kda_safe_gate": True,
    "kv_lora_rank": 512,
    "layer_group_size": 6,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 768,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 768,
    "n_group": 8,
    "no_kda_lora": True,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 42,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": None,
    "qk_head_dim": 192,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_theta": 6000000,
    "rotary_dim": 64,
    "routed_scaling_factor": 2.5,
    "short_conv_kernel_size": 4,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "use_qk_norm": True,
    "v_head_dim": 128,
    "vocab_size": 157184,
}
LATENT = LatentConfig(32, None, 512, 128, 64, 128, softmax_scale=192**-0.5, output_gate=True)


def test_in_the_publishers_spelling() -> None:
    model = read_model_config(PUBLISHERS)
    assert num_parameters(model) == pytest.approx(124e9, rel=0.02)
    recurrent = KimiDeltaConfig(32, 128, 4, bound=-5.0)
    assert [layer.mixer for layer in model.layers] == ([recurrent] * 5 + [LATENT]) * 7
    (rope, *_) = model.ropes
    assert (rope.rotary_dim, rope.theta, rope.interleaved) == (64, 6e6, True)
    moe = model.layers[2].feed_forward
    assert isinstance(moe, MoEConfig)
    assert (moe.routing.num_experts, moe.routing.num_groups, moe.routing.factor) == (512, 8, 2.5)
    assert moe.shared == DenseConfig(768)
    assert model.prediction_layers == 1
    names = set(tensor_shapes(model))
    assert {"model.word_embeddings.weight", "model.layers.0.attention.o_proj.weight"} <= names
    assert {"model.layers.5.attention.dense.weight", "model.layers.2.mlp.gate.expert_bias"} <= names


def test_what_decides_decays_and_weighs_heads_stays_in_16_bits() -> None:
    kept = kept_in_16_bits(read_model_config(PUBLISHERS))
    for layer, own in ((0, {"f_proj", "b_proj"}), (5, {"g_proj", "kv_b_proj"})):
        prefix = f"model.layers.{layer}.attention."
        assert {name.removeprefix(prefix) for name in kept if name.startswith(prefix)} == {
            f"{n}.weight" for n in own
        }


def test_in_the_spelling_of_transformers() -> None:
    """`save_pretrained` writes the rotated channels as `head_dim`, and the recurrence's apart."""
    written = {
        key: value
        for key, value in PUBLISHERS.items()
        if key not in ("partial_rotary_factor", "rotary_dim")
    }
    written |= {
        "architectures": ["BailingHybridForCausalLM"],
        "head_dim": 64,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
        "layer_types": (["linear_attention"] * 5 + ["full_attention"]) * 7,
        "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 40,
        "rope_parameters": {"rope_type": "default", "rope_theta": 6e6},
    }
    assert read_model_config(written) == read_model_config(PUBLISHERS)


def test_decays_without_a_bound() -> None:
    model = read_model_config({**PUBLISHERS, "kda_safe_gate": False})
    assert model.layers[0].mixer == KimiDeltaConfig(32, 128, 4)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"architectures": ["BailingMoeV2_5ForCausalLM"]},
            r"'BailingMoeV2_5ForCausalLM' \(Ling 2.6 and Ring 2.6, ",
        ),
        ({"q_lora_rank": 256}, "q_lora_rank = 256 is not implemented; only null is"),
        ({"no_kda_lora": False}, "no_kda_lora = False is not implemented; only True is"),
        ({"gated_attention_proj_granularity_type": "element_wise"}, "only 'head_wise' is"),
        ({"use_mla_nope": True}, "use_mla_nope = True is not implemented"),
        ({"group_norm_size": 4}, "group_norm_size = 4 is not implemented; only 1 is"),
        (
            {"num_hidden_layers": 40},
            "num_hidden_layers = 40 is not a multiple of layer_group_size = 6",
        ),
        (
            {"tie_word_embeddings": True},
            "tie_word_embeddings = True is not implemented for this model_type",
        ),
        (
            {"expert_swiglu_limit_list": [0] * 40 + [4.0, 4.0]},
            "expert_swiglu_limit_list = .* only 0 is. --ignore-config",
        ),
        (
            {"share_expert_swiglu_limit_list": [7.0] * 42},
            "share_expert_swiglu_limit_list = .* only 0 is",
        ),
        (
            {"num_kv_heads_for_linear_attn": 4},
            "num_kv_heads_for_linear_attn = 4 is not implemented; only 0 is",
        ),
        ({"value_norm": True}, "value_norm = True is not implemented; only False is"),
        ({"use_nGPT": True}, "use_nGPT = True"),
        ({"up_proj_norm": True}, "up_proj_norm = True"),
        ({"scale_router_input": True}, "scale_router_input = True"),
        ({"use_kda_lora": True}, "use_kda_lora = True"),
        ({"router_dtype": "bf16"}, "router_dtype = 'bf16' is not implemented"),
        ({"rotary_dim": 32}, "rotary_dim = 32, but latent attention with qk_rope_head_dim = 64"),
        ({"rotary_dim": [64]}, r"rotary_dim = \[64\], but"),
        ({"partial_rotary_factor": {}}, r"partial_rotary_factor = \{\}, but"),
        ({"partial_rotary_factor": 0.25}, r"partial_rotary_factor = 0\.25, but"),
        (
            {"kda_lower_bound": 5.0},
            r"kda_lower_bound = 5\.0 must be a number from -10000 to -1e-30",
        ),
        ({"kda_lower_bound": -1e-50}, r"kda_lower_bound = -1e-50 must be"),
        (
            {"moe_shared_expert_intermediate_size": 512},
            "moe_shared_expert_intermediate_size = 512 is not implemented",
        ),
        (
            {"score_function": "softmax"},
            "score_function = 'softmax' is not implemented; only 'sigmoid' is",
        ),
    ],
)
def test_what_is_not_computed_is_refused(keys: Json, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_model_config({**PUBLISHERS, **keys})


def test_what_is_off_in_the_publishers_files_is_read() -> None:
    off: Json = {
        "expert_swiglu_limit_list": [0] * 42,
        "share_expert_swiglu_limit_list": None,
        "router_dtype": "fp32",
    }
    off |= dict.fromkeys(
        ("use_kda_lora", "use_nGPT", "up_proj_norm", "value_norm", "scale_router_input"), False
    )
    model = read_model_config({**PUBLISHERS, **off, "num_kv_heads_for_linear_attn": 0})
    assert model == read_model_config(PUBLISHERS)
    assert not model.unread_keys.unknown
