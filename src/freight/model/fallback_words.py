"""Error messages for models that cannot run through transformers' modules."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Mapping

from transformers import PreTrainedConfig, PreTrainedModel

from freight.base.fields import JsonObject, shortened
from freight.errors import CheckpointError, choices
from freight.model.config.mechanisms import only_attention
from freight.model.config.registry import FAMILIES

OTHER_ATTENTION = "its attention does not go through transformers' AttentionInterface"
# Key of config.json -> what it asks for that Freight's cache or attention does not have
_REFUSED_KEYS: Mapping[str, str] = {
    "is_encoder_decoder": "an encoder as well as a decoder",
    "add_cross_attention": "cross attention",
    "vision_config": "inputs other than text",
    "vq_config": "inputs other than text",
    "audio_config": "inputs other than text",
    "kv_lora_rank": "latent attention (MLA), whose cache is not implemented",
    "num_kv_shared_layers": "layers that share keys and values",
    "alibi": "biases by position (ALiBi)",
}
# Prefixes of the keys of recurrent layers
_RECURRENT = ("mamba_", "ssm_", "linear_num_", "linear_conv_", "conv_")


def refused(model_type: object, why: str) -> CheckpointError:
    """Return the error for a model that transformers' modules cannot run."""
    return CheckpointError(
        f"config.json: model_type {model_type!r} has no row in Freight, and transformers' modules cannot be "
        f"used: {why}. Model types that need none of them: {choices(FAMILIES)}"
    )


def refuse_recurrent(config: JsonObject) -> None:
    """Raise CheckpointError for a config.json that declares recurrent layers or convolutions."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    # transformers' class reports what is wrong with a value of another type
    kinds = kinds if isinstance(kinds, list) else []
    recurrent = [
        kind_name
        for kind_name in map(str, kinds)
        if "attention" not in kind_name or "linear" in kind_name
    ]
    kind = recurrent[0] if recurrent else None
    keys = () if only_attention(config) else config
    key = next((key for key in keys if config[key] and key.startswith(_RECURRENT)), None)
    if kind is not None or key is not None:
        declared = f"layers of kind {kind!r}"
        if kind is None:
            declared = f"{key} = {shortened(config.get(str(key)))}"
        raise refused(
            config.get("model_type"),
            f"{declared} means recurrent layers or convolutions over tokens, whose state the cache does not hold",
        )


def refuse_keys(model_type: str, config: JsonObject) -> None:
    """Raise CheckpointError for a key of `_REFUSED_KEYS` that is set."""
    for key, why in _REFUSED_KEYS.items():
        if config.get(key):
            raise refused(model_type, f"{key} = {shortened(config[key])} means {why}")


def why_not_built(
    hf: PreTrainedConfig, cls: type[PreTrainedModel], attention: str, error: Exception
) -> str:
    """Name a key without a value that the failing line reads, if there is one; else what was
    raised.

    `attention`: the name of the attention function that the model was built with.
    """
    # The model's file has a table of attention classes, without this name
    if isinstance(error, KeyError) and error.args == (attention,):
        return OTHER_ATTENTION
    values = hf.get_text_config().to_dict()
    # The last frames: torch may have been called by transformers' line
    for frame in traceback.extract_tb(error.__traceback__)[:-4:-1]:
        missing = [
            name for name in re.findall(r"\w+", frame.line or "") if values.get(name, 0) is None
        ]
        if missing:
            return f"config.json has no {missing[0]}, which {cls.__name__} needs"
    return f"{cls.__name__} cannot be made from this config.json: {_raised(error)}"


def why_not_run(model: PreTrainedModel, error: Exception) -> str:
    """Explain why a model that was built does not run over the probe."""
    files = {type(module).__module__ for module in model.modules()}
    if not any(hasattr(sys.modules[file], "ALL_ATTENTION_FUNCTIONS") for file in files):
        return OTHER_ATTENTION
    name = type(model).__name__
    if any(
        words in str(error)
        for words in ("on meta tensors", "out of meta tensor", "on device meta", "register_meta")
    ):
        return (
            f"what {name} computes depends on the values of tensors, so its attention cannot be seen before weights "
            "are read"
        )
    return f"{name} does not run without a cache and a mask of transformers: {_raised(error)}"


def _raised(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it looks up {error}, which is missing"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
