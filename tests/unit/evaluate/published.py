"""The config.json of models that people run, as their authors published them, and small models of
the same shape.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

LLAMA_3_1_8B: Json = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_3_1_70B: Json = LLAMA_3_1_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
GEMMA_3_27B: Json = {  # a model of text and pictures
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}

_SMALL_LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 16,
    "num_attention_heads": 8,
}
_SMALL_LLAMA |= {"max_position_embeddings": 1024, "vocab_size": 320}
SMALL: dict[str, Json] = {  # the published keys, with small sizes
    "llama-3.1-8b": LLAMA_3_1_8B
    | _SMALL_LLAMA
    | {"num_hidden_layers": 4, "num_key_value_heads": 2},
    "llama-3.1-70b": LLAMA_3_1_70B
    | _SMALL_LLAMA
    | {"num_hidden_layers": 5, "num_key_value_heads": 1},
    "gemma-3-27b": GEMMA_3_27B
    | {
        "text_config": GEMMA_3_27B["text_config"]
        | {
            "hidden_size": 128,
            "intermediate_size": 256,
            "head_dim": 16,
            "num_attention_heads": 4,
            "vocab_size": 320,
        }
        | {
            "num_hidden_layers": 7,
            "num_key_value_heads": 2,
            "sliding_window": 96,
            "max_position_embeddings": 1024,
        }
    },
}
