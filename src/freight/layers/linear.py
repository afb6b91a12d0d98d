"""Linear: a projection over its weight, final at construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from freight.kernels.interface import KernelSet


@dataclass(frozen=True)
class Linear:
    """x @ weight.T + bias; x [rows, in_features] -> [rows, out_features]. `weight` is what `kernels.pack` returned.

    `input_limit`: x is clipped to this magnitude first, which bounds dynamic scales (fbgemm's upper bound).
    """

    weight: Any
    bias: Tensor | None
    kernels: KernelSet
    input_limit: float | None = None

    @property
    def consumer(self) -> Any:
        """The `consumer` (`KernelSet`) to pass to the operation whose output only this layer takes as input."""
        return self.weight if self.input_limit is None else None

    def __call__(self, x: Any) -> Tensor:
        """x: a tensor, or what an operation returned for `consumer`."""
        if self.input_limit is not None:
            x = x.clamp(-self.input_limit, self.input_limit)
        return self.kernels.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class UnmergedLinear:
    """Projections of one input that cannot be merged: quantized differently, or only some of them."""

    parts: tuple[Linear, ...]

    consumer: ClassVar[None] = None  # several weights take the input

    def __call__(self, x: Tensor) -> Tensor:
        return self.parts[0].kernels.join([(part(x), None) for part in self.parts])


Projection = Linear | UnmergedLinear
