"""Which modules take adapters while a model runs, from the ModelConfig alone. Imports no torch.

They are the projections of a layer that `Builder` gives a bank: those of mixers, of dense
feed-forwards and experts, and of what a layer adds to them. Not among them are embeddings, the head,
routers, and a projection that is taken apart into matrices of its heads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from freight.checkpoint.headers import Shape
from freight.model.architectures import tensor_names
from freight.model.config.layer import DenseConfig, FeedForward, MoEConfig
from freight.model.config.model import ModelConfig
from freight.model.config.tensor_names import TensorNames
from freight.model.feed_forward.expert_modules import expert_modules
from freight.model.mixers.spec import mixer_parts
from freight.model.shapes import shared_names, tensor_shapes
from freight.settings.lora import LoraConfig


def adapted_modules(
    model: ModelConfig, of_layers: Collection[int] | None = None
) -> dict[str, Shape]:
    """Return the modules that take adapters, as the checkpoint calls them, with the shapes of their
    matrices, [outputs, inputs]; with `of_layers`, those of these alone. None of a model that runs
    through transformers' modules.
    """
    if model.foreign is not None:
        return {}
    names = tensor_names(model)
    shapes = tensor_shapes(model)
    modules: dict[str, Shape] = {}
    for index, layer in enumerate(model.layers):
        if of_layers is not None and index not in of_layers:
            continue
        prefix = names.layer.format(index)
        parts = mixer_parts(layer.mixer, model.hidden_size, names)
        own: list[str] = []
        for projection in parts.projections.values():
            own += projection.modules
        own += [module for module in parts.kept if module != parts.cut]
        own += _feed_forward(layer.feed_forward, names)
        if layer.per_layer is not None:
            own += (names.per_layer_gate, names.per_layer_down)
        for module in own:
            modules[prefix + module] = shapes[f"{prefix}{module}.weight"]
        if isinstance(layer.feed_forward, MoEConfig):
            of_experts = _experts(layer.feed_forward, model.hidden_size, names)
            modules |= {prefix + module: shape for module, shape in of_experts}
    return modules


def adapter_bytes(
    model: ModelConfig,
    lora: LoraConfig | None,
    width: int,
    ranks: int = 1,
    of_layers: Collection[int] | None = None,
) -> int:
    """Return the bytes of the banks of each rank, in a dtype of `width` bytes: each has all of A, and
    its part of B; with `of_layers`, of these layers alone. A second A of a module that is a part of
    two projections is not counted.
    """
    if lora is None:
        return 0
    channels = 0
    for outputs, inputs in adapted_modules(model, of_layers).values():
        channels += inputs + outputs // ranks
    return lora.num_slots * lora.max_rank * channels * width


def _experts(moe: MoEConfig, hidden: int, names: TensorNames) -> Iterator[tuple[str, Shape]]:
    """Yield the modules of a layer's experts with the shapes of their matrices."""
    channels = moe.expert_channels(hidden)
    for modules in expert_modules(names, moe.num_experts):
        sizes = moe.up_sizes if len(modules.gate_up) > 1 else (sum(moe.up_sizes),)
        for module, size in zip(modules.gate_up, sizes, strict=True):
            yield module, (size, channels)
        yield modules.down, (channels, moe.intermediate_size)


def _feed_forward(mlp: FeedForward, names: TensorNames) -> Iterator[str]:
    """Yield the modules of a feed-forward that all tokens go through."""
    if mlp is None:
        return
    if isinstance(mlp, DenseConfig):
        yield from (*names.gate_up, names.down)
        return
    if mlp.latent_size is not None:
        yield from (names.latent_in, names.latent_out)
    if mlp.shared is not None:
        gate_up, down = shared_names(names)
        yield from (*gate_up, down)
        if mlp.shared_gate:
            yield names.shared_gate
