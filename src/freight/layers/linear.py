"""Linear: a projection over its weight, final at construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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

    def __call__(self, x: Tensor) -> Tensor:
        if self.input_limit is not None:
            x = x.clamp(-self.input_limit, self.input_limit)
        return self.kernels.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class SideBySide:
    """Projections of one input that could not be merged: quantized differently, or not all of them."""

    parts: tuple[Linear, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], 1)


Projection = Linear | SideBySide
