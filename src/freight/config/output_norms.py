"""Rows of `FAMILIES` for models that norm what a layer adds and not its inputs: OLMo and EXAONE. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from freight.config.family import Family, words
from freight.config.layer import NormPlacement

_OLMO = Family(
    "Olmo2ForCausalLM",
    {
        "vocab_size": 50304,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50279,
    },
    words("attention_bias"),
    qk_norm=True,
    qk_norm_whole=True,
    norms=NormPlacement.OUTPUT,
    wide_norms=True,
)

OUTPUT_NORMS = {
    "olmo2": _OLMO,
    "olmo3": replace(
        _OLMO,
        architecture="Olmo3ForCausalLM",
        defaults={
            **_OLMO.defaults,
            "sliding_window": 4096,
            "use_sliding_window": True,
            "sliding_window_pattern": 4,
        },
        keys=_OLMO.keys | words("sliding_window layer_types"),
        theta=5e5,
        local_theta=5e5,
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        {
            "vocab_size": 102400,
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "sliding_window": 4096,
            "use_sliding_window": True,
            "sliding_window_pattern": 4,
        },
        words("sliding_window sliding_window_pattern layer_types"),
        qk_norm=True,
        norms=NormPlacement.OUTPUT,
        local_rope=True,
    ),
}
