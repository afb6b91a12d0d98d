"""Laguna of Poolside. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from freight.base.fields import JsonObject, integer
from freight.errors import CheckpointError
from freight.model.config.attention import require_multiple
from freight.model.config.deriving import with_mixers
from freight.model.config.family import ATTENTION_BIAS, Family, words
from freight.model.config.model import ModelConfig
from freight.model.config.moe import MoEFamily
from freight.model.config.tensor_names import TensorNames
from freight.model.mixers.attention.spec import AttentionConfig, OutputGateConfig, QKNormConfig
from freight.operands.activation import GateFunction
from freight.operands.routing import Scoring


def _derive(config: JsonObject, model: ModelConfig) -> ModelConfig:
    gate = OutputGateConfig(GateFunction.SOFTPLUS, by_head=_gated_by_head(config))
    mixers = [replace(mixer, output_gate=gate) for mixer in model.attention.values()]
    return with_mixers(model, _with_heads(config, mixers))


def _gated_by_head(config: JsonObject) -> bool:
    """Return whether all channels of a head have one factor."""
    gating = config.get("gating")
    if gating is not True and gating not in ("per-head", "per-element"):
        raise CheckpointError(
            f"config.json: gating = {gating!r} is not implemented; true, 'per-head' and 'per-element' are"
        )
    return gating != "per-element"


def _with_heads(config: JsonObject, mixers: Sequence[AttentionConfig]) -> Sequence[AttentionConfig]:
    """Give `mixers` the query heads of `num_attention_heads_per_layer`, if it is present."""
    key = "num_attention_heads_per_layer"
    counts = config.get(key)
    if counts is None:
        return mixers
    if not isinstance(counts, list) or len(counts) != len(mixers):
        raise CheckpointError(
            f"config.json: {key} = {counts!r} must be a list of num_hidden_layers = {len(mixers)} numbers"
        )
    heads = [integer({key: count}, key) for count in counts]
    for count in heads:
        require_multiple(count, mixers[0].num_kv_heads, "num_key_value_heads", key)
    return [replace(mixer, num_heads=count) for mixer, count in zip(mixers, heads, strict=True)]


ROWS = {
    "laguna": Family(
        "LagunaForCausalLM",
        {
            "vocab_size": 100352,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 40,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "sliding_window": 512,
            "use_sliding_window": True,
            "sliding_window_pattern": 1,  # without layer_types no layer has a window
            "gating": True,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "default",
                    "rope_theta": 500000.0,
                    "partial_rotary_factor": 0.5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        words("attention_bias sliding_window layer_types gating num_attention_heads_per_layer"),
        bias_keys=ATTENTION_BIAS,
        # keys of older files about routers and layers with experts; mlp_layer_types decides the latter
        fixed={
            "norm_topk_prob": (True,),
            "moe_router_use_sigmoid": (True,),
            "moe_router_score_func": ("sigmoid",),
            "moe_router_logit_softcapping": (0,),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": (0,),
        },
        qk_norm=QKNormConfig(),
        theta=5e5,
        local_theta=1e4,
        derive=_derive,
        rotary_factor=1.0,
        moe=MoEFamily(
            256,
            scoring=Scoring.SIGMOID,
            norm_key=None,
            factor_key="moe_routed_scaling_factor",
            choice_bias=True,
            shared_width_key="shared_expert_intermediate_size",
            dense_keys=words("mlp_layer_types"),
        ),
        tensors=TensorNames(choice_bias="mlp.experts.e_score_correction_bias"),
    ),
}
