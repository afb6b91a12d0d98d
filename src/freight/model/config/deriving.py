"""Helpers of the families' `derive` functions: a model with changed mixers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from freight.base.fields import JsonObject, integer, is_number
from freight.errors import CheckpointError
from freight.model.config.model import ModelConfig
from freight.model.mixers.attention.spec import AttentionConfig
from freight.model.mixers.spec import Mixer

_LARGEST = 3.4e38  # slightly below the largest float32
_WIDEST = 8  # the widest convolution of the CPU kernels


def with_mixers(model: ModelConfig, mixers: Iterable[AttentionConfig]) -> ModelConfig:
    """Return `model` with each layer of `ModelConfig.attention` given the next of `mixers`."""
    layers = list(model.layers)
    for index, mixer in zip(model.attention, mixers, strict=True):
        layers[index] = replace(layers[index], mixer=mixer)
    return replace(model, layers=tuple(layers))


def with_attention(model: ModelConfig, **values: Any) -> ModelConfig:
    """Return `model` with these fields of `AttentionConfig` in every layer that has attention."""
    return with_mixers(model, [replace(mixer, **values) for mixer in model.attention.values()])


def with_layers(config: JsonObject, model: ModelConfig, kinds: Mapping[str, Mixer]) -> ModelConfig:
    """Return `model` with these mixers in the layers of these kinds, by `layer_types`
    (`Family.other_layers`).
    """
    layers = tuple(
        replace(layer, mixer=kinds[kind]) if kind in kinds else layer
        for layer, kind in zip(model.layers, config["layer_types"], strict=True)
    )
    return replace(model, layers=layers)


def rotate_in_windows(config: JsonObject, model: ModelConfig) -> ModelConfig:
    """Return `model` with rotary embedding in the layers with a window only, if it has a window."""
    if config.get("sliding_window") is None:
        return model
    mixers = model.attention.values()
    return with_mixers(
        model,
        [replace(mixer, rope=None if mixer.window is None else mixer.rope) for mixer in mixers],
    )


def conv_width(config: JsonObject, key: str) -> int:
    """Return the inputs of a channel that a convolution sees. Raises CheckpointError for a width
    that no kernel computes.
    """
    width = integer(config, key)
    if not 2 <= width <= _WIDEST:
        raise CheckpointError(
            f"config.json: {key} = {width} is not implemented; 2 to {_WIDEST} are"
        )
    return width


def require_silu(config: JsonObject) -> None:
    """Require SiLU as `hidden_act`, for mixers whose convolution uses that activation. Raises
    CheckpointError for another.
    """
    named = config.get("hidden_act", "silu")
    if named not in ("silu", "swish"):
        raise CheckpointError(
            f"config.json: hidden_act = {named!r} is not implemented for layers with a recurrent state, whose "
            "convolution it follows; silu or swish are"
        )


def step_limits(config: JsonObject) -> tuple[float, float]:
    """Read `Mamba2Config.limits` from `time_step_limit`: two numbers. Infinity may be written as
    transformers' object, or as a number beyond float32. Raises CheckpointError for anything else.
    """
    limits = config.get("time_step_limit") or (0.0, inf)
    values = []
    if isinstance(limits, Sequence):
        values = [inf if value == {"__float__": "Infinity"} else value for value in limits]
    if len(values) == 2 and all(is_number(value) for value in values):
        low, high = [inf if value > _LARGEST else float(value) for value in values]
        if 0 <= low <= high and low < inf:
            return low, high
    raise CheckpointError(
        f"config.json: time_step_limit = {limits!r} must be two numbers, 0 ≤ low ≤ high"
    )


def default_rope(config: JsonObject, rope: JsonObject) -> JsonObject:
    """Return `config` with `rope` added if it names none in either spelling."""
    if config.get("rope_parameters") or config.get("rope_scaling"):
        return config
    return {**config, "rope_parameters": rope}
