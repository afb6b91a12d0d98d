"""How scales are made from amax: float32 and power-of-two, over every exponent, with all the edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freight.fp8.formats import Format
from freight.fp8.quantize import (
    SMALLEST_SCALE,
    amax,
    decode,
    encode,
    exponent_from_amax,
    scale_from_amax,
    scale_from_exponent,
)

FP8 = [format for format in Format if format.is_fp8]


def test_amax_is_the_largest_finite_magnitude() -> None:
    x = torch.tensor(
        [
            [1.0, -3.0, 2.0],
            [torch.nan, -1.5, torch.inf],
            [-torch.inf, torch.nan, torch.inf],
            [0.0, -0.0, 0.0],
        ]
    )
    assert amax(x, 1).tolist() == [3.0, 1.5, 0.0, 0.0]
    assert amax(x, (0, 1)).item() == 3.0
    assert amax(x, 0).tolist() == [1.0, 3.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_amax_is_float32(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    got = amax(torch.tensor([[1.0, -largest]], dtype=dtype), -1)
    assert got.dtype == torch.float32
    assert got.tolist() == [largest]


@pytest.mark.parametrize("format", FP8)
def test_scale_is_amax_over_max_in_float32(format: Format) -> None:
    magnitude = np.geomspace(1e-30, 3e38, 1000).astype(np.float32)
    got = scale_from_amax(torch.from_numpy(magnitude), format)
    assert got.dtype == torch.float32
    np.testing.assert_array_equal(got.numpy(), magnitude / np.float32(format.max))


@pytest.mark.parametrize("format", FP8)
def test_nothing_to_measure_gives_the_smallest_scale(format: Format) -> None:
    x = torch.tensor([[0.0, 0.0], [torch.nan, torch.inf]])
    scale = scale_from_amax(amax(x, 1), format)
    assert scale.tolist() == [SMALLEST_SCALE, SMALLEST_SCALE]
    assert float(np.finfo(np.float32).tiny) == SMALLEST_SCALE
    assert decode(encode(x, scale[:, None], format), scale[:, None])[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("format", FP8)
def test_the_amax_itself_survives(format: Format) -> None:
    """It encodes to the largest code, whatever the scale's rounding does."""
    magnitude = torch.from_numpy(np.geomspace(1e-30, 3e38, 4001).astype(np.float32))
    assert (decode(encode(magnitude, scale_from_amax(magnitude, format), format)) == format.max).all()


def ceil_exponent(scale: float) -> int:
    """Smallest e with 2**e >= scale."""
    mantissa, exponent = math.frexp(scale)  # scale = mantissa * 2**exponent, mantissa in [0.5, 1)
    return exponent - 1 if mantissa == 0.5 else exponent


@pytest.mark.parametrize("format", FP8)
def test_exponent_is_the_ceiling_at_and_around_every_power_of_two(format: Format) -> None:
    powers = np.array([2.0**e for e in range(-126, 119)])
    around = np.concatenate([powers, powers * (1 - 2.0**-22), powers * (1 + 2.0**-22), powers * 1.5])
    magnitude = torch.tensor(around[around * format.max < 3e38] * format.max, dtype=torch.float32)
    scale = scale_from_amax(magnitude, format).tolist()
    got = exponent_from_amax(magnitude, format)
    assert got.dtype == torch.uint8
    assert len(got) > 850
    assert (got.to(torch.int32) - 127).tolist() == [ceil_exponent(value) for value in scale]


@pytest.mark.parametrize("format", FP8)
def test_exponent_of_nothing_and_of_the_largest_float_are_scales(format: Format) -> None:
    magnitude = torch.tensor([0.0, 1e-45, torch.finfo(torch.float32).max])
    exponent = exponent_from_amax(magnitude, format)
    scale = scale_from_exponent(exponent)
    assert exponent[:2].tolist() == [1, 1]
    assert (scale > 0).all()
    assert scale.isfinite().all()
    assert scale[0].item() == SMALLEST_SCALE


def test_every_exponent_byte_is_its_power_of_two() -> None:
    byte = torch.arange(1, 255, dtype=torch.uint8)
    assert scale_from_exponent(byte).tolist() == [2.0 ** (e - 127) for e in range(1, 255)]


@given(st.floats(2.0**-100, 2.0**100, width=32), st.sampled_from(FP8))
def test_a_power_of_two_scale_saturates_nothing_and_wastes_less_than_one_bit(magnitude: float, format: Format) -> None:
    scale = scale_from_exponent(exponent_from_amax(torch.tensor(magnitude), format)).item()
    assert format.max / 2 < magnitude / scale * (1 + 2.0**-22)
    assert magnitude / scale <= format.max * (1 + 2.0**-23)
