"""Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434), absorbed: project; norm; multiply q by
each head's keys; store; attend; multiply by each head's values; project back.

A prompt is computed as its decoded tokens are, from the latents that are stored, so both have the
same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freight.cache.pool import LayerCache, PagedState
from freight.kernels.interface import KernelSet
from freight.layers.attention import OutputGate
from freight.layers.linear import Projection
from freight.operands.batch import ForwardBatch
from freight.operands.packed import PackedExperts, PackedWeight, Rows, plain
from freight.operands.rotary import Rotary


@dataclass(frozen=True)
class Latent:
    """`first` computes, side by side, the latent of q (or q itself), the latent of keys and values,
    and what all keys share, which is rotated. Of the heads of q, the last channels are rotated.

    q_norm, q_b    norm and projection of the latent of q; None: `first` computes q
    kv_norm        [latent]
    keys, values   of each head: [latent, nope], which brings q into the latent, and [head_size,
                   latent], which brings the result out of it (`KernelSet.by_head`)
    nope           channels of a head of q that are not rotated
    eps            of both norms
    shared         channels that all keys share: those that are rotated, or that a rope could rotate
    output_gate    of the result of each head; None: there is none
    """

    first: Projection
    q_norm: Tensor | None
    q_b: Projection | None
    kv_norm: Tensor
    keys: PackedExperts
    values: PackedExperts
    o: Projection
    rotary: Rotary
    num_heads: int
    nope: int
    softmax_scale: float
    eps: float
    shared: int
    output_gate: OutputGate | None
    kernels: KernelSet

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """All whose tables the layer reads."""
        return (self.rotary,)

    @property
    def consumer(self) -> PackedWeight | None:
        """As `Linear.consumer`."""
        return self.first.consumer if self.output_gate is None else None

    def __call__(self, x: Rows, batch: ForwardBatch, kv: LayerCache) -> Tensor:
        """x: [num_tokens, hidden_size], a tensor or what the norm returned for `consumer`; returns
        x's shape.
        """
        assert kv is not None, "a layer with latent attention has pages"
        assert not isinstance(kv, PagedState)
        kernels, rotated, latent = self.kernels, self.shared, len(self.kv_norm)
        projected = self.first(x)
        size = projected.shape[1] - rotated - latent  # of what is of q
        q = kernels.join(((projected[:, :size], self.q_norm),), self.eps)
        q = q if self.q_b is None else self.q_b(q)
        heads = q.view(len(q), self.num_heads, self.nope + rotated)
        absorbed = kernels.by_head(heads[:, :, : self.nope], self.keys)
        # the rotated channels come first, as in all heads that are rotated in part
        q = kernels.join(((heads[:, :, self.nope :], None), (absorbed, None))).flatten(1)
        key = (
            (projected[:, size + latent :], None),
            (projected[:, size : size + latent], self.kv_norm),
        )
        q = kv.store(kernels.join(((q, None), *key), self.eps), self.rotary, batch)
        attended = plain(kv.attend(q, batch, self.softmax_scale, None, None))
        result = kernels.by_head(attended, self.values)
        return self.o(
            result.flatten(1) if self.output_gate is None else self.output_gate(plain(x), result)
        )
