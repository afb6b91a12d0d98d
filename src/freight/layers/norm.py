"""RMSNorm over the last dimension."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freight.kernels.kernel_set import KernelSet


@dataclass(frozen=True)
class RMSNorm:
    """x / rms(x) * weight; weight has the size of x's last dimension (hidden_size, or head_dim for q/k norm)."""

    weight: Tensor
    eps: float
    kernels: KernelSet

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)
