"""RMSNorm and LayerNorm, with the residual addition before them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freight.kernels.interface import KernelSet
from freight.operands.packed import PackedWeight, Rows


@dataclass(frozen=True)
class RMSNorm:
    """The norm x / sqrt(mean(x²) + eps) * weight over the last dimension.

    weight: [hidden_size], in the compute dtype or float32 (`KernelSet.add_rms_norm`).
    """

    weight: Tensor
    eps: float
    kernels: KernelSet

    def __call__(
        self,
        x: Tensor,
        delta: Tensor | None,
        consumer: PackedWeight | None = None,
        delta_weight: Tensor | None = None,
    ) -> tuple[Tensor, Rows]:
        """Return x + delta (x if delta is None), and its norm for `consumer` (`KernelSet`).

        x, delta: [rows, hidden_size]. With `delta_weight` the norm of delta with that weight is
        added instead of delta.
        """
        return self.kernels.add_rms_norm(x, delta, self.weight, self.eps, consumer, delta_weight)


@dataclass(frozen=True)
class LayerNorm:
    """The norm (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension.

    weight, bias: [hidden_size] in the compute dtype.
    """

    weight: Tensor
    bias: Tensor
    eps: float
    kernels: KernelSet

    def __call__(
        self,
        x: Tensor,
        delta: Tensor | None,
        consumer: PackedWeight | None = None,
        delta_weight: Tensor | None = None,
    ) -> tuple[Tensor, Rows]:
        """Return x + delta and its norm, as `RMSNorm` does.

        `delta_weight` must be None: no model with LayerNorm norms the delta.
        """
        assert delta_weight is None
        return self.kernels.add_layer_norm(x, delta, self.weight, self.bias, self.eps, consumer)


Norm = RMSNorm | LayerNorm
