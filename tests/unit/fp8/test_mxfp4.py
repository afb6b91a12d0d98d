"""MXFP4: every code under every scale has the value that the formats' definitions and transformers
give it.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.shares import examples
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from freight.fp8 import mxfp4
from freight.fp8.cast import decode
from freight.fp8.formats import Format

EVERY_BYTE = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)  # in a row of 16 groups


def defined(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 [rows, inputs], as ml_dtypes has E2M1 and E8M0."""
    codes = np.stack((blocks.numpy() & 15, blocks.numpy() >> 4), -1).reshape(
        len(blocks), blocks.shape[1] * 32
    )
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    powers = scales.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return torch.from_numpy(values * powers.repeat(32, 1))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal, and so are the signs of zeros."""
    return torch.equal(one.double(), other.double()) and torch.equal(one.signbit(), other.signbit())


@pytest.mark.parametrize("scale", range(256))
def test_every_code_under_every_scale(scale: int):
    scales = torch.full((1, 16), scale, dtype=torch.uint8)
    expected = defined(EVERY_BYTE, scales)
    fits = bool((expected.abs() < 2.0**128).all())  # false for NaN
    assert mxfp4.finite(EVERY_BYTE, scales) == fits
    if not fits:
        assert scale >= 253  # 6 * 2 ** 126 is 2 ** 128 and more
        return
    assert same(mxfp4.to_bfloat16(EVERY_BYTE, scales), expected)
    theirs = convert_moe_packed_tensors(EVERY_BYTE[None], scales[None])  # [1, inputs, 1]
    assert same(mxfp4.to_bfloat16(EVERY_BYTE, scales), theirs[0].t())
    assert mxfp4.exact_rows(EVERY_BYTE, scales).item()
    for format in (Format.E4M3FN, Format.E4M3FNUZ):
        data, power = mxfp4.to_e4m3(EVERY_BYTE, scales, format)
        assert torch.equal(decode(data).double() * power.double()[:, None], expected)


@pytest.mark.parametrize(
    ("scale", "byte", "fits"),
    [
        (254, 0x33, True),
        (254, 0x04, False),
        (254, 0x40, False),
        (253, 0xDD, True),
        (253, 0x06, False),
        (255, 0, False),
    ],
)
def test_values_of_two_to_the_128_and_more_are_not_finite(scale: int, byte: int, fits: bool):
    blocks = torch.zeros(2, 3, 16, dtype=torch.uint8)
    scales = torch.full((2, 3), 127, dtype=torch.uint8)
    scales[1, 2], blocks[1, 2, 7] = scale, byte
    assert mxfp4.finite(blocks, scales) == fits
    assert fits == bool((defined(blocks, scales).abs() < 2.0**128).all())


@settings(max_examples=examples(100))
@given(
    data=st.data(),
    groups=st.integers(1, 5),
    rows=st.integers(1, 4),
    base=st.integers(0, 252),
    wide=st.booleans(),
)
def test_rows_are_exactly_e4m3_where_exponents_span_up_to_14(
    data: st.DataObject, groups: int, rows: int, base: int, wide: bool
):
    """Groups of zeros, which may have any scale, do not count."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    blocks = torch.randint(0, 256, (rows, groups, 16), generator=generator, dtype=torch.uint8)
    offsets = torch.randint(0, 18 if wide else 15, (rows, groups), generator=generator)
    scales = (base + offsets).clamp(max=252).to(torch.uint8)
    zeros = torch.rand(rows, groups, generator=generator) < 0.3
    blocks[zeros] &= 0x88  # of either sign
    scales[zeros] = torch.randint(
        0, 255, (int(zeros.sum()),), generator=generator, dtype=torch.uint8
    )
    exact = mxfp4.exact_rows(blocks, scales)
    for row in range(rows):
        counted = scales[row][~zeros[row]].tolist()
        assert exact[row] == (not counted or max(counted) - min(counted) <= 14)
    assert torch.equal(mxfp4.exact_rows(blocks[None], scales[None]), exact[None])
    codes, scale = mxfp4.to_e4m3(blocks[exact], scales[exact], Format.E4M3FN)
    assert torch.equal(
        decode(codes).double() * scale.double()[:, None], defined(blocks[exact], scales[exact])
    )
    assert torch.equal(scale.frexp().mantissa, torch.full_like(scale, 0.5))  # powers of two
    assert (scale >= 2.0**-126).all()
    assert same(mxfp4.to_bfloat16(blocks, scales), defined(blocks, scales))
