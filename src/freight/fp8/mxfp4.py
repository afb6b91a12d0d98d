"""MXFP4: numbers of 4 bits, E2M1, with a power of two for every 32 inputs of a row (OCP MX 1.0,
section 5.2 and 5.3).

A byte holds two codes, the earlier input in its low half. A scale is a byte, E8M0: 2 ** (byte -
127); 255 is NaN.

Some sets of kernels compute with these numbers unchanged, in torch's dtypes (`CODES`, `SCALES`), if
they are `normal`.

Both conversions here are exact. Every E2M1 value times 2 ** k is an E4M3 value for k from -8 to 6,
so a row whose exponents lie within 14 of each other is E4M3 with one power of two; any finite row
is bfloat16.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from freight.fp8.cast import E8M0, convert_e4m3, encode, torch_dtype
from freight.fp8.formats import Format

CODES = torch.float4_e2m1fn_x2  # of a Weight: [rows, inputs / 2], [rows, inputs / 32]
SCALES = E8M0
GROUP = 32  # inputs that share a scale
BIAS = 127  # bias of a scale's exponent
NAN = 255  # byte of the scale that is NaN
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7; 8 to 15 are negative
SIGNED = (*VALUES, *(-value for value in VALUES))  # of the codes 0 to 15
# scales with which every nonzero value, and also 0.25, is a normal bfloat16
_NORMAL = range(3, 253)
_LEAST = -8  # range of k for which all values times 2 ** k are E4M3
_MOST = 6
SPAN = _MOST - _LEAST
_MAGNITUDES = 0x7777777777777777  # mask of the magnitudes of sixteen codes


def exact_rows(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return which rows are exactly E4M3 with a scale, bool [..]. Groups of zeros have no exponent.

    blocks: uint8 [.., groups, 16]; scales: uint8 [.., groups].
    """
    shape = scales.shape[:-1]
    blocks = blocks.flatten(0, -3)
    scales = scales.flatten(0, -2)
    exact = scales.amax(-1).int() - scales.amin(-1) <= SPAN
    undecided = (~exact).nonzero()[:, 0]  # some of these only because of groups of zeros
    if len(undecided):
        most, least = _exponents(blocks[undecided], scales[undecided])
        exact[undecided] = most - least <= SPAN
    return exact.view(shape)


def finite(blocks: Tensor, scales: Tensor) -> bool:
    """Return whether no value is NaN, or 2 ** 128 or more. Arguments as in `exact_rows`."""
    large = scales >= 2 * BIAS - 1
    if not large.any():
        return True
    scales = scales[large].int()[:, None]
    magnitude = blocks[large] & 0x77
    value = torch.maximum(magnitude & 7, magnitude >> 4)
    # exponent of the largest power of two in the value
    power = torch.where(value >= 6, 2, torch.where(value >= 4, 1, 0))
    return not ((scales == NAN) | (scales - BIAS + power > BIAS)).any()


def normal(blocks: Tensor, scales: Tensor) -> bool:
    """Return whether kernels can compute with these numbers unchanged: only groups of zeros have a
    scale outside of 3 to 252, so a value's exponent is that of its code plus that of its scale.
    Arguments as in `exact_rows`.
    """
    beyond = (scales < _NORMAL.start) | (scales >= _NORMAL.stop)
    return not bool((blocks[beyond] & 0x77).any())


def to_e4m3(blocks: Tensor, scales: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Convert `exact_rows` to (E4M3 [rows, inputs] in the variant `format`, float32 [rows]: a power
    of two each).

    blocks: uint8 [rows, groups, 16]; scales: uint8 [rows, groups].
    """
    most, _ = _exponents(blocks, scales)
    base = (most - _MOST).clamp(min=1)  # 0 would be a subnormal scale
    k = (scales.int() - base[:, None]).clamp(_LEAST, _MOST)  # only groups of zeros are clamped
    codes = _looked_up(_e4m3_pairs(blocks.device), blocks, k - _LEAST)
    data = codes.view(torch_dtype(Format.E4M3FN))
    return convert_e4m3(data, torch.exp2((base - BIAS).double()).float(), format)


def to_bfloat16(blocks: Tensor, scales: Tensor) -> Tensor:
    """Convert finite rows to bfloat16 [rows, inputs]. Arguments as in `to_e4m3`."""
    return _looked_up(_bfloat16_pairs(blocks.device), blocks, scales.int()).view(torch.bfloat16)


def _looked_up(pairs: Tensor, blocks: Tensor, exponents: Tensor) -> Tensor:
    """Look up each byte with its group's exponent, int32 [rows, groups], in `pairs`: [rows, inputs
    / 2].
    """
    index = blocks.int().bitwise_or_(exponents[..., None] << 8)
    # several times as fast as pairs[index]
    return pairs.index_select(0, index.flatten()).view(blocks.shape).flatten(1)


def _exponents(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest and the smallest scale of the groups that are not all zeros, int32 [rows]
    each; 0 and 255 for a row without any.
    """
    zeros = ((blocks.contiguous().view(torch.int64) & _MAGNITUDES) == 0).all(-1)
    most = scales.masked_fill(zeros, 0).amax(-1)
    least = scales.masked_fill(zeros, NAN).amin(-1)
    return most.int(), least.int()


def _pairs(exponents: range) -> Tensor:
    """Build the two values of each byte times 2 ** exponent: float64 [exponents, 256, 2]."""
    codes = torch.tensor(SIGNED, dtype=torch.float64, device="cpu")
    byte = torch.arange(256, dtype=torch.int64, device="cpu")
    values = torch.stack((codes[byte & 15], codes[byte >> 4]), 1)
    scale = torch.exp2(torch.tensor(list(exponents), dtype=torch.float64, device="cpu"))
    return values * scale[:, None, None]


@cache
def _e4m3_pairs(device: torch.device) -> Tensor:
    """Build the table of E4M3 pairs, int16, indexed by byte | (k - _LEAST) << 8."""
    values = _pairs(range(_LEAST, _MOST + 1)).float()
    return (
        encode(values, torch.ones_like(values), Format.E4M3FN)
        .view(torch.int16)
        .flatten()
        .to(device)
    )


@cache
def _bfloat16_pairs(device: torch.device) -> Tensor:
    """Build the table of bfloat16 pairs, int32, indexed by byte | scale << 8."""
    return (
        _pairs(range(-BIAS, NAN + 1 - BIAS))
        .to(torch.bfloat16)
        .view(torch.int32)
        .flatten()
        .to(device)
    )
