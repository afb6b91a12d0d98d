"""gpt-oss. Imports no torch."""

from __future__ import annotations

from freight.model.config.deriving import default_rope, with_attention
from freight.model.config.family import ATTENTION_BIAS, Family, words
from freight.model.config.moe import MoEFamily
from freight.model.config.tensor_names import TensorNames
from freight.operands.activation import GatedActivation
from freight.operands.routing import Scoring

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
ROWS = {
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
        bias_keys=ATTENTION_BIAS,
        synonyms={"experts_per_token": "num_experts_per_tok"},
        fixed={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        wide_norms=True,
        theta=150000.0,
        translate=lambda config: default_rope(config, _ROPE),
        derive=lambda config, model: with_attention(model, sinks=True),
        moe=MoEFamily(
            128,
            width_key="intermediate_size",
            scoring=Scoring.CHOSEN,
            norm_key=None,
            router_bias=True,
            bias=True,
            activation=GatedActivation.CLAMPED_SWIGLU,
        ),
        tensors=TensorNames(
            router="mlp.router",
            expert="mlp.experts.",
            expert_gate_up=("gate_up_proj",),
            interleaved=True,
        ),
    ),
}
