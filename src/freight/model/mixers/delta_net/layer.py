"""Gated delta net (arXiv 2412.06464): project; convolve; recur; norm and gate; project back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from freight.cache.pool import PagedState
from freight.kernels.interface import KernelSet
from freight.model.building import Builder, Ropes
from freight.model.layers.linear import Projection
from freight.model.layers.rope import places
from freight.model.mixers.delta_net.spec import DeltaNetConfig, DeltaNetNames
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
        projected = self.qkvz(x, batch.adapters)
        ba = self.ba(as_tensor(x), batch.adapters)
        mixed = kernels.convolve(projected[:, :channels], self.conv, states, sequences)
        heads = len(self.decays.a_log)
        beta, log_decay = kernels.decays(ba[:, heads:], ba[:, :heads], self.decays)
        q = mixed[:, :keys]
        k = mixed[:, keys : 2 * keys]
        v = mixed[:, 2 * keys :]
        result = kernels.recurrence(q, k, v, beta, log_decay, DELTA_RULE, states, sequences)
        z = projected[:, channels:]
        normed = kernels.gated_norm(result, z, self.norm, self.out.consumer)
        return self.out(normed, batch.adapters)


def build(mixer: DeltaNetConfig, builder: Builder, prefix: str, ropes: Ropes) -> DeltaNet:
    """Build the mixer of the layer whose tensors begin with `prefix`."""
    names = builder.names.of(DeltaNetNames)
    heads = mixer.heads // mixer.key_heads  # value heads of a key head
    keys = mixer.k_dim
    values = heads * mixer.v_dim
    of_qkvz = (
        None if len(names.qkvz) > 1 else _side_by_side(mixer.key_heads, keys, keys, values, values)
    )
    of_ba = None if len(names.ba) > 1 else _side_by_side(mixer.key_heads, heads, heads)
    norm = builder.tensor(prefix + names.norm)
    return DeltaNet(
        qkvz=builder.linear(prefix, *names.qkvz, rows=(of_qkvz,)),
        ba=builder.kept([prefix + name for name in names.ba], of_ba),
        conv=Convolution(builder.tensor(prefix + names.conv).flatten(1), None, silu=True),
        decays=DecayParameters(
            builder.exact(prefix + names.a_log), builder.exact(prefix + names.dt_bias)
        ),
        norm=GatedNorm(norm, builder.config.norm_eps, group=len(norm), norm_first=True),
        out=builder.gathered(prefix, names.out),
        sizes=(mixer.key_heads * mixer.k_dim, mixer.channels),
        kernels=builder.kernels,
    )


def _side_by_side(groups: int, *sizes: int) -> Tensor:
    """Return the order of rows that turns `groups` groups of parts of `sizes` into parts that span
    all groups.
    """
    rows = places(groups * sum(sizes)).view(groups, -1)
    return torch.cat([part.flatten() for part in rows.split(sizes, 1)])
