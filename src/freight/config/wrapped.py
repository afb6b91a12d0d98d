"""Rows of `FAMILIES` for models of text and pictures, of which the text model alone runs. Imports no torch.

Their ropes have sections for time, height and width (M-RoPE). A text token has one position in all three, with which
such a rope is a plain one. What their vision models add, they add to the tokens of pictures alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from freight.config.family import Family, words

_UNDER = (("model.language_model.", ""), ("language_model.model.", "language_model."))
_PLAIN_TOO = (*_UNDER, ("model.", ""))
_QWEN_KEYS = words("vision_config image_token_id video_token_id vision_token_id vision_start_token_id") | words(
    "vision_end_token_id"
)
_GLM_KEYS = words("vision_config image_token_id image_start_token_id image_end_token_id video_token_id") | words(
    "video_start_token_id video_end_token_id"
)
_INTERN_KEYS = words("vision_config image_token_id image_seq_length downsample_ratio projector_hidden_act") | words(
    "vision_feature_layer vision_feature_select_strategy"
)
# of InternVL's own code; `hidden_size` is that of the text model again
_CHAT_KEYS = words("vision_config downsample_ratio dynamic_image_size force_image_size hidden_size image_fold") | words(
    "max_dynamic_patch min_dynamic_patch pad2square ps_version select_layer system_message template use_thumbnail"
)
# of adapters that are not merged: their tensors' names are refused
_ADAPTERS = words("use_backbone_lora use_llm_lora")


def wrapped(rows: Mapping[str, Family]) -> dict[str, Family]:
    """The rows, made of those of the text models in `rows`."""
    return {**_qwen(rows), **_glm(rows), **_others(rows)}


def _qwen(rows: Mapping[str, Family]) -> dict[str, Family]:
    return {
        "qwen2_5_vl": replace(
            rows["qwen2"],
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
            sections=True,
            bodies=_PLAIN_TOO,
            text_type="qwen2_5_vl_text",
            flat=True,
            wrapper_keys=_QWEN_KEYS,
        ),
        "qwen3_vl": replace(
            rows["qwen3"],
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
            sections=True,
            bodies=_UNDER,
            text_type="qwen3_vl_text",
            wrapper_keys=_QWEN_KEYS,
        ),
        "qwen3_vl_moe": _qwen_moe(rows["qwen3_moe"]),
    }


def _qwen_moe(row: Family) -> Family:
    """Weights of a token are always divided by their sum, whatever `norm_topk_prob` says."""
    assert row.moe is not None
    return replace(
        row,
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
        moe=replace(row.moe, count=60, norm_key=None),
        theta=5e5,
        sections=True,
        bodies=_UNDER,
        text_type="qwen3_vl_moe_text",
        wrapper_keys=_QWEN_KEYS,
    )


def _glm(rows: Mapping[str, Family]) -> dict[str, Family]:
    dense = replace(
        rows["glm4"],
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
        sections=True,
        bodies=_UNDER,
        text_type="glm4v_text",
        wrapper_keys=_GLM_KEYS,
    )
    return {
        "glm4v": dense,
        "glm46v": replace(dense, architecture="Glm46VForConditionalGeneration"),
        "glmga": replace(dense, architecture="Glm46VForConditionalGeneration"),
        "glm4v_moe": replace(
            rows["glm4_moe"],
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
            qk_norm_key=None,
            sections=True,
            bodies=_UNDER,
            text_type="glm4v_moe_text",
            wrapper_keys=_GLM_KEYS,
        ),
    }


def _others(rows: Mapping[str, Family]) -> dict[str, Family]:
    intern = replace(
        rows["qwen2"],
        architecture="InternVLForConditionalGeneration",
        bodies=_UNDER,
        text_type="qwen2",
        other_texts=("qwen3", "qwen3_moe", "llama"),
        wrapper_keys=_INTERN_KEYS,
    )
    return {
        "internvl": intern,
        "interns1": replace(intern, architecture="InternS1ForConditionalGeneration"),
        "internvl_chat": replace(
            intern,
            architecture="InternVLChatModel",
            bodies=_UNDER[1:],
            text_key="llm_config",
            wrapper_keys=_CHAT_KEYS | _ADAPTERS,
        ),
        "phi4mm": replace(
            rows["phi3"],
            architecture="Phi4MMForCausalLM",
            text_type="phi3",
            flat=True,
            wrapper_keys=words("audio_processor embd_layer img_processor speech_lora vision_lora"),
        ),
    }
