"""GLM 4 of Zhipu: dense, mixtures of experts, and those with pictures; GLM 5. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from freight.base.fields import JsonObject, flag
from freight.model.config.deriving import with_attention
from freight.model.config.family import LANGUAGE_MODEL, M_ROPE, NEXTN, Family, words
from freight.model.config.latent import (
    INDEXED,
    INDEXER,
    INDEXER_KEYS,
    LATENT_FIXED,
    LATENT_KEYS,
    translate_indexed,
    translate_latent,
    with_indexed,
    with_latent,
)
from freight.model.config.layer import NormPlacement
from freight.model.config.model import ModelConfig
from freight.model.config.moe import DEEPSEEK_EXPERTS, DEEPSEEK_EXPERTS_BY_LAYER
from freight.model.config.tensor_names import VISUAL, TensorNames
from freight.model.mixers.attention.spec import QKNormConfig

_OUTSIDE = words(
    "vision_config image_token_id image_start_token_id image_end_token_id video_token_id "
    "video_start_token_id video_end_token_id"
)


def _derive(config: JsonObject, model: ModelConfig) -> ModelConfig:
    norm = QKNormConfig() if flag(config, "use_qk_norm") else None
    return with_attention(model, qk_norm=norm)


_GLM = Family(
    "GlmForCausalLM",
    {
        "vocab_size": 151552,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
    },
    words("attention_bias"),
    bias_keys=("attention_bias", "", ""),
    rotary_factor=0.5,
    interleaved=True,
    tensors=TensorNames(gate_up=("mlp.gate_up_proj",)),
)
_GLM4 = replace(
    _GLM,
    architecture="Glm4ForCausalLM",
    norms=NormPlacement.SANDWICH,
    tensors=TensorNames(
        gate_up=("mlp.gate_up_proj",),
        attention_post="post_self_attn_layernorm.weight",
        mlp_post="post_mlp_layernorm.weight",
    ),
)
_GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    {
        "vocab_size": 151552,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    words("attention_bias use_qk_norm"),
    bias_keys=("attention_bias", "", ""),
    derive=_derive,
    rotary_factor=0.5,
    moe=replace(DEEPSEEK_EXPERTS, count=128),
    next_token_keys=words("num_nextn_predict_layers num_mtp_layers"),
    predicting=NEXTN,
    tensors=TensorNames(shared="mlp.shared_experts."),
)
_GLM4_MOE_LITE = replace(
    _GLM4_MOE,
    architecture="Glm4MoeLiteForCausalLM",
    defaults={
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    keys=LATENT_KEYS,
    fixed={**LATENT_FIXED, "topk_method": ("noaux_tc",)},
    bias_keys=("", "", ""),
    rotary_factor=None,
    interleaved=True,
    moe=replace(DEEPSEEK_EXPERTS_BY_LAYER, count=64),
    translate=translate_latent,
    derive=with_latent,
)
_GLM_MOE_DSA = replace(
    _GLM4_MOE_LITE,
    architecture="GlmMoeDsaForCausalLM",
    defaults={
        **_GLM4_MOE_LITE.defaults,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "q_lora_rank": 2048,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "index_topk": 2048,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "indexer_rope_interleave": True,
    },
    keys=LATENT_KEYS | INDEXER_KEYS,
    fixed={
        **_GLM4_MOE_LITE.fixed,
        "scoring_func": ("sigmoid",),
        "moe_layer_freq": (1,),
        "moe_router_dtype": ("float32",),
    },
    other_layers=(INDEXED,),
    moe=DEEPSEEK_EXPERTS_BY_LAYER,
    tensors=replace(_GLM4_MOE_LITE.tensors, unused=INDEXER),
    translate=translate_indexed,
    derive=with_indexed,
)
_GLM4V = replace(
    _GLM4,
    architecture="Glm4vForConditionalGeneration",
    defaults={
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
    },
    qkv_bias=True,
    rotary_factor=1.0,
    ropes=M_ROPE,
    bodies=LANGUAGE_MODEL,
    text_type="glm4v_text",
    wrapper_keys=_OUTSIDE,
    tensors=replace(_GLM4.tensors, unused=VISUAL),
)

ROWS = {
    "glm": _GLM,
    "glm4": _GLM4,
    "glm4_moe": _GLM4_MOE,
    "glm4_moe_lite": _GLM4_MOE_LITE,
    "glm_moe_dsa": _GLM_MOE_DSA,
    "glm4v": _GLM4V,
    "glm46v": replace(_GLM4V, architecture="Glm46VForConditionalGeneration"),
    "glmga": replace(_GLM4V, architecture="Glm46VForConditionalGeneration"),
    "glm4v_moe": replace(
        _GLM4_MOE,
        architecture="Glm4vMoeForConditionalGeneration",
        defaults={
            "vocab_size": 151424,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        keys=words("attention_bias"),
        derive=None,
        ropes=M_ROPE,
        bodies=LANGUAGE_MODEL,
        text_type="glm4v_moe_text",
        wrapper_keys=_OUTSIDE,
        tensors=replace(_GLM4_MOE.tensors, unused=VISUAL),
    ),
}
