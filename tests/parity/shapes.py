"""Keys of the tiny configurations of `variants.py`: sizes, ropes, and what several variants of a
family share.
"""

from __future__ import annotations

from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MSCALE = {
    **YARN,
    "rope_theta": 1e6,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "beta_fast": 16,
    "beta_slow": 2,
}

LONG = {"rope_type": "longrope", "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)], "rope_theta": 10000.0}  # fmt: skip
# queries at positions 40, 80 and 120 of the tests are multiplied by another factor than those
# before
SCALED = {
    **YARN,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 40,
    "llama_4_scaling_beta": 0.5,
}
GEMMA: dict[str, Any] = {**SHAPE, "num_hidden_layers": 4, "head_dim": 32, "sliding_window": 24}
GEMMA4: dict[str, Any] = {**GEMMA, "global_head_dim": 64, "hidden_size_per_layer_input": 0,
                          "final_logit_softcapping": 3.0}  # fmt: skip
E4B: dict[str, Any] = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 4096, "num_kv_shared_layers": 3,
                       "use_double_wide_mlp": True,
                       "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}  # fmt: skip
ALPHA: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}
MUSE: dict[str, Any] = {**GEMMA, "output_multiplier": 0.4, "final_logit_softcapping": 3.0, "qk_scale_factor": 1.7,
                        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}  # fmt: skip
MUSE_VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                               "num_attention_heads": 2}  # fmt: skip
ERNIE_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
}
MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GLM_MOE: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16,
                           "routed_scaling_factor": 1.7}  # fmt: skip
LATENT: dict[str, Any] = {
    **SHAPE, "num_key_value_heads": 4, "q_lora_rank": 40, "kv_lora_rank": 32, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8, "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "routed_scaling_factor": 1.7,
}  # fmt: skip
INDEXER: dict[str, Any] = {"index_topk": 2048, "index_head_dim": 16, "index_n_heads": 2}
_KDA: dict[str, Any] = {
    **{key: value for key, value in LATENT.items() if key not in ("q_lora_rank", "n_routed_experts")},
    "num_hidden_layers": 4, "num_local_experts": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
LING: dict[str, Any] = {**_KDA, "head_dim": 16, "n_group": 4, "topk_group": 2}
KIMI_LINEAR: dict[str, Any] = {**_KDA, "linear_head_dim": 16, "linear_num_heads": 5}
GRANITE: dict[str, Any] = {"embedding_multiplier": 12.7, "attention_multiplier": 0.1, "residual_multiplier": 0.22,
                           "logits_scaling": 3.0}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rope_parameters": {
        **YARN,
        "rope_theta": 150000.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
# models of text and pictures; ropes have sections for time, height and width
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 64,
}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
HALF = {**SECTIONS, "mrope_section": [1, 1, 2]}
QWEN3_VISION = {**VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
TWO_ROPES: dict[str, Any] = {
    "full_attention": {**YARN, "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
}
WINDOWS: dict[str, Any] = {
    "head_dim": 16, "sliding_window": 24, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]
}  # fmt: skip
# one KV head in layers without a window, two in the others; heads of q and k are wider than those
# of v
MIMO: dict[str, Any] = {
    **SHAPE, "num_key_value_heads": 1, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "head_dim": 24, "v_head_dim": 16, "sliding_window": 24,
}  # fmt: skip
STEP: dict[str, Any] = {**SHAPE, **WINDOWS, "n_routed_experts": 8, "num_experts_per_tok": 3,
                        "moe_intermediate_size": 32, "share_expert_dim": 48, "moe_router_scaling_factor": 1.7,
                        "mlp_layer_types": ["dense", "sparse", "sparse"]}  # fmt: skip
STEP_VISION: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 2.0,
                               "image_size": 28}  # fmt: skip
# short convolutions, and attention in one layer; the width of the feed-forward becomes 2/3 * 150 *
# 0.9 -> 96
LFM2: dict[str, Any] = {
    **SHAPE, "intermediate_size": 150, "block_ffn_dim_multiplier": 0.9, "block_multiple_of": 32,
    "layer_types": ["conv", "full_attention", "conv"],
}  # fmt: skip
LFM2_MOE: dict[str, Any] = {**SHAPE, **MOE, "num_dense_layers": 1, "routed_scaling_factor": 1.7,
                            "layer_types": ["full_attention", "conv", "conv"]}  # fmt: skip
SIGLIP: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
OPT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 256,
}  # fmt: skip

# two delta nets, whose value heads share key heads, around one layer with attention
DELTA_NET: dict[str, Any] = {
    **SHAPE, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
MINICPM_VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "image_size": 28,
                                  "num_attention_heads": 2, "insert_layer_id": 0, "patch_size": 14}  # fmt: skip
QWEN3_5_VISION = {**VISION, "num_position_embeddings": 16}

# Mamba-2 around one layer with attention; heads share B and C
GRANITE_H: dict[str, Any] = {
    **SHAPE, **GRANITE, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 24, "shared_intermediate_size": 48,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
# each layer has one part; transformers raises steps to time_step_min, and Freight does not
NEMOTRON: dict[str, Any] = {
    **SHAPE, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24,
    "time_step_min": 1e-30, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
}  # fmt: skip
NEMOTRON_MOE: dict[str, Any] = {
    **NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "routed_scaling_factor": 1.7,
    "moe_shared_expert_intermediate_size": 48,
}  # fmt: skip
RADIO: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
                         "max_img_size": 32, "video_temporal_patch_size": 2}  # fmt: skip
