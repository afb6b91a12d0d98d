"""The configs of tiny models, of every family and variant; `random_models.py` makes and saves the
models.
"""

from __future__ import annotations

from tests.parity.latents import LATENTS
from tests.parity.shapes import (
    ALPHA,
    DELTA_NET,
    E4B,
    ERNIE_VISION,
    GEMMA,
    GEMMA4,
    GLM_MOE,
    GPT_OSS,
    GRANITE,
    GRANITE_H,
    HALF,
    KIMI_LINEAR,
    LFM2,
    LFM2_MOE,
    LING,
    LLAMA3,
    LONG,
    MIMO,
    MINICPM_VISION,
    MOE,
    MSCALE,
    MUSE,
    MUSE_VISION,
    NEMOTRON,
    NEMOTRON_MOE,
    OPT,
    QWEN3_5_VISION,
    QWEN3_VISION,
    RADIO,
    SCALED,
    SECTIONS,
    SHAPE,
    SIGLIP,
    STEP,
    STEP_VISION,
    TWO_ROPES,
    VISION,
    WINDOWS,
    YARN,
)
from transformers import (
    AfmoeConfig,
    ArceeConfig,
    BailingHybridConfig,
    Ernie4_5_MoeConfig,
    Ernie4_5_VLMoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4vConfig,
    Glm4vMoeConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    HYV3Config,
    KimiLinearConfig,
    LagunaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm2VlConfig,
    LlamaConfig,
    MellumConfig,
    MiMoV2FlashConfig,
    MiniCPMV4_6Config,
    MiniMaxM2Config,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    MuseGlimmerConfig,
    NemotronH_Omni_Reasoning_V3_Config,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    Step3p7Config,
)

VARIANTS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama-tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-1-head-each": LlamaConfig(**{**SHAPE, "num_key_value_heads": 4}),
    "llama-head-dim": LlamaConfig(**SHAPE, head_dim=32),
    "llama-biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama-linear": LlamaConfig(**SHAPE, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
    "llama-llama3": LlamaConfig(**SHAPE, rope_parameters={**LLAMA3, "rope_theta": 500000.0}),
    "llama-yarn": LlamaConfig(**SHAPE, rope_parameters={**YARN, "rope_theta": 10000.0}),
    "llama-yarn-mscale": LlamaConfig(**SHAPE, rope_parameters=MSCALE),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "mistral-window": MistralConfig(**SHAPE, sliding_window=24),
    "ministral3": Ministral3Config(**SHAPE, head_dim=32, rope_parameters=SCALED),
    "ministral3-tied": Ministral3Config(
        **SHAPE, head_dim=16, tie_word_embeddings=True, sliding_window=24,
        rope_parameters={**SCALED, "mscale": 1.0, "mscale_all_dim": 1.0, "max_position_embeddings": 256},
    ),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2-window-off": Qwen2Config(**SHAPE, use_sliding_window=False, sliding_window=24),
    "qwen2-window": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=24, max_window_layers=1),
    "qwen3": Qwen3Config(**SHAPE, head_dim=32),
    "qwen3-tied-theta": Qwen3Config(
        **SHAPE, head_dim=16, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    ),
    "gemma2": Gemma2Config(**GEMMA, query_pre_attn_scalar=24, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma2-one-window": Gemma2Config(**GEMMA, layer_types=["full_attention"] * 3 + ["sliding_attention"]),
    "gemma2-untied": Gemma2Config(**{**GEMMA, "tie_word_embeddings": False}, attention_bias=True,
                                  attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma3": Gemma3TextConfig(**{**GEMMA, "num_hidden_layers": 6}, query_pre_attn_scalar=24),
    "gemma3-two-ropes": Gemma3TextConfig(
        **GEMMA, layer_types=["sliding_attention", "full_attention"] * 2, final_logit_softcapping=3.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
    ),
    "gemma4": Gemma4TextConfig(**GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1),
    "gemma4-plain": Gemma4TextConfig(
        **GEMMA4, attention_bias=True, tie_word_embeddings=False,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0, "factor": 2.0
            },
            "sliding_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 20.0},
        },
    ),
    "gemma4-shared": Gemma4TextConfig(
        **{**GEMMA4, "num_hidden_layers": 6}, num_kv_shared_layers=3, use_double_wide_mlp=True,
        # or transformers would look for embeddings of each layer, which are not there
        output_hidden_states=True,
        layer_types=["sliding_attention", "full_attention"] * 3,
    ),
    "gemma4-own-inputs": Gemma4TextConfig(**{**GEMMA4, **E4B, "num_hidden_layers": 6}),
    "gemma4-own-inputs-alone": Gemma4TextConfig(
        **GEMMA4 | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 330}, attention_k_eq_v=True
    ),
    "gemma4-moe": Gemma4TextConfig(
        **GEMMA4, enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=32, attention_k_eq_v=True
    ),
    "gemma4-unified": Gemma4UnifiedTextConfig(
        **GEMMA, global_head_dim=64, attention_k_eq_v=True, num_global_key_value_heads=1, final_logit_softcapping=3.0
    ),
    "phi3": Phi3Config(**SHAPE, pad_token_id=0),
    "phi3-window": Phi3Config(**SHAPE, pad_token_id=0, sliding_window=24, tie_word_embeddings=True),
    "phi3-partial": Phi3Config(
        **SHAPE, pad_token_id=0, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.75}
    ),
    "phi3-long": Phi3Config(**SHAPE, pad_token_id=0, original_max_position_embeddings=128, rope_parameters=LONG),
    "phi3-short": Phi3Config(**SHAPE, pad_token_id=0, original_max_position_embeddings=256, rope_parameters=LONG),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen2-moe": Qwen2MoeConfig(**SHAPE, **MOE, shared_expert_intermediate_size=48),
    "qwen2-moe-sparse": Qwen2MoeConfig(
        **SHAPE, **MOE, shared_expert_intermediate_size=48, norm_topk_prob=True, qkv_bias=False, decoder_sparse_step=2
    ),
    "qwen3-moe": Qwen3MoeConfig(**SHAPE, **MOE, norm_topk_prob=True),
    "qwen3-moe-dense-layer": Qwen3MoeConfig(**SHAPE, **MOE, mlp_only_layers=[1]),
    "glm4-moe": Glm4MoeConfig(**SHAPE, **GLM_MOE, n_group=4, topk_group=2, use_qk_norm=True, attention_bias=True),
    "glm4-moe-plain": Glm4MoeConfig(**SHAPE, **GLM_MOE, norm_topk_prob=False, n_shared_experts=2),
    **LATENTS,
    "kimi-linear": KimiLinearConfig(**KIMI_LINEAR),
    "kimi-linear-groups": KimiLinearConfig(
        **KIMI_LINEAR | {"linear_head_dim": 24}, n_group=4, topk_group=2, norm_topk_prob=False, n_shared_experts=2,
        mlp_layer_types=["sparse", "dense", "dense", "sparse"], linear_conv_kernel_dim=3,
        q_lora_rank=40,
    ),
    "ling": BailingHybridConfig(**LING),
    "ling-unbounded": BailingHybridConfig(
        **LING | {"head_dim": 24, "n_group": 1, "topk_group": 1}, kda_safe_gate=False, norm_topk_prob=False,
        n_shared_experts=2, short_conv_kernel_size=3, mlp_layer_types=["sparse", "dense", "dense", "sparse"],
        rope_theta=500.0,
    ),
    "minimax-m2": MiniMaxM2Config(
        **SHAPE, num_local_experts=8, num_experts_per_tok=3, head_dim=32, rotary_dim=16, bos_token_id=1, eos_token_id=2
    ),
    "mimo-v2-flash": MiMoV2FlashConfig(**MIMO),
    "mimo-v2-flash-plain": MiMoV2FlashConfig(
        **MIMO | {"v_head_dim": 40}, attention_value_scale=None, attention_bias=True, norm_topk_prob=False, n_group=4,
        topk_group=2, routed_scaling_factor=1.7, mlp_layer_types=["sparse", "dense", "sparse"],
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "hy-v3": HYV3Config(**SHAPE, **MOE, head_dim=16),
    "hy-v3-float32-head": HYV3Config(**SHAPE, **MOE, enable_lm_head_fp32=True, tie_word_embeddings=True),
    "ernie4-5-moe": Ernie4_5_MoeConfig(**SHAPE, moe_num_experts=8, moe_k=3, moe_intermediate_size=32),
    "ernie4-5-moe-few": Ernie4_5_MoeConfig(
        **SHAPE, moe_num_experts=8, moe_k=3, moe_intermediate_size=32, moe_layer_end_index=1, moe_num_shared_experts=0
    ),
    "ernie4-5-vl-moe": Ernie4_5_VLMoeConfig(
        text_config={**SHAPE, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": [32, 16],
                     "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [3, 3, 2]}},
        vision_config=ERNIE_VISION,
    ),
    "hunyuan": HunYuanDenseV1Config(**SHAPE, head_dim=16, rope_parameters=ALPHA),
    "hunyuan-biases": HunYuanDenseV1Config(**SHAPE, head_dim=32, attention_bias=True, tie_word_embeddings=True),
    "hunyuan-moe": HunYuanMoEV1Config(
        **SHAPE, head_dim=16, num_experts=8, moe_topk=3, tie_word_embeddings=True,
        rope_parameters=ALPHA,
    ),
    "muse-glimmer": MuseGlimmerConfig(text_config=MUSE, vision_config=MUSE_VISION),
    "muse-glimmer-windows": MuseGlimmerConfig(
        text_config={**MUSE, "attention_bias": True, "layer_rope_theta": [500.0, 0, 0, 500.0], "post_norm_eps": 1e-3,
                     "layer_types": ["full_attention", "sliding_attention"] * 2},
        vision_config=MUSE_VISION, tie_word_embeddings=True,
    ),
    "arcee": ArceeConfig(**SHAPE, rope_parameters={**YARN, "rope_theta": 10000.0}),
    "arcee-biases": ArceeConfig(**SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "olmo2": Olmo2Config(**SHAPE),
    "olmo2-biases": Olmo2Config(**SHAPE, attention_bias=True, tie_word_embeddings=True),
    "olmo3": Olmo3Config(
        **{**SHAPE, "num_hidden_layers": 4}, sliding_window=24,
        rope_parameters={"full_attention": {**YARN, "rope_theta": 5e5}},
    ),
    "exaone4": Exaone4Config(
        **SHAPE, head_dim=32, sliding_window=24, sliding_window_pattern=2,
        rope_parameters={**LLAMA3, "rope_theta": 1e6},
    ),
    "exaone4-without-window": Exaone4Config(
        **SHAPE, head_dim=16, sliding_window=None, layer_types=["full_attention"] * 3, tie_word_embeddings=True
    ),
    "afmoe": AfmoeConfig(
        **SHAPE, **MOE, head_dim=16, sliding_window=24, global_attn_every_n_layers=2, mup_enabled=True,
        num_shared_experts=1, route_scale=1.7,
    ),
    "afmoe-plain": AfmoeConfig(
        **SHAPE, **MOE, head_dim=32, sliding_window=24, layer_types=["full_attention"] * 2 + ["sliding_attention"],
        num_dense_layers=2, tie_word_embeddings=True,
    ),
    "laguna": LagunaConfig(
        **SHAPE, **MOE, **WINDOWS, shared_expert_intermediate_size=48, num_attention_heads_per_layer=[4, 6, 2],
        moe_routed_scaling_factor=1.7, rope_parameters=TWO_ROPES,
    ),
    "laguna-by-channel": LagunaConfig(
        **SHAPE, **MOE, **WINDOWS, shared_expert_intermediate_size=48, gating="per-element", attention_bias=True,
        mlp_layer_types=["sparse", "dense", "sparse"],
    ),
    "mellum": MellumConfig(
        **SHAPE, **MOE, **WINDOWS,
        rope_parameters={**TWO_ROPES, "full_attention": {**YARN, "rope_theta": 5e5}},
    ),
    "mellum-plain": MellumConfig(
        **SHAPE, **MOE, head_dim=32, norm_topk_prob=False, attention_bias=True, tie_word_embeddings=True,
        mlp_layer_types=["sparse", "dense", "sparse"],
    ),
    "ernie4-5": Ernie4_5Config(**SHAPE, head_dim=32, use_bias=True),
    "seed-oss": SeedOssConfig(**SHAPE, head_dim=32),
    "seed-oss-biases": SeedOssConfig(
        **SHAPE, head_dim=16, attention_bias=False, attention_out_bias=True, mlp_bias=True
    ),
    "smollm3": SmolLM3Config(
        **SHAPE, no_rope_layer_interval=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, attention_bias=True
    ),
    "granite": GraniteConfig(**SHAPE, **GRANITE),
    "granite-biases": GraniteConfig(**SHAPE, residual_multiplier=3.0, attention_bias=True, mlp_bias=True),
    "granite-moe": GraniteMoeConfig(**SHAPE, **GRANITE, num_local_experts=8, num_experts_per_tok=3),
    "granite-moe-biases": GraniteMoeConfig(**SHAPE, num_local_experts=4, attention_bias=True, tie_word_embeddings=True),
    "glm": GlmConfig(**SHAPE, head_dim=16, pad_token_id=0),
    "glm-whole": GlmConfig(
        **SHAPE, head_dim=16, pad_token_id=0, attention_bias=False,
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 1.0, "rope_theta": 500.0},
    ),
    "glm4": Glm4Config(**SHAPE, head_dim=32, pad_token_id=0),
    "gpt-oss": GptOssConfig(**SHAPE, **GPT_OSS, sliding_window=24),
    "gpt-oss-one-window": GptOssConfig(
        **SHAPE, **GPT_OSS, sliding_window=24, attention_bias=False,
        layer_types=["full_attention", "full_attention", "sliding_attention"],
    ),
    "qwen2-vl": Qwen2VLConfig(
        text_config={**SHAPE, "rope_parameters": SECTIONS},
        vision_config={"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 64},
    ),
    "qwen2-5-vl": Qwen2_5_VLConfig(
        text_config={**SHAPE, "rope_parameters": SECTIONS}, vision_config={**VISION, "fullatt_block_indexes": [0]}
    ),
    "qwen2-5-vl-window": Qwen2_5_VLConfig(
        text_config={**SHAPE, "rope_parameters": {**SECTIONS, **YARN}, "use_sliding_window": True, "sliding_window": 24,
                     "max_window_layers": 1},
        vision_config={**VISION, "fullatt_block_indexes": [0]}, tie_word_embeddings=True,
    ),
    "qwen3-vl": Qwen3VLConfig(
        text_config={**SHAPE, "head_dim": 16, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}},
        vision_config=QWEN3_VISION,
    ),
    "qwen3-vl-moe": Qwen3VLMoeConfig(
        text_config={**SHAPE, **MOE, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}},
        vision_config=QWEN3_VISION,
    ),
    "qwen3-vl-moe-dense-layer": Qwen3VLMoeConfig(
        text_config={**SHAPE, **MOE, "mlp_only_layers": [1], "attention_bias": True, "rope_parameters": SECTIONS},
        vision_config=QWEN3_VISION, tie_word_embeddings=True,
    ),
    "glm4v": Glm4vConfig(
        text_config={**SHAPE, "rope_parameters": {**HALF, "partial_rotary_factor": 0.5}},
        vision_config=VISION,
    ),
    "glm4v-whole": Glm4vConfig(text_config={**SHAPE, "rope_parameters": SECTIONS}, vision_config=VISION),
    "glm4v-moe": Glm4vMoeConfig(
        text_config={**SHAPE, **GLM_MOE, "n_group": 4, "topk_group": 2,
                     "rope_parameters": HALF},
        vision_config=VISION,
    ),
    "qwen3-next": Qwen3NextConfig(**DELTA_NET, **MOE, shared_expert_intermediate_size=48),
    "qwen3-next-dense-layer": Qwen3NextConfig(
        **DELTA_NET | {"linear_num_value_heads": 2}, **MOE, shared_expert_intermediate_size=48, mlp_only_layers=[1],
        norm_topk_prob=False, tie_word_embeddings=True, linear_conv_kernel_dim=3,
    ),
    "qwen3-5-text": Qwen3_5TextConfig(**DELTA_NET),
    "qwen3-5": Qwen3_5Config(
        text_config={**DELTA_NET, "rope_parameters": {**HALF, "mrope_interleaved": True, "partial_rotary_factor": 0.5}},
        vision_config=QWEN3_5_VISION, tie_word_embeddings=True,
    ),
    "qwen3-5-moe-text": Qwen3_5MoeTextConfig(**DELTA_NET, **MOE, shared_expert_intermediate_size=48),
    "qwen3-5-moe": Qwen3_5MoeConfig(
        text_config={**DELTA_NET, **MOE, "shared_expert_intermediate_size": 48, "attention_bias": True},
        vision_config=QWEN3_5_VISION,
    ),
    "minicpmv4-6": MiniCPMV4_6Config(
        text_config={**DELTA_NET, "model_type": "qwen3_5_text"}, vision_config=MINICPM_VISION
    ),
    "granite-h": GraniteMoeHybridConfig(
        **GRANITE_H, num_local_experts=0, num_experts_per_tok=0, time_step_limit=(0.3, 0.8)
    ),
    "granite-h-moe": GraniteMoeHybridConfig(
        **GRANITE_H | {"mamba_n_groups": 1}, num_local_experts=8, num_experts_per_tok=3, mamba_proj_bias=True,
        position_embedding_type="rope", attention_bias=True, mamba_d_conv=3, tie_word_embeddings=True,
    ),
    "nemotron-h": NemotronHConfig(**NEMOTRON),
    "nemotron-h-biases": NemotronHConfig(**NEMOTRON, use_bias=True, mlp_bias=True, use_conv_bias=False, conv_kernel=2),
    "nemotron-h-moe": NemotronHConfig(**NEMOTRON_MOE, n_group=4, topk_group=2),
    "nemotron-h-latent": NemotronHConfig(**NEMOTRON_MOE, moe_latent_size=24, norm_topk_prob=False),
    "nemotron-h-omni": NemotronH_Omni_Reasoning_V3_Config(
        text_config=NEMOTRON_MOE, vision_config=RADIO, vision_hidden_size=16, projector_hidden_size=24
    ),
    "step3p7": Step3p7Config(
        text_config={**STEP, "num_sliding_attention_heads": 6, "swiglu_limits": [0.0, 0.3, 0.0],
                     "swiglu_limits_shared": [0.5, 0.0, 0.2], "rope_parameters": TWO_ROPES},
        vision_config=STEP_VISION,
    ),
    "step3p7-plain": Step3p7Config(
        text_config={**STEP, "attention_bias": True, "query_pre_attn_scalar": 24, "mlp_layer_types": ["sparse"] * 3},
        vision_config=STEP_VISION, tie_word_embeddings=True,
    ),
    "lfm2": Lfm2Config(**LFM2),
    "lfm2-biases": Lfm2Config(
        **LFM2 | {"block_auto_adjust_ff_dim": False, "intermediate_size": 96, "tie_word_embeddings": False},
        conv_bias=True, conv_L_cache=5, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "lfm2-moe": Lfm2MoeConfig(**LFM2_MOE),
    "lfm2-moe-plain": Lfm2MoeConfig(
        **LFM2_MOE | {"num_dense_layers": 0, "norm_topk_prob": False, "use_expert_bias": False}, conv_bias=True,
        tie_word_embeddings=False,
    ),
    "lfm2-vl": Lfm2VlConfig(text_config=LFM2, vision_config=SIGLIP, image_token_id=9),
    "opt": OPTConfig(**OPT),
    "opt-untied": OPTConfig(**OPT, tie_word_embeddings=False, enable_bias=False),
    # its norms and projections
    "opt-350m": OPTConfig(**OPT, do_layer_norm_before=False, word_embed_proj_dim=48),
    "opt-without-final-norm": OPTConfig(**OPT, _remove_final_layer_norm=True),
}  # fmt: skip
CASES = [(variant, kernels) for variant in VARIANTS for kernels in ("auto", "reference")]
