"""Embedding of tokens and positions, and the output head over the same matrix as tokens or another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freight.kernels.interface import KernelSet
from freight.layers.linear import Projection
from freight.layers.norm import RMSNorm
from freight.operands.packed import PackedWeight, plain


@dataclass(frozen=True)
class Embedding:
    """Rows of `weight` [vocab_size, embedding_size], times `multiplier`, rounded once.

    projection   to hidden_size, where the rows have another size
    positions    [max_positions, hidden_size], learned; the row of each token's position is added
    norm         of the rows, in models that have it
    """

    weight: Tensor
    kernels: KernelSet
    multiplier: float | None = None
    projection: Projection | None = None
    positions: Tensor | None = None
    norm: RMSNorm | None = None

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """[num_tokens], and the position of each in its sequence -> [num_tokens, hidden_size]"""
        rows = self.kernels.lookup(
            self.weight, token_ids, 1.0 if self.multiplier is None else self.multiplier
        )
        if self.norm is not None:
            rows = plain(self.norm(rows, None)[1])
        if self.projection is not None:
            rows = self.projection(rows)
        return (
            rows
            if self.positions is None
            else self.kernels.lookup(self.positions, positions, base=rows)
        )


@dataclass(frozen=True)
class LogitsHead:
    """Hidden states [rows, hidden_size] -> float32 logits [rows, vocab_size]; quantized if the
    checkpoint's head is.

    `weight` is what `kernels.pack` returned; `input_limit` is that of `Linear`. With a soft cap a
    logit x becomes soft_cap * tanh(x / soft_cap) (Gemma 2, Riviere et al. 2024). `projection` comes
    before `weight`, if its rows are of another size than hidden_size. `divisor` divides the logits.
    `float32`: they are not rounded to the dtype of the hidden states; a weight without scales is in
    float32 then.
    """

    weight: PackedWeight
    kernels: KernelSet
    input_limit: float | None = None
    soft_cap: float | None = None
    projection: Projection | None = None
    divisor: float | None = None
    float32: bool = False

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.bounded(self.product(hidden))

    @property
    def begins_with_kernels(self) -> bool:
        """Whether `product` is made by `kernels` alone, and torch has no part in it."""
        return self.input_limit is None and not self.float32

    def product(self, hidden: Tensor) -> Tensor:
        """The logits, float32, before `divisor` and `soft_cap`."""
        if self.projection is not None:
            hidden = self.projection(hidden)
        if self.float32:
            hidden = hidden.float()
        if self.input_limit is not None:
            hidden = hidden.clamp(-self.input_limit, self.input_limit)
        return self.kernels.linear(hidden, self.weight, None, float32=True)

    def bounded(self, logits: Tensor) -> Tensor:
        """What `divisor` and `soft_cap` make of `product`."""
        if self.divisor is not None:
            logits = logits / self.divisor
        return (
            logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)
        )
