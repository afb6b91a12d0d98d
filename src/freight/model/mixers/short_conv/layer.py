"""Short convolution between two gates, the mixer of LFM2 (Liquid AI 2025).

out(c * convolution(b * x))
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freight.cache.pool import PagedState
from freight.kernels.interface import KernelSet
from freight.model.building import Builder, Ropes
from freight.model.layers.linear import Projection
from freight.model.mixers.short_conv.spec import ShortConvConfig, ShortConvNames
from freight.operands.activation import GateFunction
from freight.operands.batch import ForwardBatch
from freight.operands.packed import PackedWeight, Rows
from freight.operands.recurrence import Convolution


@dataclass(frozen=True)
class ShortConv:
    """One gated short convolution.

    `in_proj` computes b, c and x, concatenated along the output. The state holds b * x of earlier
    tokens, rounded to the compute dtype.

    conv   convolution of all channels, without SiLU
    """

    in_proj: Projection
    conv: Convolution
    out_proj: Projection
    kernels: KernelSet

    @property
    def consumer(self) -> PackedWeight | None:
        """Return the `consumer` of the layer's input (`Linear.consumer`)."""
        return self.in_proj.consumer

    def __call__(self, x: Rows, batch: ForwardBatch, cache: PagedState) -> Tensor:
        """Compute the mixer of this step's tokens, [num_tokens, hidden_size].

        x: [num_tokens, hidden_size], a tensor or the norm's result for `consumer`
        """
        kernels = self.kernels
        size = len(self.conv.weight)
        projected = self.in_proj(x, batch.adapters)
        b = projected[:, :size]
        c = projected[:, size : 2 * size]
        inputs = projected[:, 2 * size :]
        inputs = kernels.gate(inputs, b, GateFunction.IDENTITY)
        sequences = batch.sequences(cache.group)
        convolved = kernels.convolve(inputs, self.conv, cache.states, sequences)
        gated = kernels.gate(convolved, c, GateFunction.IDENTITY)
        return self.out_proj(gated, batch.adapters)


def build(mixer: ShortConvConfig, builder: Builder, prefix: str, ropes: Ropes) -> ShortConv:
    """Build the mixer of the layer whose tensors begin with `prefix`."""
    names = builder.names.of(ShortConvNames)
    return ShortConv(
        in_proj=builder.linear(prefix, names.in_proj),
        conv=builder.convolution(prefix + names.conv, bias=mixer.bias, silu=False),
        out_proj=builder.gathered(prefix, names.out_proj),
        kernels=builder.kernels,
    )
