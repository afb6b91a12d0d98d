"""Divergence of one model's next-token distributions from another's, token by token."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference || other) = Σ p (log p - log q) in nats, from log-probabilities [rows, vocab_size] -> [rows]."""
    difference = torch.where(reference > -torch.inf, reference - other, 0.0)
    return (reference.exp() * difference).sum(-1)


def same_top(reference: Tensor, other: Tensor) -> Tensor:
    """Whether both put the same token first, bool [rows]."""
    return reference.argmax(-1) == other.argmax(-1)
