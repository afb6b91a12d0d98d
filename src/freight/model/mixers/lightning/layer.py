"""Lightning attention (arXiv 2501.08313): project; recur; norm and gate; project back."""

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
from freight.model.mixers.lightning.spec import LightningConfig, LightningNames
from freight.operands.activation import GateFunction
from freight.operands.batch import ForwardBatch
from freight.operands.packed import Rows, as_tensor
from freight.operands.recurrence import RecurrenceRule

_RULE = RecurrenceRule(delta=False, norm=False)


@dataclass(frozen=True)
class Lightning:
    """One layer of lightning attention.

    qkv         computes q, k and v, concatenated along the output
    log_decay   [heads] float32: logarithm of each head's decay
    norm        weight of the norm of all heads of the result together
    """

    qkv: Projection
    output_gate: Projection
    log_decay: Tensor
    norm: Tensor
    out: Projection
    eps: float
    kernels: KernelSet

    consumer: ClassVar[None] = None  # two projections use the input

    def __call__(self, x: Rows, batch: ForwardBatch, cache: PagedState) -> Tensor:
        """Compute the mixer of this step's tokens. x and the result: [num_tokens, hidden_size]."""
        kernels = self.kernels
        projected = self.qkv(x)
        activated = kernels.gate(projected, projected, GateFunction.SIGMOID)  # SiLU
        q, k, v = activated.chunk(3, dim=1)
        log_decay = self.log_decay.repeat(len(v), 1)
        beta = torch.ones_like(log_decay)
        sequences = batch.sequences(cache.group)
        result = kernels.recurrence(q, k, v, beta, log_decay, _RULE, cache.states, sequences)
        normed = kernels.join(((result, self.norm),), self.eps)
        return self.out(kernels.gate(normed, self.output_gate(as_tensor(x)), GateFunction.SIGMOID))


def build(mixer: LightningConfig, builder: Builder, prefix: str, ropes: Ropes) -> Lightning:
    """Build the mixer of the layer whose tensors begin with `prefix`."""
    names = builder.names.of(LightningNames)
    norm = builder.norm_weight(prefix + names.norm)
    heads = len(mixer.rates)
    by_part = places(3 * mixer.size).view(heads, 3, mixer.head_dim).transpose(0, 1).flatten()
    rates = torch.tensor(mixer.rates, dtype=torch.float32, device=norm.device)
    return Lightning(
        qkv=builder.linear(prefix, names.qkv, rows=(by_part,)),
        output_gate=builder.kept([prefix + names.output_gate]),
        log_decay=-rates,
        norm=norm,
        out=builder.gathered(prefix, names.out),
        eps=mixer.eps,
        kernels=builder.kernels,
    )
