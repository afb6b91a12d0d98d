"""Rounding of matrices to 4 bits: integers with a scale for each group of inputs, and MXFP4.

Values are rounded to nearest. The scale of a group is the one of a few that costs the least squared
error: one below the largest value's own clips that value and rounds all others more finely.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freight.fp8 import mxfp4

# Multiples of the scale that a group's largest magnitude is divided by. 7 is the largest code of
# both signs, and up to 8 the negative side has one more; of normal values 4 bits have the least
# error with about 8 to 9.
_DIVISORS = (7.0, 7.5, 8.0, 8.5, 9.0, 10.0)
_ROWS = 1024  # rounded at once: the search takes several times their memory
# Of groups whose values the dtype of scales is too coarse for: the least float16 above 0, and the
# least bfloat16 that kernels take
_LEAST = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126}
# Least and largest magnitude of a scale of INT4, beside 0: with others, values may be subnormal in
# bfloat16, which matrix tiles treat as zeros, or infinite
_SCALES = (2.0**-126, 2.0**100)
# Halfway between the value of code i of E2M1 and the next one
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


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


def round_int4(weight: Tensor, size: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round to integers from -8 to 7: (codes plus 8, uint8 [rows, inputs / 2], the earlier input in
    the low half of a byte; scales in `scale_dtype`, [rows, inputs / size]).

    weight: [rows, inputs], finite; size: inputs of a group, which divides them.
    """
    parts = [_round_int4(part, size, scale_dtype) for part in weight.split(_ROWS)]
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales)


def _round_int4(weight: Tensor, size: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    groups = weight.float().unflatten(1, (-1, size))
    largest = groups.abs().amax(-1, keepdim=True)
    least = _LEAST[scale_dtype]
    best = codes = scales = torch.empty(0, dtype=torch.float32, device=weight.device)
    for divisor in _DIVISORS:
        scale = (largest / divisor).to(scale_dtype).float().clamp(min=least)
        rounded = (groups / scale).round_().clamp_(-8, 7)
        error = (rounded * scale - groups).square_().sum(-1, keepdim=True)
        if not len(best):
            best = error
            codes = rounded
            scales = scale
            continue
        better = error < best
        best = torch.where(better, error, best)
        codes = torch.where(better, rounded, codes)
        scales = torch.where(better, scale, scales)
    return _in_pairs((codes + 8).to(torch.uint8).flatten(1)), scales[..., 0].to(scale_dtype)


def round_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to MXFP4: (codes, uint8 [rows, inputs / 2]; scales, uint8 [rows, inputs / 32]: 2 **
    (byte - 127)), as `fp8.mxfp4` has them.

    weight: [rows, inputs], finite, with inputs a multiple of 32. A scale is the power of two with
    which the largest value of the group lies below 8 (OCP MX 1.0, section 6.3), or twice that.
    """
    parts = [_round_mxfp4(part) for part in weight.split(_ROWS)]
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales)


def _round_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    groups = weight.float().unflatten(1, (-1, mxfp4.GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    _, exponent = torch.frexp(largest)  # largest lies below 2 ** exponent
    lower = (exponent - 3).clamp(-124, 124)  # of what kernels take unchanged (`mxfp4.normal`)
    table = torch.tensor(mxfp4.VALUES, dtype=torch.float32, device=weight.device)
    candidates = []
    for power in (lower, lower + 1):
        scale = torch.exp2(power.double()).float()
        magnitude = _e2m1(groups.abs() / scale)
        error = (table[magnitude.long()] * scale - groups.abs()).square_().sum(-1, keepdim=True)
        candidates.append((error, magnitude, power))
    (error, codes, powers), (wide_error, wide_codes, wide_powers) = candidates
    better = wide_error < error
    codes = torch.where(better, wide_codes, codes)
    is_negative = (groups < 0) & (codes > 0)
    codes = codes | is_negative.to(torch.uint8) << 3
    scales = torch.where(better, wide_powers, powers)[..., 0] + mxfp4.BIAS
    return _in_pairs(codes.flatten(1)), scales.to(torch.uint8)


def _e2m1(magnitude: Tensor) -> Tensor:
    """Return the codes 0 to 7 of the nearest values, uint8; ties go to the even code."""
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for code, middle in enumerate(_MIDPOINTS):
        if code % 2:
            codes += magnitude >= middle
        else:
            codes += magnitude > middle
    return codes


def _in_pairs(codes: Tensor) -> Tensor:
    return codes[:, ::2] | codes[:, 1::2] << 4
