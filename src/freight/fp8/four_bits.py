"""Rounding of matrices to 4 bits: integers with a scale for each group of inputs, MXFP4 and NVFP4.

Values are rounded to nearest. The scale of a group is the one of a few that costs the least squared
error: one below the largest value's own clips that value and rounds all others more finely.
`IntGroups` and `FloatGroups` are results of rounding by any method; files are written from them
(`quantizer.packing`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from freight.fp8 import mxfp4
from freight.fp8.cast import encode
from freight.fp8.formats import Format

# Multiples of the scale that a group's largest magnitude is divided by. 7 is the largest code of
# both signs, and up to 8 the negative side has one more; of normal values 4 bits have the least
# error with about 8 to 9.
_DIVISORS = (7.0, 7.5, 8.0, 8.5, 9.0, 10.0)
_RANGE = 15.0  # steps between the least and the largest code
# The same of the span from the least to the largest value, where groups have zero points
_RANGE_DIVISORS = (15.0, 16.0, 17.0, 18.0, 20.0)
_ROWS = 1024  # rounded at once: the search takes several times their memory
# Of groups whose values the dtype of scales is too coarse for: the least float16 above 0, and the
# least bfloat16 that kernels take
_LEAST = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126}
# Least and largest magnitude of a scale of INT4, beside 0: with others, values may be subnormal in
# bfloat16, which matrix tiles treat as zeros, or infinite
_SCALES = (2.0**-126, 2.0**100)
# Halfway between the value of code i of E2M1 and the next one
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
ZERO_POINT = 8  # of groups that are symmetric
NVFP4_GROUP = 16  # inputs that share a scale in E4M3
# What the largest magnitude of a group of NVFP4 is divided by: the largest value of E2M1 is 6. With
# 4 all values from 2 on lie on the finer half of its steps, and with 7 or more the largest clips.
_NVFP4_DIVISORS = (6.0, 4.0, 5.0, 7.0, 8.0)
_WIDE_FROM = 7.0  # of E2M1's 6; nearer to 8, which is 4 with a scale twice as large
_LEAST_E4M3 = 2.0**-9  # above 0
_MOST_DIVISOR = 2.0**100  # of a matrix of tiny values: its reciprocal is a normal number


@dataclass(frozen=True)
class IntGroups:
    """A matrix [rows, inputs] rounded to integers: (code - zero point) * scale of its group.

    codes      uint8 [rows, inputs], 0 to 15, in the order of the inputs
    scales     float16 or bfloat16 [rows, groups]
    zeros      zero points, uint8 [rows, groups], 0 to 15; None: 8 everywhere
    group_of   the group of each input, int32 [inputs]; None: groups are of consecutive inputs. Each
               group has as many inputs.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    group_of: Tensor | None = None

    @property
    def size(self) -> int:
        """Inputs of a group."""
        return self.codes.shape[1] // self.scales.shape[1]

    def values(self) -> Tensor:
        """Return what the codes stand for, float32 [rows, inputs]."""
        if self.group_of is None:
            inputs = self.codes.shape[1]
            device = self.codes.device
            group_of = torch.arange(inputs, dtype=torch.int64, device=device) // self.size
        else:
            group_of = self.group_of.long()
        zero: Tensor | float = float(ZERO_POINT)
        if self.zeros is not None:
            zero = self.zeros.float()[:, group_of]
        return (self.codes.float() - zero) * self.scales.float()[:, group_of]


def scales_out_of_range(scales: Tensor) -> Tensor:
    """Return the scales that kernels do not take, in float32: NaN, and those beyond `_SCALES`."""
    values = scales.float()
    magnitude = values.abs()
    (least, most) = _SCALES
    return values[~((magnitude == 0) | ((magnitude >= least) & (magnitude <= most)))]


def int4_scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which INT4 made from a matrix or a model in `dtype` has its scales."""
    if dtype is torch.float16:
        return torch.float16
    return torch.bfloat16


@dataclass(frozen=True)
class FloatGroups:
    """A matrix [rows, inputs] rounded to E2M1 with a scale in E4M3 for each 16 inputs (NVFP4): code *
    scale / divisor.

    codes     uint8 [rows, inputs], 0 to 15 as `fp8.mxfp4.SIGNED` lists them
    scales    E4M3 [rows, groups], above 0
    divisor   of the whole matrix, float32 [1]
    """

    codes: Tensor
    scales: Tensor
    divisor: Tensor

    def values(self) -> Tensor:
        """Return what the codes stand for, float32 [rows, inputs]."""
        table = torch.tensor(mxfp4.SIGNED, dtype=torch.float32, device=self.codes.device)
        scales = (self.scales.float() / self.divisor).repeat_interleave(NVFP4_GROUP, 1)
        return table[self.codes.long()] * scales


def round_int4(weight: Tensor, size: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round to integers from -8 to 7: (codes plus 8, uint8 [rows, inputs / 2], the earlier input in
    the low half of a byte; scales in `scale_dtype`, [rows, inputs / size]).

    weight: [rows, inputs], finite; size: inputs of a group, which divides them.
    """
    rounded = round_int_groups(weight, size, scale_dtype)
    return in_pairs(rounded.codes), rounded.scales


def round_int_groups(
    weight: Tensor,
    size: int,
    scale_dtype: torch.dtype,
    *,
    asymmetric: bool = False,
    searches: bool = True,
) -> IntGroups:
    """Round each value to the nearest integer of its group. Arguments as of `round_int4` and
    `fit_int_groups`. Zero points are None unless `asymmetric`.
    """
    codes = []
    scales = []
    zeros = []
    for part in weight.split(_ROWS):
        groups = part.float().unflatten(1, (-1, size))
        scale, zero = fit_int_groups(groups, scale_dtype, asymmetric=asymmetric, searches=searches)
        codes.append(int_codes(groups, scale, zero).to(torch.uint8).flatten(1))
        scales.append(scale[..., 0].to(scale_dtype))
        zeros.append(zero[..., 0].to(torch.uint8))
    return IntGroups(torch.cat(codes), torch.cat(scales), torch.cat(zeros) if asymmetric else None)


def fit_int_groups(
    groups: Tensor, scale_dtype: torch.dtype, *, asymmetric: bool, searches: bool
) -> tuple[Tensor, Tensor]:
    """Return the scale and the zero point of each group, both float32 [.., 1]; scales have values of
    `scale_dtype`.

    groups: float32 [.., inputs of a group], finite. `searches`: those of least squared error among
    a few, the symmetric ones included; otherwise those of the least and the largest value, or of
    the largest magnitude, as compressed-tensors computes them (`calculate_qparams`: magnitude / 7.5;
    span / 15, with the zero point nearest to -least / scale).
    """
    best_error = best_scale = best_zero = groups.new_empty(0)
    for scale, zero in _int_candidates(groups, scale_dtype, asymmetric, searches):
        rounded = (int_codes(groups, scale, zero) - zero).mul_(scale)
        error = rounded.sub_(groups).square_().sum(-1, keepdim=True)
        if not len(best_error):
            best_error = error
            best_scale = scale
            best_zero = zero
            continue
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
    return best_scale, best_zero


def _int_candidates(
    groups: Tensor, scale_dtype: torch.dtype, asymmetric: bool, searches: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scales with their zero points."""
    least = _LEAST[scale_dtype]
    if searches or not asymmetric:
        largest = groups.abs().amax(-1, keepdim=True)
        middle = torch.full_like(largest, ZERO_POINT)
        for divisor in _DIVISORS if searches else (_RANGE / 2,):
            yield (largest / divisor).to(scale_dtype).float().clamp(min=least), middle
    if asymmetric:
        # 0 is among the values of every group
        low = groups.amin(-1, keepdim=True).clamp(max=0)
        high = groups.amax(-1, keepdim=True).clamp(min=0)
        for divisor in _RANGE_DIVISORS if searches else (_RANGE,):
            scale = ((high - low) / divisor).to(scale_dtype).float().clamp(min=least)
            clipped = low * (_RANGE / divisor)
            yield scale, (-clipped / scale).clamp(0, _RANGE).round()


def int_codes(values: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return the nearest codes, float32 0 to 15 of the shape of `values`: ties go to the even integer
    of -8 to 7, as in compressed-tensors. The other two are as from `fit_int_groups`, broadcast.
    """
    middle = float(ZERO_POINT)
    return (values / scale).add_(zero - middle).round_().clamp_(-middle, middle - 1).add_(middle)


def round_mxfp4(weight: Tensor, *, searches: bool = True) -> tuple[Tensor, Tensor]:
    """Round to MXFP4: (codes, uint8 [rows, inputs / 2]; scales, uint8 [rows, inputs / 32]: 2 **
    (byte - 127)), as `fp8.mxfp4` has them.

    weight: [rows, inputs], finite, with inputs a multiple of 32. A scale is the power of two with
    which the largest value of the group lies below 8 (OCP MX 1.0, section 6.3), or twice that:
    whichever has less squared error, or without `searches` twice where the largest is 7 or more, as
    compressed-tensors has it.
    """
    parts = [_round_mxfp4(part, searches) for part in weight.split(_ROWS)]
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales)


def _round_mxfp4(weight: Tensor, searches: bool) -> tuple[Tensor, Tensor]:
    groups = weight.float().unflatten(1, (-1, mxfp4.GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    _, exponent = torch.frexp(largest)  # largest lies below 2 ** exponent
    lower = (exponent - 3).clamp(-124, 124)  # of what kernels take unchanged (`mxfp4.normal`)
    table = torch.tensor(mxfp4.VALUES, dtype=torch.float32, device=weight.device)
    candidates = []
    for power in (lower, lower + 1):
        scale = torch.exp2(power.double()).float()
        magnitude = e2m1(groups.abs() / scale)
        error = (table[magnitude.long()] * scale - groups.abs()).square_().sum(-1, keepdim=True)
        candidates.append((error, magnitude, power))
    (error, codes, powers), (wide_error, wide_codes, wide_powers) = candidates
    better = wide_error < error
    if not searches:
        better = largest / torch.exp2(lower.double()).float() >= _WIDE_FROM
    codes = _signed(groups, torch.where(better, wide_codes, codes))
    scales = torch.where(better, wide_powers, powers)[..., 0] + mxfp4.BIAS
    return in_pairs(codes.flatten(1)), scales.to(torch.uint8)


def round_nvfp4(
    weight: Tensor, divisor: Tensor | None = None, *, searches: bool = True
) -> FloatGroups:
    """Round each value to the nearest of E2M1 under its group's scale.

    weight: [rows, inputs], finite, with inputs a multiple of 16; `divisor`: float32 [1], that of
    `nvfp4_divisor` unless given; `searches` as in `fit_nvfp4`.
    """
    if divisor is None:
        divisor = nvfp4_divisor(weight.float().abs().amax())
    codes = []
    scales = []
    for part in weight.split(_ROWS):
        groups = part.float().unflatten(1, (-1, NVFP4_GROUP))
        scale = fit_nvfp4(groups, divisor, searches=searches)
        codes.append(e2m1_codes(groups / (scale.float() / divisor)).flatten(1))
        scales.append(scale[..., 0])
    return FloatGroups(torch.cat(codes), torch.cat(scales), divisor)


def nvfp4_divisor(largest: Tensor) -> Tensor:
    """Return the divisor of a matrix whose largest magnitude is `largest`, float32 []: float32 [1].
    With it the largest scale of a group is the largest of E4M3 (compressed-tensors'
    `generate_gparam`).
    """
    most = Format.E4M3FN.max * mxfp4.VALUES[-1]
    divisor = (most / largest.double()).clamp(max=_MOST_DIVISOR)
    return torch.where(largest > 0, divisor, 1.0).float().reshape(1)


def fit_nvfp4(groups: Tensor, divisor: Tensor, *, searches: bool) -> Tensor:
    """Return the scale of each group, E4M3 [.., 1], above 0.

    groups: float32 [.., 16], finite. `searches`: that of least squared error among a few; otherwise
    the one that makes the largest magnitude 6, as compressed-tensors has it.
    """
    largest = groups.abs().amax(-1, keepdim=True)
    table = torch.tensor(mxfp4.SIGNED, dtype=torch.float32, device=groups.device)
    best_error = best_scale = groups.new_empty(0)
    for share in _NVFP4_DIVISORS if searches else _NVFP4_DIVISORS[:1]:
        wanted = (largest / share * divisor).clamp(min=_LEAST_E4M3)
        scale = encode(wanted, 1.0, Format.E4M3FN)
        factor = scale.float() / divisor
        rounded = table[e2m1_codes(groups / factor).long()] * factor
        error = rounded.sub_(groups).square_().sum(-1, keepdim=True)
        if not len(best_error):
            best_error = error
            best_scale = scale
            continue
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale.view(torch.uint8), best_scale.view(torch.uint8))
        best_scale = best_scale.view(scale.dtype)
    return best_scale


def e2m1_codes(values: Tensor) -> Tensor:
    """Return the nearest codes of E2M1, uint8 0 to 15 of the shape of `values`, float32; ties go to
    the even code, and a zero is positive.
    """
    return _signed(values, e2m1(values.abs()))


def _signed(values: Tensor, codes: Tensor) -> Tensor:
    """Return codes of magnitudes with the signs of `values`; a zero stays positive."""
    is_negative = (values < 0) & (codes > 0)
    return codes | is_negative.to(torch.uint8) << 3


def e2m1(magnitude: Tensor) -> Tensor:
    """Return the codes 0 to 7 of the nearest values, uint8; ties go to the even code."""
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for code, middle in enumerate(_MIDPOINTS):
        if code % 2:
            codes += magnitude >= middle
        else:
            codes += magnitude > middle
    return codes


def in_pairs(codes: Tensor) -> Tensor:
    """Pack codes, uint8 [.., count], two to a byte, the earlier one in its low half."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def from_pairs(packed: Tensor) -> Tensor:
    """Return the codes, uint8 [.., 2 * count], of bytes [.., count] as `in_pairs` packs them."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
