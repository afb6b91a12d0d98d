"""Mistral, Ministral 3, Mistral 4, Mistral 3 with pictures, and Mixtral. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from freight.model.config.deriving import default_rope
from freight.model.config.family import LANGUAGE_MODEL, WINDOW_KEYS, Family, RopeForm, words
from freight.model.config.latent import LATENT_FIXED, LATENT_KEYS, translate_latent, with_latent
from freight.model.config.moe import DEEPSEEK_EXPERTS, MoEFamily
from freight.model.config.tensor_names import VISION_TOWER, TensorNames
from freight.operands.routing import Scoring

_MISTRAL = Family(
    "MistralForCausalLM",
    {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "sliding_window": 4096,
        "use_sliding_window": True,
    },
    WINDOW_KEYS,
    mixed_windows=False,
)
_MINISTRAL_3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_MISTRAL_4_ROPE = {
    **_MINISTRAL_3_ROPE,
    "rope_theta": 1e4,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
}
MIXTRAL_TENSORS = TensorNames(
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{}.",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
)

ROWS = {
    "mistral": _MISTRAL,
    "ministral3": Family(
        "Ministral3ForCausalLM",
        {
            "vocab_size": 131072,
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "use_sliding_window": True,
        },
        WINDOW_KEYS,
        mixed_windows=False,
        ropes=frozenset({RopeForm.QUERY_SCALING}),
        translate=lambda config: default_rope(config, _MINISTRAL_3_ROPE),
    ),
    "mistral4": Family(
        "Mistral4ForCausalLM",
        {
            "vocab_size": 131072,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "max_position_embeddings": 1048576,
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 128,
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        LATENT_KEYS,
        fixed={**LATENT_FIXED, "moe_layer_freq": (1,)},
        interleaved=True,
        ropes=frozenset({RopeForm.QUERY_SCALING}),
        moe=replace(DEEPSEEK_EXPERTS, count=128, scoring=Scoring.SOFTMAX, choice_bias=False),
        tensors=TensorNames(shared="mlp.shared_experts."),
        translate=lambda config: translate_latent(
            default_rope(config, _MISTRAL_4_ROPE), whole_heads=True
        ),
        derive=with_latent,
    ),
    "mistral3": replace(
        _MISTRAL,
        architecture="Mistral3ForConditionalGeneration",
        bodies=LANGUAGE_MODEL,
        text_type="mistral",
        other_texts=("ministral3", "mistral4"),
        wrapper_keys=words(
            "vision_config image_token_index image_token_id projector_hidden_act "
            "spatial_merge_size vision_feature_layer multimodal_projector_bias"
        ),
        tensors=TensorNames(shared="mlp.shared_experts.", unused=VISION_TOWER),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "use_sliding_window": True,
            "num_experts_per_tok": 2,
        },
        words("sliding_window"),
        mixed_windows=False,
        theta=1e6,
        moe=MoEFamily(8, width_key="intermediate_size", norm_key=None),
        tensors=MIXTRAL_TENSORS,
    ),
}
