"""Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) in its absorbed form.

Project; norm; multiply q by each head's keys; store; attend; multiply by each head's values;
project back. A prompt is computed like decoded tokens, from the stored latents, so both have the
same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freight.cache.pool import LayerKV, PagedKV
from freight.kernels.interface import KernelSet
from freight.model.building import Builder, Ropes
from freight.model.layers.linear import Projection
from freight.model.layers.rope import half_pairs, places
from freight.model.mixers.attention.layer import OutputGate
from freight.model.mixers.latent.indexer import Indexer, build_indexer
from freight.model.mixers.latent.spec import LatentConfig, LatentNames
from freight.operands.activation import GateFunction
from freight.operands.attention import AttentionCall
from freight.operands.batch import ForwardBatch
from freight.operands.packed import PackedExperts, PackedWeight, Rows, as_tensor
from freight.operands.rotary import Rotary
from freight.operands.weight import Weight


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
    indexer        what chooses the keys that a token reads, or None
    chosen_by      index of the layer whose indexer does, this one or one before; None: all are read
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
    indexer: Indexer | None = None
    chosen_by: int | None = None

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """Return every `Rotary` whose tables the layer reads."""
        return (self.rotary,)

    @property
    def consumer(self) -> PackedWeight | None:
        """Return the `consumer` of the layer's input (`Linear.consumer`)."""
        alone = self.output_gate is None and self.indexer is None
        return self.first.consumer if alone else None

    def __call__(self, x: Rows, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """Compute attention of this step's tokens, [num_tokens, hidden_size].

        x: [num_tokens, hidden_size], a tensor or the norm's result for `consumer`
        """
        kernels = self.kernels
        rotated = self.shared
        latent = len(self.kv_norm)
        adapters = batch.adapters
        projected = self.first(x, adapters)
        size = projected.shape[1] - rotated - latent  # columns of q or its latent
        q = kernels.join(((projected[:, :size], self.q_norm),), self.eps)
        if self.indexer is not None:
            assert self.chosen_by is not None
            assert isinstance(kv, PagedKV)
            batch.choices[self.chosen_by] = self.indexer(as_tensor(x), q, batch, kv)
        q = q if self.q_b is None else self.q_b(q, adapters)
        heads = q.view(len(q), self.num_heads, self.nope + rotated)
        absorbed = kernels.by_head(heads[:, :, : self.nope], self.keys)
        # Rotated channels come first: the kernels rotate the first channels of a head.
        q = kernels.join(((heads[:, :, self.nope :], None), (absorbed, None))).flatten(1)
        key = (
            (projected[:, size + latent :], None),
            (projected[:, size : size + latent], self.kv_norm),
        )
        q = kv.store(kernels.join(((q, None), *key), self.eps), self.rotary, batch)
        attended = self._attend(q, batch, kv)
        result = kernels.by_head(attended, self.values)
        if self.output_gate is None:
            return self.o(result.flatten(1), adapters)
        return self.o(self.output_gate(as_tensor(x), result, adapters), adapters)

    def _attend(self, q: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """Return the latents of the keys that each row reads, averaged, [num_tokens, num_heads,
        latent].
        """
        chosen = None if self.chosen_by is None else batch.choices[self.chosen_by]
        if chosen is None:
            return as_tensor(kv.attend(q, batch, self.call))
        assert isinstance(kv, PagedKV)
        return kv.attend_chosen(q, batch, self.call, chosen)


def build(mixer: LatentConfig, builder: Builder, prefix: str, ropes: Ropes) -> Latent:
    """Build the mixer of the layer whose tensors begin with `prefix`."""
    names = builder.names.of(LatentNames)
    kernels = builder.kernels
    interleaved = mixer.rope is not None and builder.config.ropes[mixer.rope].interleaved
    of_q = _rotated_last(mixer.num_heads, mixer.nope, mixer.rotated, interleaved)
    of_kv = _rotated_last(1, mixer.latent, mixer.rotated, interleaved)
    ranked = mixer.q_rank is not None
    first = {names.q_a: None, names.kv_a: of_kv} if ranked else {names.q: of_q, names.kv_a: of_kv}
    kv_b = builder.tensor(f"{prefix}{names.kv_b}.weight")
    heads = kv_b.view(mixer.num_heads, mixer.nope + mixer.head_size, mixer.latent)
    gate = builder.gate(prefix + names.output_gate) if mixer.output_gate else None
    return Latent(
        first=builder.linear(prefix, *first, rows=tuple(first.values())),
        q_norm=builder.norm_weight(prefix + names.q_norm) if ranked else None,
        q_b=builder.linear(prefix, names.q_b, rows=(of_q,)) if ranked else None,
        kv_norm=builder.norm_weight(prefix + names.kv_norm),
        keys=_by_head(mixer, kernels, [head[: mixer.nope].t() for head in heads]),
        values=_by_head(mixer, kernels, [head[mixer.nope :] for head in heads]),
        o=builder.gathered(prefix, names.o),
        rotary=ropes[mixer.rope],
        num_heads=mixer.num_heads,
        nope=mixer.nope,
        call=AttentionCall(mixer.softmax_scale, group=mixer.group),
        eps=mixer.eps,
        shared=mixer.rotated,
        output_gate=None if gate is None else OutputGate(gate, GateFunction.SIGMOID, kernels),
        kernels=kernels,
        indexer=build_indexer(mixer, builder, prefix, ropes[mixer.rope]),
        chosen_by=mixer.chosen_by,
    )


def _by_head(mixer: LatentConfig, kernels: KernelSet, heads: Sequence[Tensor]) -> PackedExperts:
    """Pack the matrix of each head, [outputs, inputs]. Of several ranks each counts for those of all
    (`Weight.whole`), as ranks divide the heads and not their outputs.
    """
    whole = None
    if mixer.group is not None:
        whole = len(heads[0]) * (mixer.group // mixer.num_heads)
    return kernels.pack_experts([Weight(head.contiguous(), whole=whole) for head in heads])


def _rotated_last(num_heads: int, plain: int, rotated: int, interleaved: bool) -> Tensor | None:
    """Return the order of the rows of heads whose last `rotated` channels have a rope; None keeps
    the order (`RopeConfig`).
    """
    if not interleaved:
        return None
    head = torch.cat(
        (
            places(plain),
            plain + half_pairs(1, rotated, rotated),
        )
    )
    return (places(num_heads)[:, None] * len(head) + head).flatten()
