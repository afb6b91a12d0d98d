"""Kimi delta attention (arXiv 2510.26692): project; convolve; recur; norm and gate; project back.

From Kimi Linear (2025). Each channel of a key has its own decay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from freight.cache.pool import PagedState
from freight.kernels.interface import KernelSet
from freight.model.building import Builder, Ropes
from freight.model.layers.linear import Projection
from freight.model.mixers.delta_net.layer import DELTA_RULE
from freight.model.mixers.kimi_delta.spec import KimiDeltaConfig, KimiDeltaNames
from freight.operands.activation import GateFunction
from freight.operands.batch import ForwardBatch
from freight.operands.packed import Rows, as_tensor
from freight.operands.recurrence import Convolution, DecayParameters


@dataclass(frozen=True)
class KimiDelta:
    """One layer of Kimi delta attention.

    `first` computes q, k and v; `gates` computes the inputs of the decay of each channel and of
    beta of each head (`KernelSet.decays`). The gate z of the result and the decays are projected in
    one step or in two (low rank). In one step, `first` also computes z, after v, and `gates`
    computes the decays, then beta. In two steps, `gates` computes the first step of the decays,
    then beta, then the first step of z; `decay` and `output_gate` are the second steps.

    conv     convolution of the channels of q, k and v
    decays   parameters of the decay of each channel of k
    norm     [channels of a head] in the compute dtype: norm of each head of the result
    """

    first: Projection
    gates: Projection
    decay: Projection | None
    output_gate: Projection | None
    conv: Convolution
    decays: DecayParameters
    norm: Tensor
    out: Projection
    eps: float
    kernels: KernelSet

    consumer: ClassVar[None] = None  # two projections use the input

    def __call__(self, x: Rows, batch: ForwardBatch, cache: PagedState) -> Tensor:
        """Compute the mixer of this step's tokens. x and the result: [num_tokens, hidden_size]."""
        kernels = self.kernels
        states = cache.states
        sequences = batch.sequences(cache.group)
        size = len(self.decays.dt_bias)
        channels = len(self.conv.weight)
        projected = self.first(x, batch.adapters)
        f, b, z = self._gates(as_tensor(x), projected[:, channels:], batch.adapters)
        mixed = kernels.convolve(projected[:, :channels], self.conv, states, sequences)
        beta, log_decay = kernels.decays(f, b, self.decays)
        q = mixed[:, :size]
        k = mixed[:, size : 2 * size]
        v = mixed[:, 2 * size :]
        result = kernels.recurrence(q, k, v, beta, log_decay, DELTA_RULE, states, sequences)
        normed = kernels.join(((result, self.norm),), self.eps)
        return self.out(kernels.gate(normed, z, GateFunction.SIGMOID), batch.adapters)

    def _gates(
        self, x: Tensor, z: Tensor, adapters: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of the decays and of beta, and the gate of the result.

        z: the gate if it is projected in one step; else it has no columns
        """
        gates = self.gates(x, adapters)
        heads = len(self.decays.a_log)
        if self.decay is None or self.output_gate is None:
            size = len(self.decays.dt_bias)
            return gates[:, :size], gates[:, size:], z
        rank = (gates.shape[1] - heads) // 2
        of_decay = self.kernels.join(((gates[:, :rank], None),))
        of_gate = self.kernels.join(((gates[:, rank + heads :], None),))
        decay = self.decay(of_decay, adapters)
        return decay, gates[:, rank : rank + heads], self.output_gate(of_gate, adapters)


def build(mixer: KimiDeltaConfig, builder: Builder, prefix: str, ropes: Ropes) -> KimiDelta:
    """Build the mixer of the layer whose tensors begin with `prefix`."""
    names = builder.names.of(KimiDeltaNames)
    two = mixer.rank is not None
    gates = (names.decay[0], names.beta, *((names.output_gate[0],) if two else ()))
    conv = torch.cat([builder.tensor(prefix + name).flatten(1) for name in names.conv])
    return KimiDelta(
        first=builder.linear(prefix, *names.qkv, *(() if two else names.output_gate)),
        gates=builder.kept([prefix + name for name in gates]),
        decay=builder.kept([prefix + names.decay[1]]) if two else None,
        output_gate=builder.kept([prefix + names.output_gate[1]]) if two else None,
        conv=Convolution(conv, None, silu=True),
        decays=DecayParameters(
            builder.exact(prefix + names.a_log).flatten(),
            builder.exact(prefix + names.dt_bias),
            bound=mixer.bound,
        ),
        norm=builder.tensor(prefix + names.norm),
        out=builder.gathered(prefix, names.out),
        eps=builder.config.norm_eps,
        kernels=builder.kernels,
    )
