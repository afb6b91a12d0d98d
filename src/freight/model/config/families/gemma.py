"""Gemma 2 and 3 of Google. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from freight.base.fields import JsonObject, flag, integer
from freight.model.config.family import ATTENTION_BIAS, LANGUAGE_MODEL, Family, words
from freight.model.config.layer import NormPlacement
from freight.model.config.model import ModelConfig
from freight.model.config.tensor_names import VISION_TOWER, TensorNames
from freight.model.mixers.attention.spec import QKNormConfig


def _derive(config: JsonObject, model: ModelConfig) -> ModelConfig:
    """Set the norms to multiply by 1 + weight."""
    return replace(model, norm_offset=1.0, wide_norms=True)


def _translate_text(config: JsonObject) -> JsonObject:
    """Turn EmbeddingGemma's window, which counts the keys on both sides, into that of one side."""
    if not flag(config, "use_bidirectional_attention") or config.get("sliding_window") is None:
        return config
    return {**config, "sliding_window": integer(config, "sliding_window") // 2 + 1}


def _derive_text(config: JsonObject, model: ModelConfig) -> ModelConfig:
    """Let tokens of EmbeddingGemma see those after them, too."""
    both_ways = flag(config, "use_bidirectional_attention")
    return replace(_derive(config, model), attends_both_ways=both_ways)


GEMMA_TENSORS = TensorNames(
    mlp_norm="pre_feedforward_layernorm.weight",
    attention_post="post_attention_layernorm.weight",
    mlp_post="post_feedforward_layernorm.weight",
)
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
_GEMMA_KEYS = words(
    "query_pre_attn_scalar attention_bias sliding_window layer_types cache_implementation"
)
_GEMMA3 = Family(
    "Gemma3ForCausalLM",
    {
        **_GEMMA,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
    },
    _GEMMA_KEYS | words("sliding_window_pattern rope_local_base_freq"),
    bias_keys=ATTENTION_BIAS,
    qk_norm=QKNormConfig(),
    norms=NormPlacement.SANDWICH,
    derive=_derive,
    scales_embedding=True,
    activation_key="hidden_activation",
    theta=1e6,
    local_theta=1e4,
    tensors=GEMMA_TENSORS,
)

ROWS = {
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
        bias_keys=ATTENTION_BIAS,
        norms=NormPlacement.SANDWICH,
        derive=_derive,
        scales_embedding=True,
        activation_key="hidden_activation",
        tensors=GEMMA_TENSORS,
    ),
    "gemma3_text": replace(
        _GEMMA3,
        keys=_GEMMA3.keys | words("use_bidirectional_attention"),
        translate=_translate_text,
        derive=_derive_text,
    ),
    "gemma3": replace(
        _GEMMA3,
        architecture="Gemma3ForConditionalGeneration",
        bodies=LANGUAGE_MODEL,
        text_type="gemma3_text",
        wrapper_keys=words(
            "vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index"
        ),
        tensors=replace(GEMMA_TENSORS, unused=VISION_TOWER),
    ),
}
