"""The families of models that Freight runs, as data: one row for each model_type of a config.json. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from freight.config.experts import MoEFamily
from freight.config.family import Family, words
from freight.config.gemma import GEMMAS
from freight.config.layer import NormKind, NormPlacement
from freight.config.mixtures import MIXTURES
from freight.config.output_norms import OUTPUT_NORMS
from freight.config.wrapped import wrapped
from freight.operands.activation import GatedActivation
from freight.operands.routing import Scoring

_SPARSE = words("decoder_sparse_step mlp_only_layers")
_WINDOW_KEYS = words("sliding_window use_sliding_window layer_types")
_MULTIPLIERS = words("embedding_multiplier attention_multiplier residual_multiplier logits_scaling")
_GRANITE = Family(
    "GraniteForCausalLM",
    {
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **dict.fromkeys(_MULTIPLIERS, 1.0),
    },
    words("attention_bias mlp_bias") | _MULTIPLIERS,
    multipliers=True,
)
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
)

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
    _WINDOW_KEYS,
    mixed_windows=False,
)

_ROWS = {
    "llama": Family(
        "LlamaForCausalLM",
        {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
        words("attention_bias mlp_bias layer_types"),
    ),
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
        _WINDOW_KEYS,
        mixed_windows=False,
        query_scaling=True,
        default_rope={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "mistral3": replace(
        _MISTRAL,
        architecture="Mistral3ForConditionalGeneration",
        bodies=(("model.language_model.", ""), ("language_model.model.", "language_model.")),
        text_type="mistral",
        other_texts=("ministral3",),
        wrapper_keys=words("vision_config image_token_index image_token_id projector_hidden_act spatial_merge_size")
        | words("vision_feature_layer multimodal_projector_bias"),
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        _WINDOW_KEYS | {"max_window_layers"},
        qkv_bias=True,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        _WINDOW_KEYS | {"max_window_layers", "attention_bias"},
        qk_norm=True,
    ),
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
        _WINDOW_KEYS | {"max_window_layers", "qkv_bias"},
        bias_keys=("qkv_bias", "", ""),
        moe=MoEFamily(60, shared_width_key="shared_expert_intermediate_size", shared_gate=True, dense_keys=_SPARSE),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        words("sliding_window use_sliding_window max_window_layers attention_bias"),
        qk_norm=True,
        mixed_windows=False,
        moe=MoEFamily(128, dense_keys=_SPARSE),
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
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "sliding_window": 128,
            "use_sliding_window": True,
            "sliding_window_pattern": 2,
            "num_experts_per_tok": 4,
        },
        # initial_context_length is original_max_position_embeddings again, for OpenAI's own code
        words("attention_bias sliding_window layer_types initial_context_length"),
        fixed={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        sinks=True,
        wide_norms=True,
        theta=150000.0,
        default_rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        moe=MoEFamily(
            128,
            top_k_keys=("num_experts_per_tok", "experts_per_token"),
            width_key="intermediate_size",
            scoring=Scoring.CHOSEN,
            norm_key=None,
            router_bias=True,
            bias=True,
            activation=GatedActivation.CLAMPED_SWIGLU,
        ),
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {
            "vocab_size": 32064,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 32000,
            "use_sliding_window": True,
        },
        words("sliding_window attention_bias mlp_bias lm_head_bias"),
        mixed_windows=False,
        rotary_factor=1.0,
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        {
            "vocab_size": 103424,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": True,
        },
        words("use_bias"),
        bias_keys=("use_bias",) * 3,
        theta=5e5,
        interleaved=True,
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        {
            "vocab_size": 155136,
            "max_position_embeddings": 524288,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "attention_bias": True,
        },
        words("attention_bias attention_out_bias mlp_bias"),
        bias_keys=("attention_bias", "attention_out_bias", "mlp_bias"),
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {
            "vocab_size": 128256,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        words("attention_bias mlp_bias layer_types sliding_window use_sliding_window no_rope_layers")
        | words("no_rope_layer_interval"),
        theta=2e6,
    ),
    "granite": _GRANITE,
    "granitemoe": replace(
        _GRANITE,
        architecture="GraniteMoeForCausalLM",
        defaults={**_GRANITE.defaults, "num_experts_per_tok": 2},
        keys=words("attention_bias") | _MULTIPLIERS,
        moe=MoEFamily(8, width_key="intermediate_size", scoring=Scoring.CHOSEN, norm_key=None),
    ),
    "glm": _GLM,
    "glm4": replace(_GLM, architecture="Glm4ForCausalLM", norms=NormPlacement.SANDWICH),
    "arcee": Family(
        "ArceeForCausalLM",
        {
            "vocab_size": 32000,
            "hidden_size": 2560,
            "intermediate_size": 18432,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "hidden_act": "relu2",
        },
        words("attention_bias mlp_bias"),
        gated=False,
    ),
    "opt": Family(
        "OPTForCausalLM",
        {
            "vocab_size": 50272,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "ffn_dim": 3072,
            "max_position_embeddings": 2048,
            "activation_function": "relu",
            "enable_bias": True,
            "do_layer_norm_before": True,
            "layer_norm_elementwise_affine": True,
            "bos_token_id": 2,
            "eos_token_id": 2,
            "tie_word_embeddings": True,
        },
        words("ffn_dim activation_function enable_bias word_embed_proj_dim")
        | words("do_layer_norm_before layer_norm_elementwise_affine _remove_final_layer_norm"),
        words("intermediate_size hidden_act hidden_activation num_key_value_heads head_dim rms_norm_eps rope_theta")
        | words("rope_scaling rope_parameters original_max_position_embeddings partial_rotary_factor")
        | words("attn_logit_softcapping final_logit_softcapping"),
        norm_kind=NormKind.LAYER,
        norm_eps=1e-5,
        gated=False,
        activation_key="activation_function",
        width_key="ffn_dim",
        bias_keys=("enable_bias",) * 3,
        position_offset=2,
        bodies=(("model.decoder.", ""), ("decoder.", "")),  # facebook's own files have the second
    ),
    **GEMMAS,
    **MIXTURES,
    **OUTPUT_NORMS,
}
FAMILIES = {**_ROWS, **wrapped(_ROWS)}
