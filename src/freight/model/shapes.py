"""Tensors of a model with their shapes, from its ModelConfig alone. Imports no torch.

The loader, the quantizer and the planner agree on these; a checkpoint that contradicts them is
refused.
"""

from __future__ import annotations

from itertools import compress

from freight.checkpoint.headers import Shape
from freight.model.architectures import tensor_names
from freight.model.config.layer import (
    DenseConfig,
    FeedForward,
    LayerConfig,
    MoEConfig,
    NormKind,
    NormPlacement,
)
from freight.model.config.model import ModelConfig
from freight.model.config.pooling import PoolingConfig
from freight.model.config.predicting import PredictingConfig
from freight.model.config.tensor_names import TensorNames
from freight.model.mixers.spec import mixer_parts


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return every tensor that a checkpoint of this model must have, with its shape."""
    if config.foreign is not None:
        return dict(config.foreign.tensors)
    c = config
    names = tensor_names(config)
    width = c.embedding_size or c.hidden_size
    shapes: dict[str, Shape] = {names.embedding: (c.vocab_size, width)}
    if c.final_norm:
        shapes |= dict.fromkeys(_norm_tensors(names.norm, c), (c.hidden_size,))
    if c.position_offset is not None:
        shapes[names.positions] = (c.position_offset + c.max_position_embeddings, c.hidden_size)
    if c.token_types:
        shapes[names.token_types] = (c.token_types, c.hidden_size)
    if c.norms_embedded:
        shapes |= dict.fromkeys(_norm_tensors(names.embedded_norm, c), (c.hidden_size,))
    if c.embedding_size is not None:
        shapes |= {f"{names.project_in}.weight": (c.hidden_size, width)}
        shapes |= {f"{names.project_out}.weight": (width, c.hidden_size)}
    if c.has_head and not c.tie_word_embeddings:
        shapes[names.head] = (c.vocab_size, width)
    if c.pooling is not None:
        shapes |= pooling_shapes(c.pooling)
    if c.per_layer_vocab_size is not None:
        shapes[names.per_layer_table] = (c.per_layer_vocab_size, c.per_layer_size)
        shapes[f"{names.per_layer_projection}.weight"] = (c.per_layer_size, c.hidden_size)
        shapes[names.per_layer_norm] = (c.per_layer_size // c.num_layers,)
    for index, layer in enumerate(c.layers):
        prefix = names.layer.format(index)
        shapes |= {prefix + name: shape for name, shape in layer_shapes(layer, c, names).items()}
    return shapes


def predicting_shapes(model: ModelConfig, predicting: PredictingConfig) -> dict[str, Shape]:
    """Return every tensor that the layers need, with its shape."""
    form = predicting.form
    hidden = model.hidden_size
    layer = layer_shapes(predicting.layer, model, tensor_names(model))
    shapes: dict[str, Shape] = {}
    for index, prefix in enumerate(predicting.prefixes):
        shapes |= {prefix + name: shape for name, shape in layer.items()}
        shapes[predicting.weight(index, form.projection)] = (hidden, 2 * hidden)
        for norm in (form.embedding_norm, form.features_norm, form.norm):
            shapes[predicting.weight(index, norm)] = (hidden,)
    return shapes


def pooling_shapes(pooling: PoolingConfig, folder: str = "") -> dict[str, Shape]:
    """Return the tensors of the layers after pooling that are in `folder` of the checkpoint."""
    shapes: dict[str, Shape] = {}
    for layer in pooling.layers:
        if layer.folder != folder:
            continue
        shapes[layer.weight] = (layer.outputs, layer.inputs)
        if layer.bias is not None:
            shapes[layer.bias] = (layer.outputs,)
        if layer.norm is not None:
            shapes[layer.norm] = (layer.outputs,)
    return shapes


def kept_in_16_bits(config: ModelConfig) -> frozenset[str]:
    """Return the matrices that are not quantized at load: those outside the layers, and those that
    choose or weigh experts or heads.
    """
    names = tensor_names(config)
    pooled = frozenset[str]()
    if config.pooling is not None:
        pooled = frozenset(pooling_shapes(config.pooling))
    inner = (
        f"{names.layer.format(index)}{module}.weight"
        for index, layer in enumerate(config.layers)
        for module in (
            names.router,
            names.shared_gate,
            *mixer_parts(layer.mixer, config.hidden_size, names).kept,
        )
    )
    return names.outer.union(inner, pooled)


def _norm_tensors(weight: str, config: ModelConfig) -> tuple[str, ...]:
    """Return the names of a norm's tensors: its weight, and its bias where it has one."""
    if config.norm_kind is NormKind.LAYER and config.norm_biases:
        return weight, bias_of(weight)
    return (weight,)


def bias_of(weight: str) -> str:
    """Return the name of the bias that belongs to a weight."""
    return weight.removesuffix("weight") + "bias"


def layer_shapes(layer: LayerConfig, config: ModelConfig, names: TensorNames) -> dict[str, Shape]:
    """Return every tensor of one layer, by its name within the layer."""
    hidden = config.hidden_size
    parts = mixer_parts(layer.mixer, hidden, names)
    projections = {  # name -> outputs, inputs, has a bias
        module: (rows, projection.columns, projection.bias)
        for projection in parts.projections.values()
        for module, rows in zip(projection.modules, projection.rows, strict=True)
    } | _feed_forward(layer.feed_forward, hidden, names)
    if layer.per_layer is not None:
        projections[names.per_layer_gate] = (layer.per_layer.size, hidden, False)
        projections[names.per_layer_down] = (hidden, layer.per_layer.size, False)
    projections |= {module: (*shape, False) for module, shape in parts.kept.items()}
    shapes: dict[str, Shape] = {}
    for name, (rows, columns, bias) in projections.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    router = f"{names.router}.weight"
    if names.for_pictures and router in shapes:
        shapes[router] = shapes[router][::-1]
    shapes |= _norm_shapes(layer, config, names)
    shapes |= {name: (size,) for name, size in parts.norms.items()}
    if layer.scalar:
        shapes[names.scalar] = (1,)
    shapes |= parts.plain
    shapes |= parts.exact
    if isinstance(layer.feed_forward, MoEConfig) and layer.feed_forward.choice_bias:
        shapes[names.choice_bias] = (*names.choice_bias_outer, layer.feed_forward.num_experts)
    if isinstance(layer.feed_forward, MoEConfig) and names.interleaved:
        shapes |= _interleaved(layer.feed_forward, hidden, names)
    return shapes


def _norm_shapes(layer: LayerConfig, config: ModelConfig, names: TensorNames) -> dict[str, Shape]:
    """Return a layer's norms over the hidden size, and the scales of a router and of experts."""
    there = (layer.mixer is not None, layer.feed_forward is not None)
    inputs = ("" if layer.raw_mixer else names.attention_norm, names.mlp_norm)
    outputs = (names.attention_post, names.mlp_post)
    norms = [] if layer.norms is NormPlacement.OUTPUT else [*filter(None, compress(inputs, there))]
    if layer.norms.has_outputs:
        norms += compress(outputs, there)
    if layer.per_layer is not None:
        norms += [names.per_layer_post]
    hidden = config.hidden_size
    shapes = dict[str, Shape]()
    if isinstance(layer.feed_forward, MoEConfig) and layer.feed_forward.parallel_experts:
        norms += [names.experts_norm, names.shared_post, names.experts_post]
        shapes[names.router_scale] = (hidden,)
        shapes[names.expert_scale] = (layer.feed_forward.num_experts,)
    return shapes | dict.fromkeys(
        [tensor for norm in norms for tensor in _norm_tensors(norm, config)], (hidden,)
    )


def _feed_forward(
    mlp: FeedForward, hidden: int, names: TensorNames
) -> dict[str, tuple[int, int, bool]]:
    """Return the projections of a feed-forward: name -> (outputs, inputs, has a bias)."""
    if mlp is None:
        return {}
    if isinstance(mlp, DenseConfig):
        return _dense(mlp, hidden, names.gate_up, names.down)
    experts = {names.router: (mlp.num_experts, hidden, mlp.router_bias)}
    channels = mlp.expert_channels(hidden)
    if mlp.latent_size is not None:
        experts |= {
            names.latent_in: (channels, hidden, False),
            names.latent_out: (hidden, channels, False),
        }
    expert = _dense(mlp.expert, channels, names.expert_gate_up, names.expert_down)
    for index in range(0 if names.interleaved else mlp.num_experts):
        experts |= {names.expert.format(index) + name: shape for name, shape in expert.items()}
    if mlp.shared is not None:
        experts |= _dense(mlp.shared, hidden, *shared_names(names))
        if mlp.shared_gate:
            experts[names.shared_gate] = (1, hidden, False)
    return experts


def _interleaved(mlp: MoEConfig, hidden: int, names: TensorNames) -> dict[str, Shape]:
    """Return the tensors of all experts of a layer, where `TensorNames.interleaved`."""
    shapes: dict[str, Shape] = {}
    expert = _dense(
        mlp.expert, mlp.expert_channels(hidden), names.expert_gate_up, names.expert_down
    )
    for name, (rows, columns, bias) in expert.items():
        shapes[names.expert + name] = (mlp.num_experts, columns, rows)
        if bias:
            shapes[f"{names.expert}{name}_bias"] = (mlp.num_experts, rows)
    return shapes


def shared_names(names: TensorNames) -> tuple[tuple[str, ...], str]:
    """Return the names of `gate_up` and `down` of a shared expert."""
    gate_up = tuple(names.shared + name.rpartition(".")[2] for name in names.gate_up)
    return gate_up, names.shared + names.down.rpartition(".")[2]


def _dense(
    mlp: DenseConfig, hidden: int, gate_up: tuple[str, ...], down: str
) -> dict[str, tuple[int, int, bool]]:
    projections = {name: (size, hidden, mlp.bias) for name, size in _stored(gate_up, mlp.up_sizes)}
    return projections | {down: (hidden, mlp.intermediate_size, mlp.bias)}


def _stored(names: tuple[str, ...], sizes: tuple[int, ...]) -> list[tuple[str, int]]:
    """Pair names with the rows of their tensors; one name for several projections has the rows of
    all.
    """
    return list(zip(names, sizes if len(names) > 1 else (sum(sizes),), strict=True))
