"""Seed-OSS of ByteDance. Imports no torch."""

from __future__ import annotations

from freight.model.config.family import Family, words

ROWS = {
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
}
