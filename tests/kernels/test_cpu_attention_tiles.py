"""Attention of the compiled kernels where matrix tiles have edges, in every build that runs here:
about 16 rows, 32 channels and 64 keys. Memory around every token holds NaN
(test_cpu_attention.make_cache)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.test_cpu_attention import check, exact, make_cache

from freight.fp8.formats import Format
from freight.kernels import reference
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.operands.attention import AttentionCall

STORED = [
    (Format.E4M3FN, "channel"),
    (Format.E4M3FN, "token"),
    (Format.INT8, "token"),
    (Format.BFLOAT16, None),
]


@pytest.fixture(params=library.runnable())
def attention(request: pytest.FixtureRequest) -> Any:
    return CpuKernels(library.load(request.param)).attention


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dim", [1, 80, 96, 256])
def test_contexts_about_a_tile_and_a_split_of_keys(attention, stored, dim):
    lengths = [1, 63, 64, 65, 1023, 1025]
    cache = make_cache(*stored, lengths, 1, dim)
    check(attention, cache, [1] * 6, 4, None, torch.bfloat16)
    check(attention, cache, [1, 17, 1, 33, 16, 15], 1, None, torch.bfloat16)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("group", "dim"), [(1, 80), (1, 256), (4, 64), (5, 96), (17, 1)])
def test_rows_together_have_the_bits_of_rows_alone(attention, stored, group, dim):
    cache = make_cache(*stored, [1060], 2, dim)
    q = torch.randn(33, 2 * group, dim).bfloat16()
    alone = [
        attention(
            q[i : i + 1], cache.pages, cache.batch([1], [1028 + i]).sequences(0), AttentionCall(0.2)
        )
        for i in range(33)
    ]
    for rows in (1, 15, 16, 17, 33):
        out = attention(
            q[:rows],
            cache.pages,
            cache.batch([rows], [1027 + rows]).sequences(0),
            AttentionCall(0.2),
        )
        assert torch.equal(out, torch.cat(alone[:rows]))


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_query_that_is_not_finite_stays_alone(attention, stored, value):
    cache = make_cache(*stored, [200, 100], 2, 80)
    batch = cache.batch([33, 1]).sequences(0)
    q = torch.randn(34, 8, 80).bfloat16()
    expected = attention(q, cache.pages, batch, AttentionCall(0.1))
    hit = torch.zeros(34, 8, dtype=torch.bool)
    hit[5, 3] = hit[33, 0] = True
    q[5, 3, 7] = q[33, 0, 79] = value
    out = attention(q, cache.pages, batch, AttentionCall(0.1))
    assert torch.equal(out[~hit], expected[~hit])
    assert not out[hit].isfinite().any()


@pytest.mark.parametrize("stored", [*STORED, (Format.E4M3FN, "head")])
@pytest.mark.parametrize(("group", "dim"), [(4, 64), (4, 128)])
def test_scores_that_rise_from_tile_to_tile(attention, stored, group, dim):
    """A softmax may keep its base while scores rise a little, and must move it when they rise much, in
    rows that fall, rise slowly and rise by up to 30 a tile.
    """
    length, rows = 700, 40
    cache = make_cache(*stored, [length], 1, dim)
    direction = torch.randn(dim).sign()
    height = torch.linspace(0, 1, length)[:, None, None]
    k = direction * height + 0.05 * torch.randn(length, 1, dim)
    reference.store_kv(k, torch.randn(length, 1, dim), cache.batch([length]).slots[0], cache.pages)
    slope = torch.linspace(-30, 30, rows * group).reshape(rows, group, 1)
    q = (direction * slope + 0.05 * torch.randn(rows, group, dim)).bfloat16()
    batch = cache.batch([rows]).sequences(0)
    out = attention(q, cache.pages, batch, AttentionCall(dim**-0.5))
    want, size = exact(q, cache, batch, None)
    assert ((out.double() - want).abs() <= 4e-3 * size + 2**-8 * want.abs()).all()
    for i in range(rows):
        alone = cache.batch([1], [length - rows + 1 + i]).sequences(0)
        assert torch.equal(
            attention(q[i : i + 1], cache.pages, alone, AttentionCall(dim**-0.5)), out[i : i + 1]
        )
