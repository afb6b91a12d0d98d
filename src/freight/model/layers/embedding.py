"""Embedding of tokens and positions, and the output head, which may share the token matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freight.kernels.interface import KernelSet
from freight.model.layers.linear import Projection
from freight.model.layers.norm import Norm, RMSNorm
from freight.operands.packed import PackedWeight, as_tensor


@dataclass(frozen=True)
class Embedding:
    """Rows of `weight` [vocab_size, embedding_size], times `multiplier`, rounded once.

    weight       in the compute dtype; or packed from blocks (`Weight.blocks`), and then also the
                 matrix of a tied head
    projection   to hidden_size, if the rows have another size
    positions    [token types * num_positions, hidden_size], learned; the row of each token's
                 position is added: of the first token type, unless others are given. A model
                 without token types has one
    num_positions  rows of each token type
    norm         norm of the rows, or None
    last_norm    norm of the result, or None
    gathers      whether `weight` has this rank's columns alone (`KernelSet.gather`)
    dtype        of the rows of a packed weight: the compute dtype
    """

    weight: Tensor | PackedWeight
    kernels: KernelSet
    multiplier: float | None = None
    projection: Projection | None = None
    positions: Tensor | None = None
    num_positions: int = 0
    norm: RMSNorm | None = None
    last_norm: Norm | None = None
    gathers: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __call__(
        self, token_ids: Tensor, positions: Tensor, token_types: Tensor | None = None
    ) -> Tensor:
        """Embed tokens, [num_tokens], at their positions in their sequences, [num_tokens], with
        their token types, [num_tokens] int64; None: all have the first.

        Returns [num_tokens, hidden_size].
        """
        multiplier = 1.0 if self.multiplier is None else self.multiplier
        if isinstance(self.weight, Tensor):
            rows = self.kernels.lookup(self.weight, token_ids, multiplier)
        else:
            rows = self.kernels.packed_rows(self.weight, token_ids, self.dtype, multiplier)
        if self.gathers:
            rows = self.kernels.gather(rows)
        if self.norm is not None:
            rows = as_tensor(self.norm(rows, None)[1])
        if self.projection is not None:
            rows = self.projection(rows)
        if self.positions is not None:
            if token_types is not None:
                positions = positions + token_types * self.num_positions
            rows = self.kernels.lookup(self.positions, positions, base=rows)
        if self.last_norm is not None:
            rows = as_tensor(self.last_norm(rows, None)[1])
        return rows


@dataclass(frozen=True)
class LogitsHead:
    """Projection of hidden states [rows, hidden_size] to logits [rows, vocab_size], in float32: no
    step behind the hidden states rounds to their dtype.

    weight        the packed head (`kernels.pack`); quantized if the checkpoint's head is
    input_limit   as in `Linear`
    soft_cap      a logit x becomes soft_cap * tanh(x / soft_cap) (Gemma 2, Riviere et al. 2024)
    projection    from hidden_size to the size of weight's rows, where that differs
    divisor       divides the logits
    gathered      logits that are kept of those that all ranks compute together, where `weight` has
                  this rank's rows alone
    """

    weight: PackedWeight
    kernels: KernelSet
    input_limit: float | None = None
    soft_cap: float | None = None
    projection: Projection | None = None
    divisor: float | None = None
    gathered: int | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits, [rows, vocab_size] float32. hidden: [rows, hidden_size]."""
        return self.bounded(self.product(hidden))

    @property
    def begins_with_kernels(self) -> bool:
        """Say whether `product` calls only `kernels`, and no operation of torch."""
        return self.input_limit is None

    def product(self, hidden: Tensor) -> Tensor:
        """Return the logits before `divisor` and `soft_cap`, float32."""
        if self.projection is not None:
            hidden = self.projection(hidden)
        if self.input_limit is not None:
            hidden = hidden.clamp(-self.input_limit, self.input_limit)
        logits = self.kernels.linear(hidden, self.weight, None, float32=True)
        if self.gathered is None:
            return logits
        return self.kernels.gather(logits, first=True)[:, : self.gathered]

    def bounded(self, logits: Tensor) -> Tensor:
        """Apply `divisor` and `soft_cap` to the result of `product`."""
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.soft_cap is None:
            return logits
        return self.soft_cap * torch.tanh(logits / self.soft_cap)
