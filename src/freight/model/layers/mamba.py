"""Mamba-2 (arXiv 2405.21060): project; convolve; recur; gate and norm; project back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freight.cache.pool import PagedState
from freight.kernels.interface import KernelSet
from freight.model.layers.linear import Projection
from freight.operands.batch import ForwardBatch
from freight.operands.packed import PackedWeight, Rows
from freight.operands.recurrence import (
    Convolution,
    DecayParameters,
    GatedNorm,
    RecurrenceRule,
)


@dataclass(frozen=True)
class Mamba2:
    """One Mamba-2 mixer (Dao and Gu 2024).

    `in_proj` computes the gate z, the inputs of the convolution (x, B, C), and dt of each head,
    concatenated along the output. It stays one product: the parts need not end where blocks of
    scales do.

    conv      convolution of the channels of x, B and C
    decays    parameters of the decay of each head
    rule      update of the states
    norm      norm of groups of channels of x
    gathers   whether these are channels of several ranks: results and gates of all are gathered
              before the norm, whose weight has the channels of all
    keys      channels of B (the same as of C)
    """

    in_proj: Projection
    conv: Convolution
    decays: DecayParameters
    rule: RecurrenceRule
    norm: GatedNorm
    out: Projection
    gathers: bool
    keys: int
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
        states = cache.states
        sequences = batch.sequences(cache.group)
        channels = len(self.conv.weight)
        values = channels - 2 * self.keys
        projected = self.in_proj(x)
        z = projected[:, :values]
        dt = projected[:, values + channels :]
        convolved = projected[:, values : values + channels]
        mixed = kernels.convolve(convolved, self.conv, states, sequences)
        first_q = values + self.keys
        v = mixed[:, :values]
        k = mixed[:, values:first_q]
        q = mixed[:, first_q:]
        beta, log_decay = kernels.decays(dt, None, self.decays)
        result = kernels.recurrence(q, k, v, beta, log_decay, self.rule, states, sequences)
        if self.gathers:
            result = kernels.gather(result)
            z = kernels.gather(kernels.join(((z, None),)))
        return self.out(kernels.gated_norm(result, z, self.norm, self.out.consumer))
