"""Kimi delta attention (Kimi Linear, 2025, arXiv 2510.26692): project; convolve; recur with a decay
of each channel of a key; norm and gate; project back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from freight.cache.pool import LayerCache, PagedState
from freight.kernels.interface import KernelSet
from freight.layers.linear import Projection
from freight.operands.activation import GateFunction
from freight.operands.batch import ForwardBatch
from freight.operands.packed import Rows, plain


@dataclass(frozen=True)
class KimiDelta:
    """`first` computes q, k and v, and `gates` what decides the decay of each channel, and beta of
    each head.

    Of the gate z of the result, and of the decays, there are two forms. In one step: `first` has z
    behind v, and `gates` the decays before beta. In two: `gates` has the first step of both, with
    beta between them; `decay` and `output_gate` are the second.

    conv             [channels of q, k and v, width] in the compute dtype
    a_log, dt_bias   [heads] and [channels of k] float32 (`KernelSet.decays`)
    norm             [channels of a head] in the compute dtype: of each head of the result
    bound            of log decays; None: they have none
    """

    first: Projection
    gates: Projection
    decay: Projection | None
    output_gate: Projection | None
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    out: Projection
    bound: float | None
    eps: float
    kernels: KernelSet

    consumer: ClassVar[None] = None  # two projections take the input

    def __call__(self, x: Rows, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """x: [num_tokens, hidden_size]; returns its shape."""
        assert isinstance(cache, PagedState), "Kimi delta attention has a state"
        kernels, states, sequences = self.kernels, cache.states, batch.sequences(cache.group)
        size, channels = len(self.dt_bias), len(self.conv)
        projected = self.first(x)
        f, b, z = self._gates(plain(x), projected[:, channels:])
        mixed = kernels.convolve(projected[:, :channels], self.conv, None, True, states, sequences)
        beta, log_decay = kernels.decays(f, b, self.a_log, self.dt_bias, bound=self.bound)
        q, k, v = (mixed[:, at : at + size] for at in (0, size, 2 * size))
        result = kernels.recurrence(
            q, k, v, beta, log_decay, states, sequences, delta=True, norm=True
        )
        normed = kernels.join(((result, self.norm),), self.eps)
        return self.out(kernels.gate(normed, z, GateFunction.SIGMOID))

    def _gates(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What decides decays, and beta, and the gate of the result, which is `z` if it is of one
        step.
        """
        gates, heads = self.gates(x), len(self.a_log)
        if self.decay is None or self.output_gate is None:
            size = len(self.dt_bias)
            return gates[:, :size], gates[:, size:], z
        rank = (gates.shape[1] - heads) // 2
        of_decay, of_gate = (
            self.kernels.join(((part, None),))
            for part in (gates[:, :rank], gates[:, rank + heads :])
        )
        return self.decay(of_decay), gates[:, rank : rank + heads], self.output_gate(of_gate)
