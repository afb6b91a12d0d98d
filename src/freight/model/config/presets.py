"""Shapes of well-known models as config.json content, for `--random-weights`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from freight.base.fields import JsonObject
from freight.base.files import read_object
from freight.errors import ConfigError, choices, nearest


def _llama(
    hidden: int, layers: int, intermediate: int, heads: int, head_dim: int, vocabulary: int
) -> JsonObject:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
    }


_GEMMA_2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "torch_dtype": "bfloat16",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
_GEMMA_3_27B = {  # the text model
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "torch_dtype": "bfloat16",
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 168,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 1024,
}
_PHI_3_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "torch_dtype": "bfloat16",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 96,
    "sliding_window": 2047,
}
_QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
_MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
_QWEN3_5_9B = {  # the text model; every fourth layer has attention, the others a gated delta net
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
    },
    "tie_word_embeddings": False,
}
_QWEN3_5_08B = {
    **_QWEN3_5_9B,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}
_GLM_4_7_FLASH = {  # latent attention
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "dtype": "bfloat16",
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
    "norm_topk_prob": True,
    "max_position_embeddings": 202752,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}
_OPT_125M = {  # the other keys have the family's defaults
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "torch_dtype": "float16",
}

PRESETS: Mapping[str, JsonObject] = {
    # Hidden size, layers, intermediate size, heads, head size, vocabulary: a small one in the first,
    # nearly all of whose weights are in decoder layers
    "llama-1b": _llama(2048, 16, 8192, 32, 64, 8192),
    "llama-1b-128k": _llama(2048, 16, 8192, 32, 64, 128256),
    "llama-8b": _llama(4096, 32, 14336, 32, 128, 128256),
    "llama-70b": _llama(8192, 80, 28672, 64, 128, 128256),
    "gemma-2-2b": _GEMMA_2_2B,
    "gemma-3-27b": _GEMMA_3_27B,
    "phi-3-mini": _PHI_3_MINI,
    "opt-125m": _OPT_125M,
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "qwen3-coder-30b-a3b": {
        **_QWEN3_30B_A3B,
        "max_position_embeddings": 262144,
        "rope_theta": 10000000.0,
    },
    "mixtral-8x7b": _MIXTRAL_8X7B,
    "qwen3.5-0.8b": _QWEN3_5_08B,
    "qwen3.5-9b": _QWEN3_5_9B,
    "glm-4.7-flash": _GLM_4_7_FLASH,
}


_SMALL_VOCABULARY = 8192  # for a preset with fewer layers, to measure its layers


def is_preset(shape: str) -> bool:
    """Return whether `shape` is the name of a preset, alone or with a number of layers."""
    return shape.partition(":")[0] in PRESETS


def preset(shape: str) -> JsonObject:
    """Return the config.json content of NAME, NAME:LAYERS or NAME:LAYERS:VOCABULARY.

    With LAYERS the model has that many layers, and a vocabulary of VOCABULARY. Its default is the
    preset's, but at most 8192, so that nearly all weights are in layers. Raises ConfigError unless
    the numbers are integers above 0.
    """
    name, *numbers = shape.split(":")
    if not numbers:
        return PRESETS[name]
    if len(numbers) > 2 or not all(
        number.isascii() and number.isdigit() and int(number) > 0 for number in numbers
    ):
        raise ConfigError(
            f"the shape {shape!r} is not of the form NAME:LAYERS or NAME:LAYERS:VOCABULARY, as in {name}:8 and "
            f"{name}:8:8192"
        )
    layers, *vocabulary = map(int, numbers)
    full = PRESETS[name].get("vocab_size")
    small = _SMALL_VOCABULARY if full is None else min(full, _SMALL_VOCABULARY)
    return {
        **PRESETS[name],
        "num_hidden_layers": layers,
        "vocab_size": vocabulary[0] if vocabulary else small,
    }


def shape_config(shape: str) -> JsonObject:
    """Return config.json content for `--random-weights SHAPE`: a preset, or the path of a
    config.json or its folder.

    Raises ConfigError for anything else.
    """
    if is_preset(shape):
        return preset(shape)
    path = Path(shape)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        known = choices((*PRESETS, "CONFIG.json"))
        raise ConfigError(
            f"--random-weights {shape!r} is not a file{nearest(shape, PRESETS)}: choose {known}"
        )
    try:
        return read_object(path)
    except ValueError as error:
        raise ConfigError(f"--random-weights {path} {error}") from error
