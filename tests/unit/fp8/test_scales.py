"""How scales are made from amax: float32, and bfloat16 for a token, over every exponent, with all
the edges.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freight.fp8.cast import (
    SMALLEST_SCALE,
    amax,
    decode,
    encode,
    scale_from_amax,
    token_scale,
)
from freight.fp8.formats import Format

QUANTIZED = [format for format in Format if format.is_quantized]


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


@pytest.mark.parametrize("format", QUANTIZED)
def test_scale_is_amax_over_max_in_float32(format: Format) -> None:
    magnitude = np.geomspace(1e-30, 3e38, 1000).astype(np.float32)
    got = scale_from_amax(torch.from_numpy(magnitude), format)
    assert got.dtype == torch.float32
    np.testing.assert_array_equal(got.numpy(), magnitude / np.float32(format.max))


@pytest.mark.parametrize("format", QUANTIZED)
def test_nothing_to_measure_gives_the_smallest_scale(format: Format) -> None:
    x = torch.tensor([[0.0, 0.0], [torch.nan, torch.inf]])
    scale = scale_from_amax(amax(x, 1), format)
    assert scale.tolist() == [SMALLEST_SCALE, SMALLEST_SCALE]
    assert float(np.finfo(np.float32).tiny) == SMALLEST_SCALE
    assert decode(encode(x, scale[:, None], format), scale[:, None])[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("format", QUANTIZED)
def test_the_amax_itself_survives(format: Format) -> None:
    """It encodes to the largest code, whatever the scale's rounding does."""
    magnitude = torch.from_numpy(np.geomspace(1e-30, 3e38, 4001).astype(np.float32))
    assert (
        decode(encode(magnitude, scale_from_amax(magnitude, format), format)) == format.max
    ).all()


@pytest.mark.parametrize("format", QUANTIZED)
def test_a_token_scale_is_the_nearest_bfloat16_and_the_largest_value_stays_the_largest_code(
    format: Format,
) -> None:
    magnitude = torch.from_numpy(np.geomspace(1e-30, 3e38, 4001).astype(np.float32))
    scale = token_scale(magnitude, format)
    assert scale.dtype == torch.bfloat16
    exact = magnitude.double() / format.max
    assert ((scale.double() - exact).abs() <= exact * 2.0**-8).all()
    assert (decode(encode(magnitude, scale.float(), format)) == format.max).all()


@pytest.mark.parametrize("format", QUANTIZED)
def test_a_token_scale_of_nothing_and_of_the_largest_float_is_positive_and_finite(
    format: Format,
) -> None:
    scale = token_scale(torch.tensor([0.0, 1e-45, torch.finfo(torch.float32).max]), format).float()
    assert scale[:2].tolist() == [SMALLEST_SCALE, SMALLEST_SCALE]
    assert scale.isfinite().all()
