"""The configs of tiny models with latent attention (MLA), which are among those of `variants.py`."""

from __future__ import annotations

from tests.parity.shapes import INDEXER, LATENT, MSCALE, SCALED, YARN
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    Mistral4Config,
    PretrainedConfig,
)

LATENTS: dict[str, PretrainedConfig] = {
    "mistral4": Mistral4Config(**LATENT, rope_parameters={**SCALED, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "mistral4-groups": Mistral4Config(
        **LATENT | {"q_lora_rank": None}, n_group=4, topk_group=2, norm_topk_prob=False, n_shared_experts=2,
        first_k_dense_replace=1, tie_word_embeddings=True, rope_parameters={**SCALED, "mscale_all_dim": 0.8},
    ),
    "glm4-moe-lite": Glm4MoeLiteConfig(**LATENT),
    "glm4-moe-lite-groups": Glm4MoeLiteConfig(
        **LATENT | {"q_lora_rank": None}, n_group=4, topk_group=2, norm_topk_prob=False, n_shared_experts=2,
        mlp_layer_types=["sparse", "dense", "sparse"], rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=True,
    ),
    "deepseek-v2": DeepseekV2Config(
        **LATENT, n_group=4, topk_group=2, topk_method="group_limited_greedy", first_k_dense_replace=1,
        rope_parameters={**MSCALE, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek-v2-lite": DeepseekV2Config(
        **LATENT | {"q_lora_rank": None}, n_group=4, topk_group=1, norm_topk_prob=True, tie_word_embeddings=True,
        rope_parameters={**YARN, "rope_theta": 1e4},
    ),
    "deepseek-v3": DeepseekV3Config(**LATENT, n_group=4, topk_group=2, first_k_dense_replace=1, rope_parameters=MSCALE),
    "deepseek-v3-without-q-lora": DeepseekV3Config(
        **LATENT | {"q_lora_rank": None}, n_group=1, topk_group=1, first_k_dense_replace=2, rms_norm_eps=1e-5,
        rope_parameters={**YARN, "rope_theta": 1e4},
    ),
    "deepseek-v32": DeepseekV32Config(
        **LATENT, **INDEXER, n_group=4, topk_group=2, first_k_dense_replace=1, rope_parameters=MSCALE,
    ),
    "glm-moe-dsa": GlmMoeDsaConfig(
        **LATENT, **INDEXER, n_group=1, topk_group=1, indexer_types=["full", "shared", "full"],
        tie_word_embeddings=True, mlp_layer_types=["dense", "sparse", "sparse"],
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
}  # fmt: skip
