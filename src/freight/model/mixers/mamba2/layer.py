"""Mamba-2 (arXiv 2405.21060): project; convolve; recur; gate and norm; project back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freight.cache.pool import PagedState
from freight.kernels.interface import KernelSet
from freight.model.building import Builder, Ropes
from freight.model.layers.linear import Projection
from freight.model.mixers.mamba2.spec import Mamba2Config, MambaNames
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
        projected = self.in_proj(x, batch.adapters)
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
        normed = kernels.gated_norm(result, z, self.norm, self.out.consumer)
        return self.out(normed, batch.adapters)


def build(mixer: Mamba2Config, builder: Builder, prefix: str, ropes: Ropes) -> Mamba2:
    """Build the mixer of the layer whose tensors begin with `prefix`."""
    names = builder.names.of(MambaNames)
    norm = builder.tensor(prefix + names.norm)
    gathers = len(norm) > mixer.heads * mixer.head_dim  # it has the channels of all ranks
    return Mamba2(
        in_proj=builder.linear(prefix, names.in_proj),
        conv=builder.convolution(prefix + names.conv, bias=mixer.conv_bias, silu=True),
        decays=DecayParameters(
            builder.exact(prefix + names.a_log),
            builder.exact(prefix + names.dt_bias),
            mixer.limits,
        ),
        rule=RecurrenceRule(delta=False, norm=False, skip=builder.exact(prefix + names.skip)),
        norm=GatedNorm(
            norm, builder.config.norm_eps, len(norm) // mixer.norm_groups, norm_first=False
        ),
        gathers=gathers,
        out=builder.gathered(prefix, names.out, inputs=not gathers),
        keys=mixer.groups * mixer.state_size,
        kernels=builder.kernels,
    )
