"""Linear: a projection over its weight, final at construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from freight.kernels.kernel_set import KernelSet


@dataclass(frozen=True)
class Linear:
    """x @ weight.T + bias; x [rows, in_features] -> [rows, out_features]. `weight` is what `kernels.pack` returned.

    `input_limit`: x is cut off at this magnitude first, so no dynamic scale grows beyond it (fbgemm's upper bound).
    """

    weight: Any
    bias: Tensor | None
    kernels: KernelSet
    input_limit: float | None = None

    @property
    def consumer(self) -> Any:
        """What the maker of this layer's input, if nobody else reads it, is told (`KernelSet`)."""
        return self.weight if self.input_limit is None else None

    def __call__(self, x: Any) -> Tensor:
        """x: a tensor, or what a kernel made for `consumer`."""
        if self.input_limit is not None:
            x = x.clamp(-self.input_limit, self.input_limit)
        return self.kernels.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class UnmergedLinear:
    """Projections of one input that could not be merged: quantized differently, or not all of them."""

    parts: tuple[Linear, ...]

    consumer: ClassVar[None] = None  # several, and each its own

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], 1)


Projection = Linear | UnmergedLinear
