"""Observers: collect the statistics that a scale needs, piece by piece, without keeping the values.

An observer sees values [groups, count] and keeps, per group, the largest magnitude and, if it needs
one, a histogram of magnitudes. `amax()` is the magnitude that will be encoded as the format's
largest number:

absmax       the largest observed: no value of the calibration data saturates
percentile   the smallest that at least 99.99 % of the values do not exceed
mse          the one, of 50 between half the largest and the largest, with the least mean squared
             error after rounding

A NaN or an infinity raises an error that names what was observed, because no scale can represent
it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from freight.errors import CheckpointError
from freight.fp8.cast import decode, encode, scale_from_amax
from freight.fp8.formats import Format, Granularity
from freight.quantizer.plan import ObserverKind

PERCENTILE = 0.9999
MSE_STEPS = 50
# Of float32's 23 bits of mantissa, 6 remain: 64 bins an octave, each at most 1.6 % wide
_SHIFT = 17
_LOWEST = (127 - 40) << 23 >> _SHIFT  # the bin of 2 ** -40; smaller magnitudes are counted in it
_NUM_BINS = 64 * 72  # up to 2 ** 32
_AT_ONCE = 2**20  # numbers that `mse` rounds at a time


class Observer(Protocol):
    """Collects magnitudes by group."""

    def observe(self, values: Tensor) -> None:
        """Collect `values` [groups, count], of any float dtype. Raises CheckpointError for NaN and
        infinities.
        """
        ...

    def amax(self) -> Tensor:
        """Return the magnitudes, float32 [groups]; 0 where only zeros were seen, or nothing."""
        ...


class AbsMax:
    """The largest magnitude of each group."""

    def __init__(self, name: str, groups: int, device: str) -> None:
        """`name`: what is observed, for error messages."""
        self._name = name
        self._largest = torch.zeros(groups, dtype=torch.float32, device=device)

    def observe(self, values: Tensor) -> None:
        largest = values.abs().amax(1).float()  # a NaN spreads to the result
        if not largest.isfinite().all():
            what = "NaN" if largest.isnan().any() else "infinity"
            raise CheckpointError(
                f"{self._name}: {what} during calibration, so no scale can be measured; the model computes it without "
                "quantization too"
            )
        self._largest = torch.maximum(self._largest, largest)

    def amax(self) -> Tensor:
        return self._largest


class _Histogram(AbsMax):
    """Also counts magnitudes, in bins of equal relative width."""

    def __init__(self, name: str, groups: int, device: str) -> None:
        super().__init__(name, groups, device)
        self._counts = torch.zeros(groups, _NUM_BINS, dtype=torch.int64, device=device)

    def observe(self, values: Tensor) -> None:
        super().observe(values)
        bits = values.abs().float().contiguous().view(torch.int32) >> _SHIFT
        bins = (bits - _LOWEST).clamp(0, _NUM_BINS - 1).long()
        self._counts.scatter_add_(1, bins, torch.ones_like(bins))


def _magnitude(bins: Tensor, part: float) -> Tensor:
    """Return the magnitude at `part` of each bin's width, float32: 0 its lower end, 1 its upper."""
    bits = (bins + _LOWEST << _SHIFT) + int(part * (1 << _SHIFT))
    return bits.to(torch.int32).view(torch.float32)


class Percentile(_Histogram):
    """The upper end of the bin in which the share of each group's values is reached."""

    def amax(self) -> Tensor:
        reached = self._counts.cumsum(1)
        least = (reached[:, -1:].double() * PERCENTILE).ceil().long().clamp(min=1)
        return torch.minimum(_magnitude((reached < least).sum(1), 1.0), self._largest)


class MeanSquaredError(_Histogram):
    """The largest magnitude, shrunk as far as the error of rounding the histogram to E4M3 falls."""

    def amax(self) -> Tensor:
        used = self._counts.any(0).nonzero()[:, 0]
        values = _magnitude(used, 0.5)
        factors = torch.linspace(1.0, 0.5, MSE_STEPS, dtype=torch.float32, device=values.device)
        best = torch.ones_like(self._largest)
        step = max(1, _AT_ONCE // max(1, len(used)))
        for begin in range(0, len(self._largest), step):
            rows = slice(begin, begin + step)
            counts = self._counts[rows][:, used].float()
            largest = self._largest[rows]
            errors = torch.stack([_error(values, counts, factor * largest) for factor in factors])
            best[rows] = factors[errors.argmin(0)]
        return best * self._largest


def _error(values: Tensor, counts: Tensor, amax: Tensor) -> Tensor:
    """Sum of squared errors of `values` [bins], each `counts` [groups, bins] times, under `amax`
    [groups].
    """
    scale = scale_from_amax(amax, Format.E4M3FN)[:, None]
    rounded = decode(encode(values.expand_as(counts), scale, Format.E4M3FN), scale)
    return ((rounded - values).square() * counts).sum(1)


_KINDS = {
    ObserverKind.ABSMAX: AbsMax,
    ObserverKind.PERCENTILE: Percentile,
    ObserverKind.MSE: MeanSquaredError,
}


def make_observer(kind: ObserverKind, name: str, groups: int, device: str = "cpu") -> Observer:
    return _KINDS[kind](name, groups, device)


def pair_norms(keys: Tensor, rotary_dim: int) -> Tensor:
    """Return keys [..., head_dim], rotated, with both channels of each rotary pair (i, i +
    rotary_dim / 2) as the norm of the pair; float32.

    Rotary embedding turns a pair by the position: at positions that calibration did not see, either
    channel may be as large as the norm, and never larger.
    """
    half = rotary_dim // 2
    keys = keys.float()
    norms = torch.hypot(keys[..., :half], keys[..., half:rotary_dim])
    return torch.cat((norms, norms, keys[..., rotary_dim:]), -1)


def by_group(values: Tensor, granularity: Granularity) -> Tensor:
    """Reorder keys or values [num_tokens, num_kv_heads, head_dim] -> [groups, count]."""
    if granularity is Granularity.TENSOR:
        return values.reshape(1, -1)
    if granularity is Granularity.HEAD:
        return values.transpose(0, 1).flatten(1)
    return values.flatten(1).T
