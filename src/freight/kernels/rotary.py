"""Rotary: the parameters of what a layer does to queries and keys between their projection and the cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding by position, after a norm of each head where the model has one (Qwen3).

    cos, sin   [max_positions, head_dim / 2] float32, contiguous; the same tensors for all layers
    norms      weights of RMSNorm over each head of q, and of k: [head_dim], in the compute dtype
    eps        of these norms
    """

    cos: Tensor
    sin: Tensor
    norms: tuple[Tensor, Tensor] | None = None
    eps: float = 0.0
