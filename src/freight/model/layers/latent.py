"""Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) in its absorbed form.

Project; norm; multiply q by each head's keys; store; attend; multiply by each head's values;
project back. A prompt is computed like decoded tokens, from the stored latents, so both have the
same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freight.cache.pool import LayerKV
from freight.kernels.interface import KernelSet
from freight.model.layers.attention import OutputGate
from freight.model.layers.linear import Projection
from freight.operands.attention import AttentionCall
from freight.operands.batch import ForwardBatch
from freight.operands.packed import PackedExperts, PackedWeight, Rows, as_tensor
from freight.operands.rotary import Rotary


@dataclass(frozen=True)
class Latent:
    """One layer of latent attention.

    `first` computes, concatenated along the output: the latent of q (or q itself), the latent of
    keys and values, and the channels that all keys share, which are rotated. In each head of q, the
    last channels are rotated.

    q_norm, q_b    norm and projection of the latent of q; None: `first` computes q
    kv_norm        [latent]: norm of the latent of keys and values
    keys, values   matrices of each head: [latent, nope], which maps q into the latent, and
                   [head_size, latent], which maps the result out of it (`KernelSet.by_head`)
    nope           channels of a head of q that are not rotated
    eps            eps of both norms
    shared         number of channels that all keys share: those that a rope rotates, or could
    output_gate    gate of the result of each head, or None
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
    call: AttentionCall
    eps: float
    shared: int
    output_gate: OutputGate | None
    kernels: KernelSet

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """Return every `Rotary` whose tables the layer reads."""
        return (self.rotary,)

    @property
    def consumer(self) -> PackedWeight | None:
        """Return the `consumer` of the layer's input (`Linear.consumer`)."""
        return self.first.consumer if self.output_gate is None else None

    def __call__(self, x: Rows, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """Compute attention of this step's tokens, [num_tokens, hidden_size].

        x: [num_tokens, hidden_size], a tensor or the norm's result for `consumer`
        """
        kernels = self.kernels
        rotated = self.shared
        latent = len(self.kv_norm)
        projected = self.first(x)
        size = projected.shape[1] - rotated - latent  # columns of q or its latent
        q = kernels.join(((projected[:, :size], self.q_norm),), self.eps)
        q = q if self.q_b is None else self.q_b(q)
        heads = q.view(len(q), self.num_heads, self.nope + rotated)
        absorbed = kernels.by_head(heads[:, :, : self.nope], self.keys)
        # Rotated channels come first: the kernels rotate the first channels of a head.
        q = kernels.join(((heads[:, :, self.nope :], None), (absorbed, None))).flatten(1)
        key = (
            (projected[:, size + latent :], None),
            (projected[:, size : size + latent], self.kv_norm),
        )
        q = kv.store(kernels.join(((q, None), *key), self.eps), self.rotary, batch)
        attended = as_tensor(kv.attend(q, batch, self.call))
        result = kernels.by_head(attended, self.values)
        return self.o(
            result.flatten(1)
            if self.output_gate is None
            else self.output_gate(as_tensor(x), result)
        )
