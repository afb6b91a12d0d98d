"""Qwen: dense, mixtures of experts, and those with pictures. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from freight.model.config.family import (
    ATTENTION_BIAS,
    LANGUAGE_MODEL,
    M_ROPE,
    WINDOW_KEYS,
    Family,
    words,
)
from freight.model.config.moe import MoEFamily
from freight.model.config.tensor_names import VISUAL, TensorNames
from freight.model.mixers.attention.spec import QKNormConfig

_SPARSE = words("decoder_sparse_step mlp_only_layers")
_OUTSIDE = words(
    "vision_config image_token_id video_token_id vision_token_id vision_start_token_id "
    "vision_end_token_id"
)
QWEN2 = Family(
    "Qwen2ForCausalLM",
    {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    WINDOW_KEYS | {"max_window_layers"},
    qkv_bias=True,
)
_QWEN3 = Family(
    "Qwen3ForCausalLM",
    {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    WINDOW_KEYS | {"max_window_layers", "attention_bias"},
    bias_keys=ATTENTION_BIAS,
    qk_norm=QKNormConfig(),
)
_QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    words("sliding_window use_sliding_window max_window_layers attention_bias"),
    bias_keys=ATTENTION_BIAS,
    fixed={"use_qk_norm": (True,)},
    qk_norm=QKNormConfig(),
    mixed_windows=False,
    moe=MoEFamily(128, dense_keys=_SPARSE),
)
_QWEN2_5_VL = replace(
    QWEN2,
    architecture="Qwen2_5_VLForConditionalGeneration",
    defaults={
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "max_window_layers": 80,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    theta=1e6,
    ropes=M_ROPE,
    bodies=(*LANGUAGE_MODEL, ("model.", "")),
    text_type="qwen2_5_vl_text",
    flat=True,
    wrapper_keys=_OUTSIDE,
    tensors=TensorNames(unused=VISUAL),
)

ROWS = {
    "qwen2": QWEN2,
    "qwen3": _QWEN3,
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 16,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        WINDOW_KEYS | {"max_window_layers", "qkv_bias"},
        bias_keys=("qkv_bias", "", ""),
        moe=MoEFamily(
            60,
            shared_width_key="shared_expert_intermediate_size",
            shared_gate=True,
            dense_keys=_SPARSE,
        ),
    ),
    "qwen3_moe": _QWEN3_MOE,
    "qwen2_vl": replace(
        _QWEN2_5_VL, architecture="Qwen2VLForConditionalGeneration", text_type="qwen2_vl_text"
    ),
    "qwen2_5_vl": _QWEN2_5_VL,
    "qwen3_vl": replace(
        _QWEN3,
        architecture="Qwen3VLForConditionalGeneration",
        defaults={
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 128000,
        },
        keys=words("attention_bias"),
        theta=5e5,
        ropes=M_ROPE,
        bodies=LANGUAGE_MODEL,
        text_type="qwen3_vl_text",
        wrapper_keys=_OUTSIDE,
        tensors=TensorNames(unused=VISUAL),
    ),
    # the model always divides a token's weights by their sum
    "qwen3_vl_moe": replace(
        _QWEN3_MOE,
        architecture="Qwen3VLMoeForConditionalGeneration",
        defaults={
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 128000,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
        },
        keys=words("attention_bias"),
        fixed={"norm_topk_prob": (True,)},
        moe=MoEFamily(60, norm_key=None, dense_keys=_SPARSE),
        theta=5e5,
        ropes=M_ROPE,
        bodies=LANGUAGE_MODEL,
        text_type="qwen3_vl_moe_text",
        wrapper_keys=_OUTSIDE,
        tensors=TensorNames(stacked_turned=True, unused=VISUAL),
    ),
}
