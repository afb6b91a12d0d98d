"""Llama. Imports no torch."""

from __future__ import annotations

from freight.model.config.family import ATTENTION_BIAS, Family, words

ROWS = {
    "llama": Family(
        "LlamaForCausalLM",
        {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
        words("attention_bias mlp_bias layer_types"),
        bias_keys=ATTENTION_BIAS,
    ),
}
