"""Blocks of GGUF files: matrices as llama.cpp stores them, and the numbers that they stand for.

A row of a matrix is blocks of 32 or 256 inputs, and each has its scales beside its codes. So any rows
of a matrix are bytes of it, and a matrix is cut, merged and reordered by output rows as bytes.

In each format an input's value is code * scale + minimum, with integer codes, and a scale and a
minimum for each group of 16 or 32 inputs. That is how kernels multiply them (`integers`). The
product is rounded to float32, and so is the sum: the value that llama.cpp and its package `gguf`
give, to the bit. Layouts: ggml-common.h of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from freight.errors import CheckpointError
from freight.fp8.block_formats import BlockFormat as BlockFormat

# The codes of IQ4_NL and IQ4_XS, and twice the values of MXFP4 (OCP MX 1.0, section 5.3.3)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class Integers(NamedTuple):
    """A matrix in blocks as integers and the numbers of their groups.

    codes     float32 [.., groups, group], integers
    scales    float32 [.., groups]
    minima    float32 [.., groups], the value of code 0; None: 0
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None


def integers(data: Tensor, format: BlockFormat) -> Integers:
    """Return what rows of blocks hold. data: uint8 [.., bytes of a row]."""
    blocks = data.unflatten(-1, (-1, format.bytes))
    parts = _READERS[format](blocks)
    codes = parts.codes.flatten(-3, -2) if parts.codes.ndim == blocks.ndim + 1 else parts.codes
    scales = parts.scales.flatten(-2) if parts.scales.ndim == blocks.ndim else parts.scales
    minima = parts.minima
    if minima is not None and minima.ndim == blocks.ndim:
        minima = minima.flatten(-2)
    return Integers(codes, scales, minima)


def decode(data: Tensor, format: BlockFormat) -> Tensor:
    """Return the values of rows of blocks, float32 [.., inputs]. data: uint8 [.., bytes of a row]."""
    codes, scales, minima = integers(data, format)
    values = codes * scales[..., None]
    if minima is not None:
        values += minima[..., None]
    return values.flatten(-2)


def require_finite(data: Tensor, format: BlockFormat, name: str) -> None:
    """Raise CheckpointError, naming the tensor `name`, if a scale or a minimum is not finite.

    data: uint8 [.., bytes of a row]
    """
    blocks = data.unflatten(-1, (-1, format.bytes))
    for at in format.floats:
        exponents = blocks[..., at + 1] & 0x7C
        if (exponents == 0x7C).any():
            raise CheckpointError(
                f"{name}: a block of {format} has a scale that is not finite; fetch the file again, or quantize the "
                "model again"
            )


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at byte `at` of each block as float32 [.., blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()[..., 0]


def _nibbles(codes: Tensor) -> Tensor:
    """Return bytes [.., n] as codes [.., 2 n]: all low halves, then all high halves."""
    return torch.cat((codes & 15, codes >> 4), -1)


def _bit_plane(blocks: Tensor, at: int) -> Tensor:
    """Return the 32 bits of the little-endian int32 at byte `at`, [.., blocks, 32], as 16 or 0."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    bits = (blocks[..., at : at + 4, None] >> shifts) & 1
    return bits.flatten(-2) * 16


def _q4_0(blocks: Tensor) -> Integers:
    return Integers(_nibbles(blocks[..., 2:]).float() - 8, _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Integers:
    return Integers(_nibbles(blocks[..., 4:]).float(), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Integers:
    codes = _nibbles(blocks[..., 6:]) + _bit_plane(blocks, 2)
    return Integers(codes.float() - 16, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Integers:
    codes = _nibbles(blocks[..., 8:]) + _bit_plane(blocks, 4)
    return Integers(codes.float(), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Integers:
    return Integers(blocks[..., 2:].contiguous().view(torch.int8).float(), _half(blocks, 0))


def _iq4_nl(blocks: Tensor) -> Integers:
    return Integers(_of_table(blocks[..., 2:], _IQ4), _half(blocks, 0))


def _mxfp4(blocks: Tensor) -> Integers:
    scales = torch.exp2(blocks[..., 0].double() - 128).float()  # half the scale: codes are twice
    return Integers(_of_table(blocks[..., 1:], _E2M1), scales)


def _of_table(codes: Tensor, values: tuple[int, ...]) -> Tensor:
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table[_nibbles(codes).long()]


def _q2_k(blocks: Tensor) -> Integers:
    """Bytes: 16 of scales (low halves) and minima (high halves), 64 of codes, d, dmin."""
    parts = blocks[..., :16]
    codes = _pairs_of_bits(blocks[..., 16:80]).unflatten(-1, (16, 16))
    d = _half(blocks, 80)[..., None]
    least = _half(blocks, 82)[..., None]
    return Integers(codes.float(), d * (parts & 15).float(), -(least * (parts >> 4).float()))


def _q3_k(blocks: Tensor) -> Integers:
    """Bytes: 32 of high bits, 64 of low bits, 12 of 16 scales in 6 bits, d."""
    low = _pairs_of_bits(blocks[..., 32:96])
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = (blocks[..., None, :32] >> shifts[:, None]) & 1
    codes = low.float() + 4 * high.flatten(-2).float() - 4
    packed = blocks[..., 96:108]
    low_bits = _nibbles(packed[..., :8])
    pairs = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high_bits = (packed[..., None, 8:] >> pairs[:, None]) & 3
    scales = (low_bits + 16 * high_bits.flatten(-2)).float() - 32
    return Integers(codes.unflatten(-1, (16, 16)), _half(blocks, 108)[..., None] * scales)


def _pairs_of_bits(codes: Tensor) -> Tensor:
    """Return codes of 2 bits, of 128 inputs in 32 bytes at a time: those of 32 inputs are in the
    same bits of 32 bytes.
    """
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device)
    parts: Tensor = (codes.unflatten(-1, (-1, 1, 32)) >> shifts[:, None]) & 3
    return parts.flatten(-3)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return 8 scales and 8 minima of 6 bits, float32 [.., 8], from 12 bytes."""
    first = packed[..., :4]
    second = packed[..., 4:8]
    last = packed[..., 8:]
    scales = torch.cat((first & 63, (last & 15) | (first >> 6 << 4)), -1)
    minima = torch.cat((second & 63, (last >> 4) | (second >> 6 << 4)), -1)
    return scales.float(), minima.float()


def _of_super(blocks: Tensor, codes: Tensor) -> Integers:
    """Return codes [.., 256] with what Q4_K and Q5_K begin with: d, dmin, 12 bytes of scales."""
    scales, minima = _six_bits(blocks[..., 4:16])
    d = _half(blocks, 0)[..., None]
    least = _half(blocks, 2)[..., None]
    return Integers(codes.float().unflatten(-1, (8, 32)), d * scales, -(least * minima))


def _q4_k(blocks: Tensor) -> Integers:
    return _of_super(blocks, _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2))


def _q5_k(blocks: Tensor) -> Integers:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = (blocks[..., None, 16:48] >> shifts[:, None]) & 1
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    return _of_super(blocks, low + 16 * high.flatten(-2))


def _q6_k(blocks: Tensor) -> Integers:
    """Bytes: 128 of low halves, 64 of 2 high bits, 16 of scales (int8), d."""
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))
    high = _pairs_of_bits(blocks[..., 128:192]).unflatten(-1, (2, 128))
    codes = (low + 16 * high).flatten(-2).float() - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return Integers(codes.unflatten(-1, (16, 16)), _half(blocks, 208)[..., None] * scales)


def _iq4_xs(blocks: Tensor) -> Integers:
    """Bytes: d, 2 of the high 2 bits of 8 scales, 4 of their low 4 bits, 128 of codes."""
    pairs = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = ((blocks[..., 2:4, None] >> pairs) & 3).flatten(-2)
    low_bytes = blocks[..., 4:8, None]
    low = torch.cat((low_bytes & 15, low_bytes >> 4), -1).flatten(-2)
    scales = (low + 16 * high).float() - 32
    codes = _of_table(blocks[..., 8:].unflatten(-1, (8, 16)), _IQ4)
    return Integers(codes, _half(blocks, 0)[..., None] * scales)


_READERS: Mapping[BlockFormat, Callable[[Tensor], Integers]] = {
    BlockFormat.Q4_0: _q4_0,
    BlockFormat.Q4_1: _q4_1,
    BlockFormat.Q5_0: _q5_0,
    BlockFormat.Q5_1: _q5_1,
    BlockFormat.Q8_0: _q8_0,
    BlockFormat.Q2_K: _q2_k,
    BlockFormat.Q3_K: _q3_k,
    BlockFormat.Q4_K: _q4_k,
    BlockFormat.Q5_K: _q5_k,
    BlockFormat.Q6_K: _q6_k,
    BlockFormat.IQ4_NL: _iq4_nl,
    BlockFormat.IQ4_XS: _iq4_xs,
    BlockFormat.MXFP4: _mxfp4,
}
