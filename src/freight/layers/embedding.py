"""Token embedding, and the output head over the same or another matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freight.kernels.interface import KernelSet


@dataclass(frozen=True)
class Embedding:
    """Rows of `weight` [vocab_size, hidden_size], times `multiplier`, a number of the weight's dtype."""

    weight: Tensor
    multiplier: float | None = None

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]"""
        rows = self.weight[token_ids]
        return rows if self.multiplier is None else rows * self.multiplier


@dataclass(frozen=True)
class LogitsHead:
    """Hidden states [rows, hidden_size] -> float32 logits [rows, vocab_size]; quantized if the checkpoint's head is.

    `weight` is what `kernels.pack` returned; `input_limit` is that of `Linear`. With a soft cap a logit x becomes
    soft_cap * tanh(x / soft_cap) (Gemma 2, Riviere et al. 2024).
    """

    weight: Any
    kernels: KernelSet
    input_limit: float | None = None
    soft_cap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.input_limit is not None:
            hidden = hidden.clamp(-self.input_limit, self.input_limit)
        logits = self.kernels.linear(hidden, self.weight, None).float()
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)
