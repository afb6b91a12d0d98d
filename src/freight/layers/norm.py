"""RMSNorm, with the residual addition before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from freight.kernels.interface import KernelSet


@dataclass(frozen=True)
class RMSNorm:
    """x / rms(x) * weight over the last dimension; weight: [hidden_size]."""

    weight: Tensor
    eps: float
    kernels: KernelSet

    def __call__(self, x: Tensor, delta: Tensor | None, consumer: Any = None) -> tuple[Tensor, Any]:
        """x + delta (x if delta is None) and its norm, for `consumer` (`KernelSet`). x, delta: [rows, hidden_size]."""
        return self.kernels.add_rms_norm(x, delta, self.weight, self.eps, consumer)
