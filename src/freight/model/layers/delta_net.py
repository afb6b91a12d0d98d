"""Gated delta net (arXiv 2412.06464): project; convolve; recur; norm and gate; project back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from freight.cache.pool import PagedState
from freight.kernels.interface import KernelSet
from freight.model.layers.linear import Projection
from freight.operands.batch import ForwardBatch
from freight.operands.packed import Rows, as_tensor
from freight.operands.recurrence import (
    Convolution,
    DecayParameters,
    GatedNorm,
    RecurrenceRule,
)

# of every gated delta net, and of Kimi delta attention
DELTA_RULE = RecurrenceRule(delta=True, norm=True)


@dataclass(frozen=True)
class DeltaNet:
    """One gated delta net (Yang et al. 2024).

    qkvz     computes q, k, v and the gate z, concatenated along the output
    ba       computes b and a of each head, from which `KernelSet.decays` makes beta and the decay
    conv     convolution of the channels of q, k and v
    decays   parameters of the decay of each head
    norm     norm of each head of the result, of v_dim channels
    sizes    channels of q (the same as of k), and of q, k and v together
    """

    qkvz: Projection
    ba: Projection
    conv: Convolution
    decays: DecayParameters
    norm: GatedNorm
    out: Projection
    sizes: tuple[int, int]
    kernels: KernelSet

    consumer: ClassVar[None] = None  # two projections use the input

    def __call__(self, x: Rows, batch: ForwardBatch, cache: PagedState) -> Tensor:
        """Compute the mixer of this step's tokens. x and the result: [num_tokens, hidden_size]."""
        kernels = self.kernels
        states = cache.states
        sequences = batch.sequences(cache.group)
        keys, channels = self.sizes
        projected = self.qkvz(x)
        ba = self.ba(as_tensor(x))
        mixed = kernels.convolve(projected[:, :channels], self.conv, states, sequences)
        heads = len(self.decays.a_log)
        beta, log_decay = kernels.decays(ba[:, heads:], ba[:, :heads], self.decays)
        q = mixed[:, :keys]
        k = mixed[:, keys : 2 * keys]
        v = mixed[:, 2 * keys :]
        result = kernels.recurrence(q, k, v, beta, log_decay, DELTA_RULE, states, sequences)
        z = projected[:, channels:]
        return self.out(kernels.gated_norm(result, z, self.norm, self.out.consumer))
