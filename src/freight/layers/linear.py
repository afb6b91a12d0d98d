"""Linear: a projection over its weight, final at construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from freight.kernels.kernel_set import KernelSet


@dataclass(frozen=True)
class Linear:
    """x @ weight.T + bias; x [rows, in_features] -> [rows, out_features]. `weight` is what `kernels.pack` returned."""

    weight: Any
    bias: Tensor | None
    kernels: KernelSet

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.weight, self.bias)
