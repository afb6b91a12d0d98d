"""Shards: what each rank computes of a model, from its ModelConfig alone. Imports no torch.

A rank is the whole program over a smaller ModelConfig: its heads and its intermediate channels. So
cache, kernels and the forward pass need no rule for ranks. Every matrix is cut by output rows:

    q; k, v          its heads; with fewer KV heads than ranks, several ranks have the same one
    latents          all of them, as all heads read them; matrices of heads, for its heads
    recurrent layers its heads, with their states; key heads as KV heads
    convolutions     its channels
    gate, up         its intermediate channels, of every expert
    o, down          its part of the hidden size, over all inputs, which are gathered before
    head             its part of the vocabulary
    embedding        its part of the columns
    norms            whole, as the hidden size is whole on every rank

What does not divide evenly is refused, with the numbers, before a weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from freight.errors import ConfigError, choices
from freight.fp8.formats import Granularity
from freight.fp8.scheme import KVScales, LayerScales
from freight.model.config.layer import DenseConfig, LayerConfig, MoEConfig
from freight.model.config.model import ModelConfig
from freight.model.mixers.attention.spec import AttentionConfig
from freight.model.mixers.dividing import Rank, uneven
from freight.parallel.shared import MAX_RANKS


def require_divisible(model: ModelConfig, size: int) -> None:
    """Raise ConfigError, naming what and the sizes that fit, unless `size` ranks can divide `model`
    evenly.
    """
    if size == 1:
        return
    fault = next(_faults(model, size), None)
    if fault is None:
        return
    fitting = [other for other in range(1, MAX_RANKS + 1) if not any(_faults(model, other))]
    way_out = f"choose {choices(map(str, fitting))}"
    if fitting == [1]:
        way_out = "omit it"
    raise ConfigError(f"--tensor-parallel-size {size}: {fault}; {way_out}")


def require_head_divisible(head: ModelConfig, size: int, name: str) -> None:
    """Raise ConfigError, as `require_divisible`, where ranks cannot divide a head that drafts, `name`,
    whose layers are those of `head`.
    """
    try:
        require_divisible(head, size)
    except ConfigError as error:
        raise ConfigError(
            f"--speculative-config: {name} is divided as the model is, and cannot be: {error}; or draft from the text "
            "of requests (--speculate)"
        ) from error


def _faults(model: ModelConfig, size: int) -> Iterator[str]:
    """Yield what `size` ranks cannot divide."""
    if size == 1:
        return
    if model.foreign is not None:
        yield f"the modules of transformers ({model.architecture}) are not divided over ranks"
        return
    for index, layer in enumerate(model.layers):
        yield from _layer_faults(layer, f"layer {index}", size)
    for what, count in (
        ("hidden channels", model.hidden_size),
        ("channels of the embedding", model.embedding_size or model.hidden_size),
        ("channels of per-layer embeddings", model.per_layer_size),
    ):
        yield from uneven(what, count, size)


def _layer_faults(layer: LayerConfig, where: str, size: int) -> Iterator[str]:
    mlp = layer.feed_forward
    if layer.mixer is not None:
        yield from layer.mixer.rank_faults(where, size)
    if layer.per_layer is not None:
        what = f"channels of the per-layer embedding of {where}"
        yield from uneven(what, layer.per_layer.size, size)
    if isinstance(mlp, MoEConfig):
        what = f"latent channels of experts of {where}"
        yield from uneven(what, mlp.latent_size or size, size)
        yield from uneven(
            f"intermediate channels of experts of {where}", mlp.intermediate_size, size
        )
        if mlp.shared is not None:
            what = f"intermediate channels of shared experts of {where}"
            yield from uneven(what, mlp.shared.intermediate_size, size)
    elif isinstance(mlp, DenseConfig):
        yield from uneven(f"intermediate channels of {where}", mlp.intermediate_size, size)


def of_rank(model: ModelConfig, size: int) -> ModelConfig:
    """Return the model that each of `size` ranks computes. They differ in their weights alone."""
    require_divisible(model, size)
    if size == 1:
        return model
    layers = tuple(_divided(layer, size) for layer in model.layers)
    # a tied head has other rows of the embedding than the columns that are looked up
    return replace(model, layers=layers, tie_word_embeddings=False)


def _divided(layer: LayerConfig, size: int) -> LayerConfig:
    mlp = layer.feed_forward
    if isinstance(mlp, DenseConfig | MoEConfig):
        mlp = replace(mlp, intermediate_size=mlp.intermediate_size // size)
    if isinstance(mlp, MoEConfig) and mlp.shared is not None:
        share = mlp.shared.intermediate_size // size
        mlp = replace(mlp, shared=replace(mlp.shared, intermediate_size=share))
    mixer = None if layer.mixer is None else layer.mixer.divided(size)
    return replace(layer, mixer=mixer, feed_forward=mlp)


def scales_of_rank(scales: KVScales, model: ModelConfig, rank: int, size: int) -> KVScales:
    """Return the KV scales of the heads that `rank` of `size` has of `model`, the whole model."""
    if size == 1:
        return scales
    layers = list(scales.layers)
    for index, mixer in model.attention.items():
        of_layer = layers[index]
        if of_layer is not None:
            heads = Rank(rank, size).kv_part(mixer.num_kv_heads)
            layers[index] = _of_heads(of_layer, heads, mixer)
    return replace(scales, layers=tuple(layers))


def _of_heads(scales: LayerScales, heads: slice, mixer: AttentionConfig) -> LayerScales:
    def of_rank(values: tuple[float, ...]) -> tuple[float, ...]:
        assert len(values) % mixer.num_kv_heads == 0, "a scale of several heads cannot be divided"
        each = len(values) // mixer.num_kv_heads
        return values[heads.start * each : heads.stop * each]

    if scales.granularity is not Granularity.TENSOR:
        scales = replace(scales, k=of_rank(scales.k), v=of_rank(scales.v))
    return replace(scales, k_center=of_rank(scales.k_center))
