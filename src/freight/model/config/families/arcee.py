"""Arcee and Trinity (AFMoE) of Arcee AI. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from freight.base.fields import JsonObject, flag
from freight.model.config.deriving import rotate_in_windows, with_attention
from freight.model.config.family import ATTENTION_BIAS, Family, words
from freight.model.config.layer import NormPlacement
from freight.model.config.model import ModelConfig
from freight.model.config.moe import MoEFamily
from freight.model.config.tensor_names import TensorNames
from freight.model.mixers.attention.spec import AttentionNames, OutputGateConfig, QKNormConfig
from freight.operands.activation import GateFunction
from freight.operands.routing import Scoring


def _derive(config: JsonObject, model: ModelConfig) -> ModelConfig:
    """Multiply the embedding's rows by the square root of `hidden_size`, not rounded, if
    `mup_enabled`.
    """
    model = with_attention(model, output_gate=OutputGateConfig(GateFunction.SIGMOID, by_head=False))
    if flag(config, "mup_enabled"):
        model = replace(model, embedding_multiplier=float(model.hidden_size**0.5))
    return rotate_in_windows(config, model)


ROWS = {
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
        bias_keys=ATTENTION_BIAS,
        gated=False,
        tensors=TensorNames(gate_up=("mlp.up_proj",)),
    ),
    "afmoe": Family(
        "AfmoeForCausalLM",
        {
            "vocab_size": 200192,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "head_dim": 128,
            "max_position_embeddings": 16384,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "num_shared_experts": 2,
            "num_dense_layers": 1,
            "sliding_window": 1024,
            "use_sliding_window": True,
            "global_attn_every_n_layers": 4,
        },
        # how products are computed and how experts were balanced in training
        words(
            "attention_bias sliding_window layer_types global_attn_every_n_layers mup_enabled "
            "use_grouped_mm load_balance_coeff"
        ),
        bias_keys=ATTENTION_BIAS,
        fixed={
            "score_func": ("sigmoid",),
            "route_norm": (True,),
            "n_group": (1,),
            "topk_group": (1,),
            "num_expert_groups": (1,),
            "num_limited_groups": (1,),
        },
        qk_norm=QKNormConfig(),
        norms=NormPlacement.SANDWICH,
        wide_norms=True,
        derive=_derive,
        moe=MoEFamily(
            64,
            scoring=Scoring.SIGMOID,
            norm_key=None,
            factor_key="route_scale",
            choice_bias=True,
            shared_count_key="num_shared_experts",
            dense_keys=words("num_dense_layers"),
        ),
        tensors=TensorNames(
            mixers=(AttentionNames(output_gate="self_attn.gate_proj"),),
            router="mlp.router.gate",
            choice_bias="mlp.expert_bias",
            shared="mlp.shared_experts.",
            mlp_norm="pre_mlp_layernorm.weight",
            attention_post="post_attention_layernorm.weight",
            mlp_post="post_mlp_layernorm.weight",
        ),
    ),
}
