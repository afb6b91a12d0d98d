"""Builder: tensors of a source as the parts that layers are made of, for `models/loader.py` and
`models/mixers.py`.

A multiplier m of what layers add costs nothing: the residual stream is kept divided by m. It begins
with the embedding divided by m, layers add to it as they are, and a norm with eps / m² of the
stream / m is that with eps of the stream.

The same gives norms of what layers add an eps of their own, though kernels add and norm in one pass
and take one eps: the stream is divided by an m with eps / m² = their eps, and their weights by m.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freight.checkpoint.headers import Shape
from freight.config.layer import NormKind
from freight.config.model import ModelConfig
from freight.config.tensor_names import TensorNames
from freight.kernels.interface import KernelSet
from freight.layers.linear import Linear, Projection, UnmergedLinear
from freight.layers.norm import LayerNorm, Norm, RMSNorm
from freight.models.shapes import bias_of
from freight.models.sources import WeightSource
from freight.operands.weight import Weight


@dataclass(frozen=True)
class Builder:
    """Builds parts from the tensors of a source. `shapes` has every tensor of the model by its
    name.
    """

    source: WeightSource
    config: ModelConfig
    names: TensorNames
    shapes: dict[str, Shape]
    kernels: KernelSet

    def tensor(self, name: str) -> Tensor:
        return self.source.tensor(name, self.shapes[name])

    def exact(self, name: str) -> Tensor:
        return self.source.exact(name, self.shapes[name])

    def linear(self, prefix: str, *parts: str, rows: Sequence[Tensor | None] = ()) -> Projection:
        """The projections `parts`, merged into one matrix if they can be. `rows`: the order of each
        one's outputs.
        """
        names = [f"{prefix}{part}.weight" for part in parts]
        weights = [self.source.weight(name, self.shapes[name]) for name in names]
        biases = [
            self.tensor(name) for part in parts if (name := f"{prefix}{part}.bias") in self.shapes
        ]
        for i, order in enumerate(rows):
            if order is not None:
                weights[i] = weights[i].reordered(order, names[i])
                biases[i : i + 1] = [bias[order] for bias in biases[i : i + 1]]
        if Weight.mergeable(weights):
            return self.packed(Weight.concat(weights), torch.cat(biases) if biases else None)
        return UnmergedLinear(tuple(map(self.packed, weights, biases or (None,) * len(weights))))

    def packed(self, weight: Weight, bias: Tensor | None) -> Linear:
        return Linear(self.kernels.pack(weight), bias, self.kernels, weight.input_limit)

    @property
    def post_divisor(self) -> float:
        """What the weights of norms of what layers add are divided by."""
        c = self.config
        if c.post_norm_eps is None:
            return 1.0
        assert c.wide_norms, "a weight that is divided would be rounded in 16 bits"
        assert c.residual_multiplier == 1
        return math.sqrt(c.norm_eps / c.post_norm_eps)

    @property
    def divisor(self) -> float:
        """What the residual stream is divided by."""
        return self.config.residual_multiplier * self.post_divisor

    def norm_weight(self, name: str, offset: bool = True) -> Tensor:
        """In float32 with an offset, too: 1 + w would be rounded in 16 bits."""
        weight = self.tensor(name)
        return (
            weight.float() + offset * self.config.norm_offset if self.config.wide_norms else weight
        )

    def post_weight(self, name: str) -> Tensor:
        """Of a norm of what mixer or feed-forward return."""
        weight = self.norm_weight(name)
        return weight if self.post_divisor == 1 else weight / self.post_divisor

    def norm(self, name: str, weight: Tensor | None = None) -> Norm:
        """With the weight of that name, or with `weight`, of a layer whose inputs have no norm
        (`Residual.summed`).
        """
        eps = self.config.norm_eps / self.divisor**2
        if self.config.norm_kind is NormKind.LAYER:
            return LayerNorm(self.tensor(name), self.tensor(bias_of(name)), eps, self.kernels)
        return RMSNorm(self.norm_weight(name) if weight is None else weight, eps, self.kernels)

    def kept(self, modules: Sequence[str], rows: Tensor | None = None) -> Projection:
        """Projections that are not quantized at load, merged if they can be: a checkpoint may have
        some of them in FP8. `rows`: the order of the outputs of one alone."""
        weights = [
            self.source.head(f"{module}.weight", self.shapes[f"{module}.weight"])
            for module in modules
        ]
        if rows is not None:
            weights = [weights[0].reordered(rows, modules[0])]
        if Weight.mergeable(weights):
            return self.packed(Weight.concat(weights), None)
        return UnmergedLinear(tuple(self.packed(weight, None) for weight in weights))

    def outer(self, module: str) -> Linear | None:
        """A projection outside of the layers, if the model has it."""
        name = f"{module}.weight"
        return (
            self.packed(self.source.head(name, self.shapes[name]), None)
            if name in self.shapes
            else None
        )
