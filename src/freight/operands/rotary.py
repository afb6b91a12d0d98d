"""Rotary: the parameters of the step between the projection of queries and keys and the cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding by position, after a norm of each head where the model has one (Qwen3, Gemma
    3).

    cos, sin   [max_positions, rotary_dim / 2] float32, contiguous; shared by all layers with the
               same rope. The first rotary_dim channels of a head are rotated, in pairs (i, i +
               rotary_dim / 2); the others are not
    norms      weights of RMSNorm over each head of q, and of k: [head_dim], in the compute dtype or
               float32 (`KernelSet.add_rms_norm`)
    eps        epsilon of these norms
    q_factor   [max_positions] float32, contiguous: factor of all channels of the rotated queries by
               position; both are rounded to the compute dtype (Ministral 3). None: no factor
    key_bias   [num_kv_heads, k_dim], of any float dtype: what the projection adds to all keys, in the order of
               channels that is rotated. None: nothing, or a norm follows, so keys do not all have it
    """

    cos: Tensor
    sin: Tensor
    norms: tuple[Tensor, Tensor] | None = None
    eps: float = 0.0
    q_factor: Tensor | None = None
    key_bias: Tensor | None = None

    @property
    def rotary_dim(self) -> int:
        """Rotated channels of a head, the first ones."""
        return 2 * self.cos.shape[1]
