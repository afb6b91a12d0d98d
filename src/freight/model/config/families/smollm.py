"""SmolLM3 of Hugging Face. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from freight.base.fields import JsonObject, flag, integer
from freight.errors import CheckpointError
from freight.model.config.deriving import with_mixers
from freight.model.config.family import ATTENTION_BIAS, Family, words
from freight.model.config.model import ModelConfig


def _derive(config: JsonObject, model: ModelConfig) -> ModelConfig:
    """Make layers that rotate see everything, unless `layer_types` lists layers with a window."""
    mixers = []
    wide = config.get("sliding_window") if flag(config, "use_sliding_window") else None
    for mixer, rotates in zip(
        model.attention.values(), _rotated(config, model.num_layers), strict=True
    ):
        window = mixer.window
        if not config.get("layer_types"):
            window = None if rotates else wide
        mixers.append(replace(mixer, window=window, rope=0 if rotates else None))
    return with_mixers(model, mixers)


def _rotated(config: JsonObject, num_layers: int) -> list[bool]:
    """Return which layers rotate queries and keys: those with a 1 in `no_rope_layers`, else all but
    every n-th.
    """
    interval = integer(config, "no_rope_layer_interval")
    flags = config.get("no_rope_layers") or [
        int((i + 1) % interval != 0) for i in range(num_layers)
    ]
    if not isinstance(flags, list) or len(flags) != num_layers or not set(flags) <= {0, 1}:
        raise CheckpointError(
            f"config.json: no_rope_layers = {flags!r} must be a list of num_hidden_layers = {num_layers} entries, each "
            "0 or 1"
        )
    return [flag == 1 for flag in flags]


ROWS = {
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {
            "vocab_size": 128256,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        words(
            "attention_bias mlp_bias layer_types sliding_window use_sliding_window no_rope_layers "
            "no_rope_layer_interval"
        ),
        bias_keys=ATTENTION_BIAS,
        theta=2e6,
        derive=_derive,
    ),
}
