"""What reads the output of each norm of a layer, and what a layer adds to the residual stream: the
tensors of a checkpoint with the dimension that is meant.

A change of a norm's output channels is exact only if every tensor that reads them takes part:
routers and gates too, though they stay in 16 bits. `folding.py` and `rotation.py` rest on this list.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from freight.model.architectures import tensor_names
from freight.model.config.layer import MoEConfig, NormKind, NormPlacement
from freight.model.config.model import ModelConfig
from freight.model.mixers.spec import mixer_parts
from freight.model.shapes import bias_of
from freight.quantizer.modules import LayerModules, layer_modules

Group = tuple[str, ...]


@dataclass(frozen=True)
class Axis:
    """A tensor of a checkpoint, and one of its dimensions."""

    tensor: str
    dim: int


@dataclass(frozen=True)
class Norm:
    """A norm's tensors: x / rms(x) * (weight + offset), or LayerNorm with its bias.

    bias   None: RMSNorm
    """

    weight: str
    bias: str | None
    offset: float


@dataclass(frozen=True)
class NormedInput:
    """A norm, and all that reads its output.

    groups      those of `LayerModules.groups` among the readers: each a tuple of modules
    consumers   every reader, with the dimension of its inputs
    """

    norm: Norm
    groups: tuple[Group, ...]
    consumers: tuple[Axis, ...]


class LayerTensors:
    """The tensors of one layer of a model by what they read and write."""

    def __init__(self, config: ModelConfig, index: int, modules: LayerModules) -> None:
        """`modules`: those of the layer. Raises AssertionError for a model that runs through the
        modules of transformers: what its norms feed is unknown.
        """
        assert config.foreign is None
        self.config = config
        self.layer = config.layers[index]
        self.names = tensor_names(config)
        self.prefix = self.names.layer.format(index)
        self.modules = modules
        self.parts = mixer_parts(self.layer.mixer, config.hidden_size, self.names)

    def norm(self, weight: str) -> Norm:
        """Return the norm whose weight has this name within the layer."""
        return norm_of(self.config, self.prefix + weight)

    @property
    def normed_inputs(self) -> tuple[NormedInput, ...]:
        """The norms of the inputs of mixer and feed-forward; none where these read the residual
        stream itself.
        """
        if self.layer.norms in (NormPlacement.OUTPUT, NormPlacement.POST):
            return ()
        return tuple(self._normed_inputs())

    def _normed_inputs(self) -> Iterator[NormedInput]:
        if self.parts.projections:
            yield self._mixer_input()
        mlp = self.layer.feed_forward
        if mlp is None:
            return
        names = self.names
        dense = self.modules.dense.get("gate_up")
        groups = [] if dense is None else [dense]
        consumers = [Axis(f"{module}.weight", 1) for group in groups for module in group]
        if not isinstance(mlp, MoEConfig):
            yield NormedInput(self.norm(names.mlp_norm), tuple(groups), tuple(consumers))
            return
        experts = self._expert_readers()
        if mlp.parallel_experts:
            yield NormedInput(self.norm(names.mlp_norm), tuple(groups), tuple(consumers))
            yield NormedInput(self.norm(names.experts_norm), (experts,), self._inputs(experts))
            return
        router = Axis(f"{self.prefix}{names.router}.weight", 0 if names.for_pictures else 1)
        consumers += [router, *self._inputs(experts)]
        if mlp.shared_gate:
            consumers.append(Axis(f"{self.prefix}{names.shared_gate}.weight", 1))
        yield NormedInput(self.norm(names.mlp_norm), (experts, *groups), tuple(consumers))

    def _mixer_input(self) -> NormedInput:
        parts = self.parts
        group = next(iter(self.modules.mixed.values()))
        hidden = self.config.hidden_size
        kept = [name for name in parts.kept if name not in (*parts.alone, parts.cut)]
        assert all(parts.kept[name][1] == hidden for name in kept)
        consumers = [f"{module}.weight" for module in group]
        consumers += [f"{self.prefix}{module}.weight" for module in kept]
        norm = self.norm(self.names.attention_norm)
        return NormedInput(norm, (group,), tuple(Axis(name, 1) for name in consumers))

    def _expert_readers(self) -> Group:
        """Return the modules that read what the router reads: of all experts, or the one before
        them.
        """
        if self.modules.latent:
            return self.modules.latent["inner"]
        assert self.modules.experts is not None
        return self.modules.experts.gate_up

    def _inputs(self, group: Group) -> tuple[Axis, ...]:
        """Return the dimensions of the inputs of these modules."""
        return tuple(Axis(self.matrix(module), 1) for module in group)

    def matrix(self, module: str) -> str:
        """Return the name of a module's matrix. Experts of one tensor have no module of their own
        (`TensorNames.interleaved`): [experts, inputs, outputs].
        """
        return module if self._is_stack(module) else f"{module}.weight"

    def _is_stack(self, module: str) -> bool:
        experts = self.modules.experts
        return self.names.interleaved and experts is not None and module in experts.matrices

    def outputs(self, names: Container[str]) -> tuple[Axis, ...]:
        """Return the tensors whose dimension is the residual stream's, of what the layer adds to it:
        matrices, and biases where `names`, the tensors of the model, has them.
        """
        modules: list[str] = []
        if self.modules.mixed:
            modules += tuple(self.modules.mixed.values())[-1]
        modules += self.modules.dense.get("down", ())
        modules += self.modules.per_layer.get("down", ())
        if self.modules.latent:
            modules += self.modules.latent["outer"]
        elif self.modules.experts is not None:
            modules += self.modules.experts.down
        return tuple(self._outputs(modules, names))

    def _outputs(self, modules: Iterable[str], names: Container[str]) -> Iterator[Axis]:
        for module in modules:
            stacked = self._is_stack(module)
            yield Axis(self.matrix(module), 2 if stacked else 0)
            bias = f"{module}_bias" if stacked else f"{module}.bias"
            if bias in names:
                yield Axis(bias, 1 if stacked else 0)


def layer_tensors(config: ModelConfig) -> tuple[LayerTensors, ...]:
    """Return the tensors of each layer."""
    modules = enumerate(layer_modules(config))
    return tuple(LayerTensors(config, index, of_layer) for index, of_layer in modules)


def norm_of(config: ModelConfig, weight: str, offset: float | None = None) -> Norm:
    """Return the norm of the tensor `weight`, with the model's offset unless another is passed."""
    bias = bias_of(weight) if config.norm_kind is NormKind.LAYER else None
    return Norm(weight, bias, config.norm_offset if offset is None else offset)
