"""Builder: makes the parts of layers from a source's tensors, for `loader.py` and `mixers/`.

A residual multiplier m costs nothing, because the residual stream is kept divided by m. The
embedding is divided by m, layers add their outputs unscaled, and each norm uses eps / m²:
norm(x / m) with eps / m² equals norm(x) with eps.

The same trick gives the norms of a layer's outputs an eps of their own, although a fused
add-and-norm kernel takes one eps. The stream is divided by an m with eps / m² = their eps, and the
weights of these norms by m.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from freight.checkpoint.headers import Shape
from freight.kernels.interface import KernelSet
from freight.model.adapters import AdaptedPart, AdapterBanks
from freight.model.config.layer import NormKind
from freight.model.config.model import ModelConfig
from freight.model.config.tensor_names import TensorNames
from freight.model.layers.linear import (
    AdaptedLinear,
    GatheredLinear,
    Linear,
    OwnLinear,
    Projection,
    UnmergedLinear,
)
from freight.model.layers.norm import LayerNorm, Norm, RMSNorm
from freight.model.shapes import bias_of
from freight.model.shares import Share
from freight.model.sources import WeightSource
from freight.operands.recurrence import Convolution
from freight.operands.rotary import Rotary
from freight.operands.weight import Weight

Ropes = Mapping[int | None, Rotary]  # by `PagedMixer.rope`


def post_divisor(config: ModelConfig) -> float:
    """Return the divisor of the weights of norms that follow a mixer or feed-forward."""
    c = config
    if c.post_norm_eps is None:
        return 1.0
    assert c.wide_norms, "a weight that is divided would be rounded in 16 bits"
    assert c.residual_multiplier == 1
    return math.sqrt(c.norm_eps / c.post_norm_eps)


def stream_divisor(config: ModelConfig) -> float:
    """Return the divisor of the residual stream."""
    return config.residual_multiplier * post_divisor(config)


@dataclass(frozen=True)
class Builder:
    """A builder of parts from the tensors of a source. `shapes` has every tensor of the model by
    its name. `share`: the rank's part of the model that these are; None: all of it. `banks`: where
    projections have memory for adapters; None: they take none.
    """

    source: WeightSource
    config: ModelConfig
    names: TensorNames
    shapes: dict[str, Shape]
    kernels: KernelSet
    share: Share | None = None
    banks: AdapterBanks | None = None

    def tensor(self, name: str) -> Tensor:
        """Read an embedding, a norm or a bias, in the compute dtype."""
        return self.source.tensor(name, self.shapes[name])

    def exact(self, name: str) -> Tensor:
        """Read a tensor in float32."""
        return self.source.exact(name, self.shapes[name])

    def linear(self, prefix: str, *parts: str, rows: Sequence[Tensor | None] = ()) -> OwnLinear:
        """Build the projections `parts`, merged into one matrix where they can be. `rows`: the
        order of each one's outputs.
        """
        linear = self._linear(prefix, parts, rows)
        return self._adapted(linear, [prefix + part for part in parts], rows)

    def _linear(
        self, prefix: str, parts: Sequence[str], rows: Sequence[Tensor | None]
    ) -> Linear | UnmergedLinear:
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

    def _adapted(
        self,
        linear: Linear | UnmergedLinear,
        modules: Sequence[str],
        rows: Sequence[Tensor | None] = (),
    ) -> OwnLinear:
        """Give a projection of `modules` a bank, if projections have banks. `rows`: as in `linear`."""
        if self.banks is None:
            return linear
        parts = [AdaptedPart(*part) for part in zip_longest(modules, rows)]
        shapes = [self.shapes[f"{module}.weight"] for module in modules]
        return AdaptedLinear(linear, self.banks.add(parts, shapes), self.kernels)

    def gathered(self, prefix: str, module: str, inputs: bool = True) -> Projection:
        """Build a projection whose outputs are on all ranks, if there are several, as with `inputs`
        its inputs are.
        """
        return self.whole(self.linear(prefix, module), inputs)

    def whole(self, linear: OwnLinear, inputs: bool = False) -> Projection:
        """Return a projection of whose outputs this rank has some, with those of all; `inputs` as in
        `gathered`.
        """
        return linear if self.share is None else GatheredLinear(linear, self.kernels, inputs)

    def convolution(self, name: str, bias: bool, silu: bool) -> Convolution:
        """Build the convolution `name`."""
        return Convolution(
            self.tensor(f"{name}.weight").flatten(1),
            self.tensor(f"{name}.bias") if bias else None,
            silu,
        )

    def packed(self, weight: Weight, bias: Tensor | None) -> Linear:
        """Pack one matrix for the kernels."""
        return Linear(self.kernels.pack(weight), bias, self.kernels, weight.input_limit)

    @property
    def post_divisor(self) -> float:
        """The divisor of the weights of norms that follow a mixer or feed-forward."""
        return post_divisor(self.config)

    @property
    def divisor(self) -> float:
        """The divisor of the residual stream."""
        return stream_divisor(self.config)

    def norm_weight(self, name: str, offset: bool = True) -> Tensor:
        """Read the weight of a norm and add the offset, in float32 if the model has wide norms: 1 +
        w would be rounded in 16 bits.
        """
        weight = self.tensor(name)
        if not self.config.wide_norms:
            return weight
        return weight.float() + offset * self.config.norm_offset

    def post_weight(self, name: str) -> Tensor:
        """Read the weight of a norm of what a mixer or feed-forward returns."""
        weight = self.norm_weight(name)
        return weight if self.post_divisor == 1 else weight / self.post_divisor

    def norm(self, name: str, weight: Tensor | None = None) -> Norm:
        """Build the norm called `name`, with `weight` in place of the stored one if it is given.

        It is given for a last norm without the offset, and for a layer whose inputs are not normed:
        there only the eps of the norm is used (`Residual.summed`).
        """
        eps = self.config.norm_eps / self.divisor**2
        if self.config.norm_kind is NormKind.LAYER:
            scale = self.tensor(name)
            bias = (
                self.tensor(bias_of(name)) if self.config.norm_biases else torch.zeros_like(scale)
            )
            return LayerNorm(scale, bias, eps, self.kernels)
        return RMSNorm(self.norm_weight(name) if weight is None else weight, eps, self.kernels)

    def kept(self, modules: Sequence[str], rows: Tensor | None = None) -> OwnLinear:
        """Build projections that are not quantized at load, merged where they can be.

        A checkpoint may still have some of them in FP8. `rows`: the order of the outputs, for a
        single module.
        """
        weights = [
            self.source.head(f"{module}.weight", self.shapes[f"{module}.weight"])
            for module in modules
        ]
        if rows is not None:
            weights = [weights[0].reordered(rows, modules[0])]
        linear: Linear | UnmergedLinear
        if Weight.mergeable(weights):
            linear = self.packed(Weight.concat(weights), None)
        else:
            linear = UnmergedLinear(tuple(self.packed(weight, None) for weight in weights))
        return self._adapted(linear, modules, () if rows is None else (rows,))

    def outer(self, module: str) -> Linear | None:
        """Build a projection outside the layers, which takes no adapters; None if the model does not
        have it.
        """
        name = f"{module}.weight"
        if name not in self.shapes:
            return None
        return self.packed(self.source.head(name, self.shapes[name]), None)

    def gate(self, module: str) -> Projection | None:
        """Build the projection of a gate; None if the model does not have it."""
        return self.kept([module]) if f"{module}.weight" in self.shapes else None
