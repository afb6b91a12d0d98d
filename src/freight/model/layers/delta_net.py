"""Gated delta net (arXiv 2412.06464): project; convolve; recur; norm and gate; project back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from freight.cache.pool import LayerCache, PagedState
from freight.kernels.interface import KernelSet
from freight.model.layers.linear import Projection
from freight.operands.batch import ForwardBatch
from freight.operands.packed import Rows, as_tensor


@dataclass(frozen=True)
class DeltaNet:
    """One gated delta net (Yang et al. 2024).

    qkvz             computes q, k, v and the gate z, concatenated along the output
    ba               computes b and a of each head, from which `KernelSet.decays` makes beta and
                     the decay
    conv             [channels of q, k and v, width] in the compute dtype
    a_log, dt_bias   [heads] float32 (`KernelSet.decays`)
    norm             [v_dim] in the compute dtype: norm of each head of the result
    sizes            channels of q (the same as of k), and of q, k and v together
    """

    qkvz: Projection
    ba: Projection
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    out: Projection
    sizes: tuple[int, int]
    eps: float
    kernels: KernelSet

    consumer: ClassVar[None] = None  # two projections use the input

    def __call__(self, x: Rows, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """Compute the mixer of this step's tokens. x and the result: [num_tokens, hidden_size]."""
        assert isinstance(cache, PagedState), "a delta net has a state"
        kernels = self.kernels
        states = cache.states
        sequences = batch.sequences(cache.group)
        keys, channels = self.sizes
        projected = self.qkvz(x)
        ba = self.ba(as_tensor(x))
        mixed = kernels.convolve(projected[:, :channels], self.conv, None, True, states, sequences)
        heads = len(self.a_log)
        beta, log_decay = kernels.decays(ba[:, heads:], ba[:, :heads], self.a_log, self.dt_bias)
        q = mixed[:, :keys]
        k = mixed[:, keys : 2 * keys]
        v = mixed[:, 2 * keys :]
        result = kernels.recurrence(
            q, k, v, beta, log_decay, states, sequences, delta=True, norm=True
        )
        z = projected[:, channels:]
        size = len(self.norm)
        return self.out(
            kernels.gated_norm(result, z, self.norm, self.eps, size, True, self.out.consumer)
        )
