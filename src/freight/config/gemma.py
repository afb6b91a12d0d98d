"""The rows of Gemma's models (`config/families.py`). Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from freight.config.experts import MoEFamily
from freight.config.family import Family, words
from freight.config.layer import NormPlacement

_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "use_sliding_window": True,
}
_GEMMA_KEYS = words("query_pre_attn_scalar attention_bias sliding_window layer_types cache_implementation")
_GEMMA3 = Family(
    "Gemma3ForCausalLM",
    {**_GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6},
    _GEMMA_KEYS | words("sliding_window_pattern rope_local_base_freq"),
    qk_norm=True,
    norms=NormPlacement.SANDWICH,
    norm_offset=1.0,
    scales_embedding=True,
    activation_key="hidden_activation",
    theta=1e6,
    local_theta=1e4,
)
_GEMMA4 = Family(
    "Gemma4ForCausalLM",
    {
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
        "bos_token_id": 2,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "use_sliding_window": True,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    },
    words("attention_bias sliding_window layer_types global_head_dim num_global_key_value_heads attention_k_eq_v")
    | words("per_layer_config hidden_size_per_layer_input vocab_size_per_layer_input")
    | words("num_kv_shared_layers use_double_wide_mlp"),
    moe=MoEFamily(
        count_keys=("num_experts",),
        top_k_keys=("top_k_experts",),
        norm_key=None,
        switch_key="enable_moe_block",
        beside=True,
    ),
    # sees tokens of one image in both directions, and those of text as other models do
    fixed={"use_bidirectional_attention": ("vision",)},
    qk_norm=True,
    v_norm=True,
    own_heads=True,
    softmax_scale=1.0,
    norms=NormPlacement.SANDWICH,
    wide_norms=True,
    scales_embedding=True,
    layer_scalar=True,
    activation_key="hidden_activation",
    theta=1e6,
    local_theta=1e4,
    proportional=True,
)
_UNIFIED = replace(
    _GEMMA4,
    architecture="Gemma4UnifiedForCausalLM",
    defaults={key: value for key, value in _GEMMA4.defaults.items() if "per_layer_input" not in key}
    | {"max_position_embeddings": 262144, "sliding_window": 1024},
    keys=_GEMMA4.keys - words("hidden_size_per_layer_input vocab_size_per_layer_input"),
    moe=None,
)
_GEMMA4_OUTSIDE = words("vision_config audio_config boi_token_id eoi_token_id image_token_id video_token_id") | words(
    "boa_token_id eoa_token_index eoa_token_id audio_token_id vision_soft_tokens_per_image"
)

GEMMAS = {
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            **_GEMMA,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        _GEMMA_KEYS,
        norms=NormPlacement.SANDWICH,
        norm_offset=1.0,
        scales_embedding=True,
        activation_key="hidden_activation",
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": replace(
        _GEMMA3,
        architecture="Gemma3ForConditionalGeneration",
        bodies=(("model.language_model.", ""), ("language_model.model.", "language_model.")),
        text_type="gemma3_text",
        wrapper_keys=words("vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index"),
    ),
    "gemma4_text": _GEMMA4,
    "gemma4": replace(
        _GEMMA4,
        architecture="Gemma4ForConditionalGeneration",
        bodies=(("model.language_model.", ""), ("language_model.model.", "language_model.")),
        text_type="gemma4_text",
        wrapper_keys=_GEMMA4_OUTSIDE,
    ),
    "gemma4_unified_text": _UNIFIED,
    "gemma4_unified": replace(
        _UNIFIED,
        architecture="Gemma4UnifiedForConditionalGeneration",
        bodies=(("model.language_model.", ""), ("language_model.model.", "language_model.")),
        text_type="gemma4_unified_text",
        wrapper_keys=_GEMMA4_OUTSIDE,
    ),
}
