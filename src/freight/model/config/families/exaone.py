"""EXAONE 4 of LG. Imports no torch."""

from __future__ import annotations

from freight.model.config.deriving import rotate_in_windows
from freight.model.config.family import Family, words
from freight.model.config.layer import NormPlacement
from freight.model.config.tensor_names import NORMED_OUTPUTS
from freight.model.mixers.attention.spec import QKNormConfig

ROWS = {
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
        qk_norm=QKNormConfig(),
        norms=NormPlacement.OUTPUT,
        derive=rotate_in_windows,
        tensors=NORMED_OUTPUTS,
    ),
}
