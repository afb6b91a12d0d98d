"""What `derive` functions of families share: a model with changed attention. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from freight.config.layer import AttentionConfig, Mixer

if TYPE_CHECKING:
    from freight.config.model import ModelConfig


def with_mixers(model: ModelConfig, mixers: Iterable[AttentionConfig]) -> ModelConfig:
    """`model` with each of `ModelConfig.attention` replaced by these, in order."""
    layers = list(model.layers)
    for index, mixer in zip(model.attention, mixers, strict=True):
        layers[index] = replace(layers[index], mixer=mixer)
    return replace(model, layers=tuple(layers))


def with_attention(model: ModelConfig, **values: Any) -> ModelConfig:
    """`model` with these fields of `AttentionConfig` in every layer that has it."""
    return with_mixers(model, [replace(mixer, **values) for mixer in model.attention.values()])


def with_layers(config: Mapping[str, Any], model: ModelConfig, kinds: Mapping[str, Mixer]) -> ModelConfig:
    """`model` with these mixers in the layers of these kinds, by `layer_types` (`Family.other_layers`)."""
    layers = tuple(
        replace(layer, mixer=kinds[kind]) if kind in kinds else layer
        for layer, kind in zip(model.layers, config["layer_types"], strict=True)
    )
    return replace(model, layers=layers)


def rotate_in_windows(config: Mapping[str, Any], model: ModelConfig) -> ModelConfig:
    """Layers without a window do not rotate queries and keys, in a model that has a window."""
    if config.get("sliding_window") is None:
        return model
    mixers = model.attention.values()
    return with_mixers(model, [replace(mixer, rope=None if mixer.window is None else mixer.rope) for mixer in mixers])


def default_rope(config: Mapping[str, Any], rope: Mapping[str, Any]) -> Mapping[str, Any]:
    """`config` with `rope` where it names none in either spelling."""
    if config.get("rope_parameters") or config.get("rope_scaling"):
        return config
    return {**config, "rope_parameters": rope}
