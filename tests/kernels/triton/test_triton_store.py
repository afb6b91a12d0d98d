"""Quantize-and-store against the reference: the same bytes and scales, slot by slot."""

from __future__ import annotations

import pytest
import torch

from freight.fp8.formats import Format
from freight.fp8.quantize import decode, torch_dtype
from freight.fp8.values import KVPages
from freight.kernels import reference
from freight.kernels.triton import store
from freight.kernels.triton.formats import current_target

BLOCK, NUM_BLOCKS = 8, 9
FP8 = [format for format in Format if format.is_fp8]
CACHES = [(format, kind) for format in FP8 for kind in ("unit", "static", "token")]
CACHES += [(format, "unit") for format in (Format.BFLOAT16, Format.FLOAT16, Format.FLOAT32)]


def make_pages(format: Format, scales: str, heads: int, dim: int, device: str) -> KVPages:
    shape = (NUM_BLOCKS, BLOCK, heads, dim)
    kept: list[torch.Tensor | None] = [None, None]
    if scales == "static":
        generator = torch.Generator().manual_seed(5)
        kept = [(torch.rand(heads, dim, generator=generator) * 0.02 + 1e-3).to(device) for _ in "kv"]
    elif scales == "token":
        kept = [torch.full(shape[:3], -1.0, dtype=torch.bfloat16, device=device) for _ in "kv"]
    pages = [torch.zeros(shape, device=device).to(torch_dtype(format)) for _ in "kv"]
    return KVPages(*pages, *kept, torch.zeros(1, dtype=torch.int64, device=device))


def assert_same(got: KVPages, expected: KVPages) -> None:
    for a, b in ((got.k, expected.k), (got.v, expected.v)):
        left, right = decode(a), decode(b)
        assert torch.equal(left.isnan(), right.isnan())
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.itemsize]
        assert torch.equal(a.view(bits)[~left.isnan()], b.view(bits)[~left.isnan()])
    for a, b in ((got.k_scale, expected.k_scale), (got.v_scale, expected.v_scale)):
        assert (a is None and b is None) or torch.equal(a, b)
    assert got.nan_count.item() == expected.nan_count.item()


@pytest.mark.parametrize(("format", "scales"), CACHES)
@pytest.mark.parametrize(("dtype", "heads", "dim"), [(torch.bfloat16, 2, 32), (torch.float32, 1, 40)])
def test_stored_bytes_are_the_reference_s(format, scales, dtype, heads, dim, device):
    torch.manual_seed(0)
    rows = 13
    merged = (torch.randn(rows, 3 * heads, dim) * 10 ** torch.randn(rows, 1, 1)).to(dtype).to(device)
    merged[3, :, 1], merged[4, :, 2], merged[5] = torch.inf, torch.nan, 0.0
    _, k, v = merged.split(heads, dim=1)  # views with gaps, as the merged projection gives them
    slots = torch.randperm(BLOCK * NUM_BLOCKS)[:rows]
    slots[7] = slots[11] = -1
    expected, got = (make_pages(format, scales, heads, dim, device) for _ in range(2))
    reference.store_kv(k, v, slots.to(device), expected)
    store.store_kv(current_target(), k, v, slots.to(device), got)
    assert_same(got, expected)
    assert got.nan_count.item() == 2 * heads


@pytest.mark.parametrize("scales", ["static", "token"])
def test_many_rows_are_stored_as_few_are(scales, monkeypatch, device):
    torch.manual_seed(1)
    k, v = (torch.randn(19, 2, 16).bfloat16().to(device) for _ in "kv")
    slots = torch.randperm(BLOCK * NUM_BLOCKS)[:19].to(device)
    few, many = (make_pages(Format.E4M3FN, scales, 2, 16, device) for _ in range(2))
    store.store_kv(current_target(), k, v, slots, few)
    monkeypatch.setattr(store, "FEW_ROWS", 0)
    store.store_kv(current_target(), k, v, slots, many)
    assert_same(many, few)
