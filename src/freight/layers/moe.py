"""MoE: a mixture of experts as a feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from freight.kernels.interface import KernelSet
from freight.layers.linear import Linear
from freight.operands.activation import GatedActivation
from freight.operands.routing import Routing


@dataclass(frozen=True)
class MoE:
    """Each row goes through the experts that the router chooses for it, and through `shared`.

    gate            the router's matrix in float32, as `kernels.pack` returned it, with `bias` and `choice_bias`
    gate_up, down   the matrices of all experts, as `kernels.pack_experts` returned them
    shared          the experts that every row goes through, as one feed-forward; times a sigmoid of `shared_gate`
    """

    gate: Any
    routing: Routing
    gate_up: Any
    down: Any
    activation: GatedActivation
    kernels: KernelSet
    bias: Tensor | None = None
    choice_bias: Tensor | None = None
    shared: Callable[[Tensor], Tensor] | None = None
    shared_gate: Linear | None = None

    consumer: ClassVar[None] = None  # the router and every expert take the input

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size], and so is the result."""
        ids, weights = self.kernels.route(x, self.gate, self.routing, self.bias, self.choice_bias)
        base = None if self.shared is None else self.shared(x)
        if base is not None and self.shared_gate is not None:
            base = (torch.sigmoid(self.shared_gate(x).float()) * base.float()).to(x.dtype)
        return self.kernels.experts(x, ids, weights, self.gate_up, self.down, self.activation, base)
