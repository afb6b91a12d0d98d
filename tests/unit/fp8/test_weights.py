"""Weights rounded to FP8, with a scale per output row or per 128 x 128 block."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from freight.fp8.cast import SMALLEST_SCALE, decode, encode
from freight.fp8.formats import Format
from freight.fp8.weights import (
    expand_blocks,
    fit_rows,
    quantize_blocks,
    quantize_rows,
    quantize_tensor,
)

KINDS = {Format.E4M3FN: ml_dtypes.float8_e4m3fn, Format.E4M3FNUZ: ml_dtypes.float8_e4m3fnuz}
SHAPES = [(1, 1), (128, 128), (300, 257), (5, 1000)]
PIECES = (2100, 1000)  # so large that its rows are rounded in several pieces


def codes(stored: torch.Tensor) -> list[int]:
    return stored.view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("format", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, PIECES])
def test_rows_are_rounded_with_their_own_scale(format, dtype, shape):
    torch.manual_seed(0)
    weight = (torch.randn(shape) * torch.logspace(-3, 2, shape[0])[:, None]).to(dtype)
    stored, scale = quantize_rows(weight, format)
    values = weight.float().numpy()
    expected = np.abs(values).max(1) / np.float32(format.max)
    assert np.array_equal(scale.numpy(), expected)
    rounded = np.clip(values / expected[:, None], -format.max, format.max).astype(KINDS[format])
    assert codes(stored) == rounded.view(np.uint8).flatten().tolist()


@pytest.mark.parametrize("format", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_rounded_with_their_own_scale(format, shape):
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.logspace(-3, 2, shape[0])[:, None]
    stored, scale = quantize_blocks(weight, format)
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            values = weight[part].numpy()
            expected = np.abs(values).max() / np.float32(format.max)
            assert scale[i, j].item() == expected
            rounded = np.clip(values / expected, -format.max, format.max).astype(KINDS[format])
            assert codes(stored[part].contiguous()) == rounded.view(np.uint8).flatten().tolist()


@pytest.mark.parametrize("quantize", [quantize_rows, quantize_tensor, quantize_blocks])
def test_a_weight_is_divided_by_the_scale_as_it_is_stored(quantize):
    torch.manual_seed(0)
    weight = torch.randn(130, 257)
    stored, scale = quantize(weight, Format.E4M3FN, Format.BFLOAT16)
    assert torch.equal(scale, scale.bfloat16().float())
    divisor = expand_blocks(scale, weight.shape) if scale.ndim == 2 else scale[..., None]
    assert codes(stored) == codes(encode(weight, divisor, Format.E4M3FN))


def test_a_row_of_zeros_stays_zero():
    stored, scale = quantize_rows(torch.zeros(2, 3), Format.E4M3FN)
    assert codes(stored) == [0] * 6
    assert scale.tolist() == [SMALLEST_SCALE] * 2


def test_expanded_blocks_cover_their_block():
    scale = torch.arange(6.0).view(2, 3)
    wide = expand_blocks(scale, (130, 300))
    assert wide.shape == (130, 300)
    assert [
        wide[r, c].item() for r, c in [(0, 0), (127, 127), (127, 128), (128, 255), (129, 299)]
    ] == [0, 0, 1, 4, 5]


@pytest.mark.parametrize("format", KINDS)
@pytest.mark.parametrize("shape", [*SHAPES, PIECES])
def test_fitted_rows_err_less_and_never_saturate(format, shape):
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.logspace(-3, 2, shape[0])[:, None]
    (plain, smallest), (stored, scale) = quantize_rows(weight, format), fit_rows(weight, format)
    ratio = scale / smallest
    assert ((ratio >= 1) & (ratio < 2)).all()

    def error(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (decode(codes, scale[:, None]) - weight).square().sum(1)

    assert (error(stored, scale) <= error(plain, smallest) * (1 + 1e-6)).all()
    if shape[0] > 100:
        assert error(stored, scale).log().mean() < error(plain, smallest).log().mean() - 0.02


def test_a_fitted_row_does_not_depend_on_its_neighbours():
    weight = torch.randn(6, 3000)
    weight[2, 5], weight[4, 7] = torch.nan, torch.inf
    stored, scale = fit_rows(weight, Format.E4M3FN)
    for row in range(6):
        alone, own = fit_rows(weight[row : row + 1], Format.E4M3FN)
        assert codes(alone) == codes(stored[row])
        assert own.item() == scale[row].item()
