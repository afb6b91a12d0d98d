"""Llama. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from freight.base.fields import JsonObject
from freight.model.config.family import ATTENTION_BIAS, Family, words
from freight.model.config.model import ModelConfig


def _both_ways(config: JsonObject, model: ModelConfig) -> ModelConfig:
    return replace(model, attends_both_ways=True)


_LLAMA = Family(
    "LlamaForCausalLM",
    {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    words("attention_bias mlp_bias layer_types"),
    bias_keys=ATTENTION_BIAS,
)

ROWS = {
    "llama": _LLAMA,
    "llama_bidirec": replace(  # NVIDIA's embedding models
        _LLAMA,
        architecture="LlamaBidirectionalModel",
        same=("LlamaBidirectionalForSequenceClassification",),
        keys=_LLAMA.keys | words("pooling temperature"),
        derive=_both_ways,
    ),
}
