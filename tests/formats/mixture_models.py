"""Configurations of the tiny models of `mixtures.py`."""

from __future__ import annotations

from typing import Any

from transformers import (
    AfmoeConfig,
    DeepseekV3Config,
    DeepseekV32Config,
    Ernie4_5_MoeConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    Glm4vMoeConfig,
    GlmMoeDsaConfig,
    GraniteMoeConfig,
    HunYuanMoEV1Config,
    HYV3Config,
    LagunaConfig,
    MellumConfig,
    MiMoV2FlashConfig,
    MiniMaxM2Config,
    PretrainedConfig,
    Qwen3VLMoeConfig,
)

HIDDEN, WIDTH, EXPERTS, VOCAB = 128, 256, 4, 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {**SHAPE, "head_dim": 64}
MOE: dict[str, Any] = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDTH,
}
WINDOWS: dict[str, Any] = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
}
GLM: dict[str, Any] = {
    **MOE,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {"num_key_value_heads": 2, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128,
                          "qk_rope_head_dim": 64, "v_head_dim": 128}  # fmt: skip
INDEXER: dict[str, Any] = {"index_topk": 128, "index_head_dim": 128, "index_n_heads": 2}
MODELS: dict[str, PretrainedConfig] = {
    "glm4_moe": Glm4MoeConfig(**HEADS, **GLM, use_qk_norm=True, attention_bias=True, routed_scaling_factor=1.7),
    # heads of q end in the middle of blocks of 128, as the published ones do
    "deepseek_v3": DeepseekV3Config(**SHAPE | GLM | LATENT, n_group=2, topk_group=1, routed_scaling_factor=2.5),
    "glm4_moe_lite": Glm4MoeLiteConfig(**SHAPE | GLM | LATENT | {"qk_nope_head_dim": 192}, routed_scaling_factor=1.8),
    "deepseek_v32": DeepseekV32Config(**SHAPE | GLM | LATENT | INDEXER, n_group=2, topk_group=1),
    "glm_moe_dsa": GlmMoeDsaConfig(**SHAPE | GLM | LATENT | INDEXER, indexer_types=["full", "shared"]),
    "glm4v_moe": Glm4vMoeConfig(
        text_config={**HEADS, **GLM, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                         "partial_rotary_factor": 0.5, "mrope_section": [4, 6, 6]}},
        vision_config=VISION,
    ),
    "minimax_m2": MiniMaxM2Config(
        **HEADS | {"intermediate_size": WIDTH}, num_local_experts=EXPERTS, num_experts_per_tok=2, rotary_dim=32
    ),
    "hy_v3": HYV3Config(**HEADS, **MOE, num_shared_experts=1),
    "hunyuan_v1_moe": HunYuanMoEV1Config(**HEADS | {"intermediate_size": WIDTH}, num_experts=EXPERTS, moe_topk=2),
    "ernie4_5_moe": Ernie4_5_MoeConfig(**SHAPE, moe_num_experts=EXPERTS, moe_k=2, moe_intermediate_size=WIDTH,
                                       tie_word_embeddings=False),
    "granitemoe": GraniteMoeConfig(**SHAPE, num_local_experts=EXPERTS, num_experts_per_tok=2, logits_scaling=2.0,
                                   attention_multiplier=0.1, residual_multiplier=0.5),
    "laguna": LagunaConfig(**HEADS, **MOE, **WINDOWS, shared_expert_intermediate_size=WIDTH,
                           num_attention_heads_per_layer=[4, 2], moe_routed_scaling_factor=1.7),
    "mellum": MellumConfig(**HEADS, **MOE, **WINDOWS, norm_topk_prob=True),
    "mimo_v2_flash": MiMoV2FlashConfig(**HEADS | MOE | {"head_dim": 128, "v_head_dim": 64}, n_routed_experts=EXPERTS,
                                       sliding_window=8),
    "afmoe": AfmoeConfig(**HEADS, **MOE, **WINDOWS, num_shared_experts=1, num_dense_layers=1, mup_enabled=True),
    "gemma4_text": Gemma4TextConfig(
        **HEADS, **WINDOWS, global_head_dim=128, hidden_size_per_layer_input=0, enable_moe_block=True,
        num_experts=EXPERTS, top_k_experts=2, moe_intermediate_size=WIDTH, attention_k_eq_v=True,
        num_global_key_value_heads=1, tie_word_embeddings=True,
    ),
    "qwen3_vl_moe": Qwen3VLMoeConfig(
        text_config={**HEADS, **MOE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                         "mrope_section": [8, 12, 12], "mrope_interleaved": True}},
        vision_config={**VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
}  # fmt: skip
