"""The Triton kernels over pages in any layout, and over values inside keys: the bits of the default
layout.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.covering import covered
from tests.kernels.triton.test_triton_attention import CACHES, DECODES, MIXED, Case, small
from tests.kernels.triton.test_triton_store import (
    assert_same,
    make_pages,
    make_rotary,
    rotate_store,
)
from tests.layouts import LAYOUTS, apart, laid_out, latent

from freight.fp8.formats import Format
from freight.operands.kv_pages import KVPages, read_slots

__all__ = ["small"]  # a fixture, used by all tests here
STEPS = {"decode": DECODES, "mixed": MIXED}
STORED = [
    (Format.E4M3FN, "static"),
    (Format.E4M3FN, "token"),
    (Format.E5M2, "unit"),
    (Format.BFLOAT16, "unit"),
]


def attended(case: Case, pages: KVPages) -> torch.Tensor:
    case.pages = pages
    out = case.run(range(len(case.sequences)))
    assert out.isfinite().all()
    return out


@pytest.mark.parametrize(
    ("stored", "layout", "step"),
    covered([kind for kind in CACHES if kind[0] is not Format.E4M3FNUZ], LAYOUTS, STEPS),
)
def test_attention_reads_any_layout(stored, layout, step, device):
    case = Case(STEPS[step], *stored, torch.bfloat16, 2, 2, 40, device, v_dim=24)
    pages = case.pages
    moved = laid_out(pages, layout)
    assert moved.strides != pages.strides
    assert torch.equal(attended(case, moved), attended(case, pages))


@pytest.mark.parametrize(("stored", "first", "step"), covered(STORED, [0, 7, 16], STEPS))
def test_values_inside_keys_are_those_of_their_own(stored, first, step, device):
    case = Case(STEPS[step], *stored, torch.bfloat16, 1, 3, 48, device, v_dim=32)
    inside = latent(case.pages, first)
    assert torch.equal(attended(case, inside), attended(case, apart(inside)))


# the kernel knows strides and formats apart
@pytest.mark.parametrize(
    ("format", "scales", "layout"),
    [
        pytest.param(*kind, layout, marks=() if i % len(LAYOUTS) == j else pytest.mark.slow)
        for i, kind in enumerate(STORED)
        for j, layout in enumerate(LAYOUTS)
    ],
)
def test_rotate_store_writes_any_layout(format, scales, layout, device):
    heads, kv_heads, dim, v_dim, rows = 3, 2, 32, 24, 20
    torch.manual_seed(0)
    qkv = torch.randn(rows, (heads + kv_heads) * dim + kv_heads * v_dim).bfloat16().to(device)
    slots, positions = (
        torch.randperm(72)[:rows].to(device),
        torch.randint(0, 50, (rows,)).to(device),
    )
    slots[::5] = -1
    pages = make_pages(format, scales, kv_heads, dim, device, v_dim)
    moved = laid_out(pages, layout)
    q = rotate_store(qkv, make_rotary(dim, device), positions, slots, pages)
    assert torch.equal(rotate_store(qkv, make_rotary(dim, device), positions, slots, moved), q)
    assert_same(laid_out(moved, "heads"), laid_out(pages, "heads"))
    assert read_slots(moved.k, slots[slots >= 0]).float().any()


@pytest.mark.parametrize(
    ("format", "scales", "first"),
    [
        pytest.param(*kind, first, marks=() if i % 2 == bool(first) else pytest.mark.slow)
        for i, kind in enumerate(STORED)
        for first in (0, 7)
    ],
)
def test_keys_are_stored_with_the_values_inside_them(format, scales, first, device):
    heads, kv_heads, dim, v_dim, rows = 3, 2, 32, 24, 20
    torch.manual_seed(0)
    qkv = torch.randn(rows, (heads + kv_heads) * dim + kv_heads * v_dim).bfloat16().to(device)
    qkv[:, (heads + kv_heads) * dim :] = 0  # values that count nothing
    slots, positions = (
        torch.randperm(72)[:rows].to(device),
        torch.randint(0, 50, (rows,)).to(device),
    )
    pages = make_pages(format, scales, kv_heads, dim, device, v_dim)
    inside = latent(laid_out(pages, "heads"), first)
    q = rotate_store(qkv, make_rotary(16, device), positions, slots, pages)
    qk = qkv[:, : (heads + kv_heads) * dim].contiguous()
    assert torch.equal(rotate_store(qk, make_rotary(16, device), positions, slots, inside), q)
    assert_same(
        laid_out(inside, "heads"),
        replace(laid_out(latent(pages, first), "heads"), counters=pages.counters),
    )
