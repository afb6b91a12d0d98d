"""Centers: constants that are subtracted from keys before these are rounded to E4M3.

E4M3's error is relative, so the mean squared error of a rounded key is proportional to E[k^2] =
mean^2 + variance; subtracting the mean leaves the variance. An error on a key's channel reaches the
scores in proportion to the query's energy there, E[q^2]. Rotary embedding mixes the two channels of
a pair but keeps the pair's energy, so keys are weighted and selected by pair, before rotary
embedding. Channels that are not rotated have no pair and no center. A centered pair costs attention
two multiplications per score, so only pairs whose mean^2 exceeds their variance are centered.
Values are not centered: in trained models that gained nothing (docs/numerics.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAIR_RATIO = 1.0  # mean^2 over variance from which a pair of key channels is centered
WORTH = 1.25  # least gain for which a layer's keys are centered


@dataclass(frozen=True)
class LayerCenters:
    """The centers of one layer's keys.

    k        [num_kv_heads, head_dim] float32, None if the gain is too small
    k_gain   mean squared error of scores without centers divided by that with them
    """

    k: Tensor | None
    k_gain: float


class Moments:
    """Mean and variance of each channel."""

    def __init__(self) -> None:
        self._count = 0
        self._sum = torch.zeros((), dtype=torch.float64, device="cpu")
        self._squares = self._sum

    def observe(self, x: Tensor) -> None:
        """Add the tokens of `x` [num_tokens, heads, head_dim]."""
        values = x.double()
        self._count += len(x)
        self._sum = self._sum + values.sum(0)
        self._squares = self._squares + values.square().sum(0)

    @property
    def mean(self) -> Tensor:
        """float64 [heads, head_dim]"""
        return self._sum / self._count

    @property
    def energy(self) -> Tensor:
        """Mean of the squares, float64 [heads, head_dim]."""
        return self._squares / self._count

    @property
    def variance(self) -> Tensor:
        """float64 [heads, head_dim]"""
        return (self.energy - self.mean.square()).clamp(min=0)


class CenterWatch:
    """Moments of one layer's queries and keys before rotary embedding of `rotary_dim` channels."""

    def __init__(self, rotary_dim: int) -> None:
        self._rotary_dim = rotary_dim
        self.q = Moments()
        self.k = Moments()

    def see(self, q: Tensor, k: Tensor) -> None:
        """Add tokens to the moments. q, k: [num_tokens, heads, head_dim]"""
        self.q.observe(q)
        self.k.observe(k)

    def centers(self) -> LayerCenters:
        mean = self.k.mean
        spread = self.k.variance
        turned = slice(self._rotary_dim)
        q_energy = self.q.energy.unflatten(0, (len(mean), -1)).sum(1)  # [num_kv_heads, head_dim]
        weight = _by_pair(q_energy[:, turned])
        of_mean = _by_pair(mean[:, turned].square())
        of_spread = _by_pair(spread[:, turned])
        large = of_mean > PAIR_RATIO * of_spread
        # A pair's product counts it twice, so the channels without rotary embedding count twice too
        unturned = float((q_energy * self.k.energy)[:, self._rotary_dim :].sum())
        before = float((weight * (of_mean + of_spread)).sum()) + 2 * unturned
        after = before - float((weight * of_mean * large).sum())
        gain = _ratio(before, after)
        b = torch.zeros_like(mean)
        b[:, turned] = mean[:, turned] * large.repeat(1, 2)
        return LayerCenters(b.float() if gain >= WORTH else None, gain)


def _by_pair(x: Tensor) -> Tensor:
    """Sum the channel pairs (i, i + rotary_dim / 2): [heads, rotary_dim] -> [heads, rotary_dim / 2]."""
    first, second = x.tensor_split(2, dim=-1)
    return first + second


def _ratio(before: float, after: float) -> float:
    if after > 0:
        return before / after
    return 1.0 if before == 0 else float("inf")
