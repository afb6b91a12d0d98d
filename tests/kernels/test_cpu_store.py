"""Quantize and store of the compiled kernels, against the reference, bit for bit, in every build that runs here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from freight.errors import KernelError
from freight.fp8.formats import Format
from freight.fp8.quantize import torch_dtype
from freight.fp8.values import KVPages
from freight.kernels import reference
from freight.kernels.cpu import library
from freight.kernels.cpu.store import make_store_kv

BLOCK = 8
FP8 = (Format.E4M3FN, Format.E5M2, Format.E4M3FNUZ)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=library.runnable())
def store_kv(request: pytest.FixtureRequest) -> Any:
    return make_store_kv(library.load(request.param))


def make_pages(format: Format, scales: str | None, heads: int, dim: int, num_blocks: int) -> KVPages:
    torch.manual_seed(1)
    shape = (num_blocks, BLOCK, heads, dim)
    scale: list[torch.Tensor | None] = [None, None]
    if scales == "static":
        scale = [torch.rand(heads, dim) * 0.02 + 0.001 for _ in "kv"]
    elif scales == "token":
        scale = [torch.zeros(shape[:3], dtype=torch.bfloat16) for _ in "kv"]
    pages = (torch.zeros(shape, dtype=torch_dtype(format)) for _ in "kv")
    return KVPages(*pages, *scale, torch.zeros(1, dtype=torch.int64))


def assert_same(pages: KVPages, expected: KVPages) -> None:
    """Bit for bit; at 16 and 32 bits a NaN is a NaN."""
    for got, want in zip((pages.k, pages.v), (expected.k, expected.v), strict=True):
        if got.itemsize == 1:
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        else:
            assert torch.equal(got.isnan(), want.isnan())
            assert torch.equal(got.nan_to_num(nan=7.0).view(torch.uint8), want.nan_to_num(nan=7.0).view(torch.uint8))
    if pages.dynamic:
        assert torch.equal(pages.k_scale.view(torch.int16), expected.k_scale.view(torch.int16))
        assert torch.equal(pages.v_scale.view(torch.int16), expected.v_scale.view(torch.int16))
    assert pages.nan_count.item() == expected.nan_count.item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("format", "scales"),
    [*((format, scales) for format in FP8 for scales in (None, "static", "token"))]
    + [(format, None) for format in (Format.FLOAT32, Format.FLOAT16, Format.BFLOAT16)],
)
@pytest.mark.parametrize(("heads", "dim", "rows"), [(1, 64, 1), (2, 37, 70), (8, 256, 40)])
def test_bits_are_the_references(store_kv, format, scales, dtype, heads, dim, rows):
    torch.manual_seed(0)
    qkv = torch.randn(rows, 2 * heads + 3, dim).mul(10.0 ** torch.randint(-9, 9, (rows, 1, dim))).to(dtype)
    qkv[torch.rand(qkv.shape) < 0.02] = torch.nan
    qkv[torch.rand(qkv.shape) < 0.02] = -torch.inf
    qkv[torch.rand(qkv.shape) < 0.02] = -0.0
    _, k, v = qkv.split((3, heads, heads), 1)  # rows lie apart
    slots = torch.randperm(12 * BLOCK)[:rows]
    slots[::5] = -1
    pages, expected = (make_pages(format, scales, heads, dim, 12) for _ in range(2))
    store_kv(k, v, slots, pages)
    reference.store_kv(k, v, slots, expected)
    assert_same(pages, expected)


@pytest.mark.parametrize("format", FP8)
def test_every_rounding(store_kv, format):
    """Every code, every point halfway between two, their neighbours, and what saturates."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch_dtype(format)).float()
    values = codes[codes.isfinite()].unique()
    values = torch.cat([values, (values[1:] + values[:-1]) / 2, values * 4, torch.tensor([0.0, -0.0, torch.inf])])
    infinity = torch.tensor(torch.inf)
    values = torch.cat([values, values.nextafter(infinity), values.nextafter(-infinity)])
    values = torch.cat([values, -values, torch.tensor([torch.nan, -torch.nan])])[:, None, None]
    pages, expected = (make_pages(format, None, 1, 1, len(values) // BLOCK + 1) for _ in range(2))
    slots = torch.arange(len(values))
    store_kv(values, values, slots, pages)
    reference.store_kv(values, values, slots, expected)
    assert_same(pages, expected)


@pytest.mark.parametrize("format", FP8)
def test_a_row_of_nothing_finite_and_a_tiny_row(store_kv, format):
    k = torch.tensor([[torch.inf, torch.nan, -torch.inf, torch.nan], [1e-40, -1e-42, 0.0, 1e-45]])[:, None]
    pages, expected = (make_pages(format, "token", 1, 4, 1) for _ in range(2))
    store_kv(k, k, torch.tensor([2, 5]), pages)
    reference.store_kv(k, k, torch.tensor([2, 5]), expected)
    assert_same(pages, expected)
    assert pages.nan_count.item() == 4


def test_heads_too_wide_are_refused(store_kv):
    pages = make_pages(Format.E4M3FN, None, 1, 1025, 1)
    with pytest.raises(KernelError, match="at most 1024 channels, not 1025"):
        store_kv(torch.zeros(1, 1, 1025), torch.zeros(1, 1, 1025), torch.zeros(1, dtype=torch.int64), pages)
