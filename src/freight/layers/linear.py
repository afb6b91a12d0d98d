"""Linear: a projection over its weight, final at construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from freight.kernels.interface import KernelSet
from freight.operands.packed import PackedWeight, Rows, plain


@dataclass(frozen=True)
class Linear:
    """x @ weight.T + bias; x [rows, in_features] -> [rows, out_features]. `weight` is what
    `kernels.pack` returned.

    `input_limit`: x is clipped to this magnitude first, which bounds dynamic scales (fbgemm's upper
    bound).
    """

    weight: PackedWeight
    bias: Tensor | None
    kernels: KernelSet
    input_limit: float | None = None

    @property
    def consumer(self) -> PackedWeight | None:
        """The `consumer` (`KernelSet`) to pass to the operation whose output only this layer takes
        as input.
        """
        return self.weight if self.input_limit is None else None

    def __call__(self, x: Rows) -> Tensor:
        """x: a tensor, or what an operation returned for `consumer`."""
        if self.input_limit is not None:
            x = plain(x).clamp(-self.input_limit, self.input_limit)
        return self.kernels.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class UnmergedLinear:
    """Projections of one input that cannot be merged: quantized differently, or only some of them."""

    parts: tuple[Linear, ...]

    consumer: ClassVar[None] = None  # several weights take the input

    def __call__(self, x: Rows) -> Tensor:
        return self.parts[0].kernels.join([(part(plain(x)), None) for part in self.parts])


Projection = Linear | UnmergedLinear
