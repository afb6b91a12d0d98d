"""Weights to FP8 or INT8: one scale per tensor, output row, or 128 x 128 block, from the largest
finite magnitude.

`scale_format` is the format in which the scale will be stored. The scale is rounded to it before
the weight is divided by it, so codes and stored scale agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from freight.fp8.cast import amax, decode, encode, scale_from_amax, torch_dtype
from freight.fp8.formats import Format

# rows and columns that share a scale in block-scaled weights (DeepSeek-V3 2024, section 3.3)
BLOCK = 128
_SAMPLED = 512  # least columns of a row on which `fit_rows` measures errors
_PIECE = 2**20  # elements of a weight processed at a time: in float32 they fit the CPU's cache


def quantize_rows(
    weight: Tensor, format: Format, scale_format: Format = Format.FLOAT32
) -> tuple[Tensor, Tensor]:
    """Quantize [rows, columns] to (`format` of that shape, float32 [rows]: one scale per output row).

    INT8 has the codes -127 to 127, and a row with a NaN the scale NaN. Works in pieces: besides the
    result it needs memory for a few million numbers.
    """
    stored = torch.empty_like(weight, dtype=torch_dtype(format))
    scale = weight.new_empty(len(weight), dtype=torch.float32)
    for rows in _pieces(weight):
        scale[rows] = _stored(scale_from_amax(amax(weight[rows], 1), format), scale_format)
        stored[rows] = encode(weight[rows], scale[rows, None], format)
        if format is Format.INT8:
            scale[rows] = scale[rows].masked_fill(weight[rows].isnan().any(1), torch.nan)
    return stored, scale


def fit_rows(weight: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Quantize like `quantize_rows`, but give each row the scale with the smallest squared error of
    four candidates.

    The candidates are amax / max times 2 ** (0, 1/4, 1/2, 3/4): none saturates, and each rounds the
    row to a different grid. A factor of 2 would repeat the grid of the first. Errors are measured
    on 512 to 1023 columns, or on all of fewer.
    """
    stored = torch.empty_like(weight, dtype=torch_dtype(format))
    scale = weight.new_empty(len(weight), dtype=torch.float32)
    stride = max(1, weight.shape[1] // _SAMPLED)
    for rows in _pieces(weight):
        smallest = scale_from_amax(amax(weight[rows], 1), format)[:, None]
        sample = weight[rows, ::stride].float()
        trials = []
        errors = []
        for step in range(4):
            trial = smallest * 2.0 ** (step / 4)
            rounded = decode(encode(sample, trial, format), trial)
            errors.append((rounded - sample).square_().sum(1))
            trials.append(trial)
        best = torch.stack(errors, 1).nan_to_num(torch.inf).argmin(1, keepdim=True)
        scale[rows] = torch.cat(trials, 1).gather(1, best)[:, 0]
        stored[rows] = encode(weight[rows], scale[rows, None], format)
    return stored, scale


def quantize_tensor(
    weight: Tensor, format: Format, scale_format: Format = Format.FLOAT32
) -> tuple[Tensor, Tensor]:
    """Quantize [rows, columns] to (FP8 of that shape, float32 []: one scale), in pieces like
    `quantize_rows`.
    """
    largest = torch.stack([amax(weight[rows], (0, 1)) for rows in _pieces(weight)])
    scale = _stored(scale_from_amax(largest.amax(), format), scale_format)
    stored = torch.empty_like(weight, dtype=torch_dtype(format))
    for rows in _pieces(weight):
        stored[rows] = encode(weight[rows], scale, format)
    return stored, scale


def _pieces(weight: Tensor) -> Iterator[slice]:
    """Cut the rows of a weight into pieces of about _PIECE elements."""
    step = max(1, _PIECE // max(1, weight.shape[1]))
    for begin in range(0, len(weight), step):
        yield slice(begin, begin + step)


def _stored(scale: Tensor, format: Format) -> Tensor:
    """Return `scale` rounded to `format`, as float32."""
    return scale.to(torch_dtype(format)).float()


def quantize_blocks(
    weight: Tensor, format: Format, scale_format: Format = Format.FLOAT32
) -> tuple[Tensor, Tensor]:
    """Quantize [rows, columns] to (FP8 of that shape, float32 [ceil(rows / 128), ceil(columns /
    128)]: one scale per block).
    """
    rows, columns = weight.shape
    stored = torch.empty_like(weight, dtype=torch_dtype(format))
    scales = []
    for begin in range(0, rows, BLOCK):
        band = weight[begin : begin + BLOCK]
        largest = functional.pad(amax(band, 0), (0, -columns % BLOCK)).view(-1, BLOCK).amax(1)
        scales.append(_stored(scale_from_amax(largest, format), scale_format)[None])
        stored[begin : begin + BLOCK] = encode(band, expand_blocks(scales[-1], band.shape), format)
    return stored, torch.cat(scales)


def expand_blocks(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """Expand block scales [ceil(rows / 128), ceil(columns / 128)] to [rows, columns], each over its
    block.
    """
    return scale.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]


def regroup(scale: Tensor, block: tuple[int, int], shape: Sequence[int]) -> Tensor | None:
    """Convert scales of another block size to those of 128 x 128 blocks, or of rows; None if
    neither is exact.

    scale: float32 [ceil(rows / block[0]), ceil(columns / block[1])] of a matrix of `shape`.
    """
    (tall, wide) = block
    (rows, columns) = shape
    if tall % BLOCK == 0 and wide % BLOCK == 0:
        across = scale.repeat_interleave(tall // BLOCK, 0).repeat_interleave(wide // BLOCK, 1)
        return across[: -(-rows // BLOCK), : -(-columns // BLOCK)].contiguous()
    if wide >= columns:
        return scale[:, 0].repeat_interleave(tall)[:rows].contiguous()
    return None
