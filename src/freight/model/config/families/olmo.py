"""OLMo 2 and 3 of Ai2. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from freight.model.config.family import ATTENTION_BIAS, Family, words
from freight.model.config.layer import NormPlacement
from freight.model.config.tensor_names import NORMED_OUTPUTS
from freight.model.mixers.attention.spec import NormSpan, QKNormConfig

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
    keys=words("attention_bias"),
    bias_keys=ATTENTION_BIAS,
    qk_norm=QKNormConfig(NormSpan.ALL_HEADS),
    norms=NormPlacement.OUTPUT,
    wide_norms=True,
    tensors=NORMED_OUTPUTS,
)

ROWS = {
    "olmo2": _OLMO,
    "olmo3": replace(
        _OLMO,
        architecture="Olmo3ForCausalLM",
        defaults={
            **_OLMO.defaults,
            "sliding_window": 4096,
            "use_sliding_window": True,
            "sliding_window_pattern": 4,  # every fourth layer has no window
        },
        keys=_OLMO.keys | words("sliding_window layer_types"),
        theta=5e5,
        local_theta=5e5,  # layers with a window have a separate rope
    ),
}
