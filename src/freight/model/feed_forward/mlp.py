"""A dense feed-forward: two projections, and the activation between them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freight.kernels.interface import KernelSet
from freight.model.layers.linear import Projection
from freight.operands.activation import Activation, AnyActivation
from freight.operands.packed import PackedWeight, Rows


@dataclass(frozen=True)
class MLP:
    """down(activation(gate(x)) * up(x)); `gate_up` computes both, concatenated along the output.

    Without a gate, `gate_up` is up alone: down(activation(up(x))).
    """

    gate_up: Projection
    down: Projection
    activation: AnyActivation
    kernels: KernelSet

    @property
    def consumer(self) -> PackedWeight | None:
        """The packed weight that reads the input, as in `Linear.consumer`."""
        return self.gate_up.consumer

    def __call__(self, x: Rows, adapters: Tensor | None = None) -> Tensor:
        """Compute x [num_tokens, hidden_size], a tensor or what the norm returned for `consumer`;
        adapters: as in `ForwardBatch`.
        """
        gate_up = self.gate_up(x, adapters)
        activated: Rows
        if isinstance(self.activation, Activation):
            activated = self.kernels.activated(gate_up, self.activation, self.down.consumer)
        else:
            activated = self.kernels.gated(gate_up, self.activation, self.down.consumer)
        return self.down(activated, adapters)
