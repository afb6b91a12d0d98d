"""Granite of IBM. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from freight.config.deriving import with_attention
from freight.config.experts import MoEFamily
from freight.config.family import ATTENTION_BIAS, Family, words
from freight.config.fields import number
from freight.config.tensor_names import TensorNames
from freight.operands.routing import Scoring

if TYPE_CHECKING:
    from freight.config.model import ModelConfig

_MULTIPLIERS = words("embedding_multiplier attention_multiplier residual_multiplier logits_scaling")


def _derive(config: Mapping[str, Any], model: ModelConfig) -> ModelConfig:
    model = with_attention(model, softmax_scale=number(config, "attention_multiplier"))
    return replace(
        model,
        embedding_multiplier=_unless_1(config, "embedding_multiplier"),
        residual_multiplier=number(config, "residual_multiplier"),
        logit_divisor=_unless_1(config, "logits_scaling"),
    )


def _unless_1(config: Mapping[str, Any], key: str) -> float | None:
    value = number(config, key)
    return None if value == 1 else value


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
    bias_keys=ATTENTION_BIAS,
    derive=_derive,
)

ROWS = {
    "granite": _GRANITE,
    "granitemoe": replace(
        _GRANITE,
        architecture="GraniteMoeForCausalLM",
        defaults={**_GRANITE.defaults, "num_experts_per_tok": 2},
        keys=words("attention_bias") | _MULTIPLIERS,
        moe=MoEFamily(8, width_key="intermediate_size", scoring=Scoring.CHOSEN, norm_key=None),
        tensors=TensorNames(
            router="block_sparse_moe.router.layer",
            expert="block_sparse_moe.experts.{}.",
            stacked=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        ),
    ),
}
