"""Pages in any layout, and values inside keys: the bits of pages in the default layout, in every
build that runs here.

What lies between the vectors is NaN, so reading it shows; that nothing is written there is
compared, too.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.kernels.test_cpu_attention import CACHES, Cache, make_cache
from tests.kernels.test_cpu_store import (
    QUANTIZED,
    assert_equal,
    assert_same,
    make_pages,
    make_rotary,
    of_all_magnitudes,
)
from tests.layouts import LAYOUTS, apart, laid_out, latent
from torch import Tensor

from freight.fp8.formats import Format
from freight.kernels import reference
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.interface import KernelSet
from freight.kernels.reference_set import REFERENCE
from freight.operands.attention import AttentionCall
from freight.operands.kv_pages import KVPages, read_slots

LENGTHS = [1, 40, 1200, 17]
STEPS = ([1, 1, 1, 0], [1, 9, 50, 17])
STORED = [(format, scales) for format in QUANTIZED for scales in ("static", "token")]
STORED = [kind for kind in STORED if kind != (Format.INT8, "static")] + [
    (Format.BFLOAT16, None),
    (Format.E5M2, None),
]


@pytest.fixture(params=["reference", *library.runnable()])
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    return REFERENCE if request.param == "reference" else CpuKernels(library.load(request.param))


def attended(
    kernels: KernelSet, cache: Cache, pages: KVPages, rows: list[int], window: int | None = None
) -> Tensor:
    torch.manual_seed(1)
    q = torch.randn(sum(rows), 2 * pages.k.shape[2], pages.k.shape[3]).bfloat16()
    out = kernels.attention(q, pages, cache.batch(rows).sequences(0), AttentionCall(0.1, window))
    assert isinstance(out, Tensor)
    assert out.isfinite().all()
    return out


@pytest.mark.parametrize("rows", STEPS, ids=["decode", "mixed"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("format", "scales"), CACHES)
def test_attention_reads_any_layout(kernels, format, scales, layout, rows):
    cache = make_cache(format, scales, LENGTHS, heads=3, dim=40, v_dim=24)
    moved = laid_out(cache.pages, layout)
    assert moved.strides != cache.pages.strides
    assert torch.equal(
        attended(kernels, cache, moved, rows), attended(kernels, cache, cache.pages, rows)
    )


@pytest.mark.parametrize("rows", STEPS, ids=["decode", "mixed"])
@pytest.mark.parametrize("first", [0, 7, 24])
@pytest.mark.parametrize(("format", "scales"), CACHES)
def test_values_inside_keys_are_those_of_their_own(kernels, format, scales, first, rows):
    cache = make_cache(format, scales, LENGTHS, heads=2, dim=64, v_dim=40)
    inside = latent(cache.pages, first)
    whole = attended(kernels, cache, apart(inside), rows)
    assert torch.equal(attended(kernels, cache, inside, rows), whole)
    assert not torch.equal(attended(kernels, cache, cache.pages, rows), whole)


def test_a_window_over_another_layout(kernels):
    cache = make_cache(Format.E4M3FN, "token", LENGTHS, heads=3, dim=40)
    for layout in LAYOUTS:
        got = attended(kernels, cache, laid_out(cache.pages, layout), STEPS[1], window=70)
        assert torch.equal(got, attended(kernels, cache, cache.pages, STEPS[1], window=70)), layout


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("format", "scales"), STORED)
def test_rotate_store_writes_any_layout(kernels, format, scales, layout):
    """The same vectors and counters, and no byte between them is touched."""
    heads, kv_heads, dim, v_dim, rows = 3, 2, 40, 31, 60
    torch.manual_seed(0)
    parts = (
        of_all_magnitudes(rows, heads + kv_heads, dim),
        of_all_magnitudes(rows, kv_heads, v_dim),
    )
    qkv = torch.cat([part.flatten(1) for part in parts], 1).bfloat16()
    slots, positions = torch.randperm(96)[:rows], torch.randint(0, 300, (rows,))
    slots[::5] = -1
    pages = make_pages(format, scales, kv_heads, dim, 12, v_dim)
    moved = laid_out(pages, layout)
    before = _outside(moved)
    q = kernels.rotate_store(qkv, make_rotary(dim), positions, slots, pages)
    assert_equal(kernels.rotate_store(qkv, make_rotary(dim), positions, slots, moved), q)
    assert_same(_contiguous(moved), _contiguous(pages))
    assert pages.counters.any()
    assert torch.equal(_outside(moved), before)


@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize(("format", "scales"), STORED)
def test_keys_are_stored_with_the_values_inside_them(kernels, format, scales, first):
    """qkv has no values then; of K the bytes, the scales and the counters are those of keys alone."""
    heads, kv_heads, dim, rows = 3, 2, 40, 60
    torch.manual_seed(0)
    qk = of_all_magnitudes(rows, heads + kv_heads, dim).bfloat16()
    nothing = torch.zeros(rows, kv_heads, 33, dtype=torch.bfloat16)
    slots, positions = torch.randperm(96)[:rows], torch.randint(0, 300, (rows,))
    pages = make_pages(format, scales, kv_heads, dim, 12, 33)
    inside = latent(laid_out(pages, "heads"), first)
    q = kernels.rotate_store(
        torch.cat((qk.flatten(1), nothing.flatten(1)), 1), make_rotary(16), positions, slots, pages
    )
    assert_equal(kernels.rotate_store(qk.flatten(1), make_rotary(16), positions, slots, inside), q)
    assert_equal(_bytes_of(inside.k), _bytes_of(pages.k))
    assert_equal(
        read_slots(inside.v, slots),
        read_slots(pages.k, slots)[..., first : first + 33].contiguous(),
    )
    assert inside.counters.tolist() == pages.counters.tolist()
    if scales == "token":
        assert torch.equal(inside.k_scale.contiguous(), pages.k_scale)


def test_queries_alone_are_rotated_beside_values_inside_keys(kernels):
    pages = latent(make_pages(Format.E4M3FN, "token", 2, 40, 12, 31), 0)
    q, positions = torch.randn(5, 3 * 40).bfloat16(), torch.arange(5)
    got = kernels.rotate_store(q, make_rotary(16), positions, None, pages)
    assert torch.equal(
        got, reference.rotate_queries(q.unflatten(1, (3, 40)), make_rotary(16), positions)
    )
    assert not pages.counters.any()


def _bytes_of(page: Tensor) -> Tensor:
    return (
        page.view(torch.uint8).contiguous().view(page.dtype)
        if page.itemsize == 1
        else page.contiguous()
    )


def _contiguous(pages: KVPages) -> KVPages:
    scales = [s if s is None else s.contiguous() for s in (pages.k_scale, pages.v_scale)]
    return replace(
        pages, k=_bytes_of(pages.k), v=_bytes_of(pages.v), k_scale=scales[0], v_scale=scales[1]
    )


def _outside(pages: KVPages) -> Tensor:
    """The bytes of the memory that holds the pages, those of the pages left out."""
    kept = []
    tensors = [pages.k, pages.v] + ([pages.k_scale, pages.v_scale] if pages.dynamic else [])
    memories = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    for address, storage in memories.items():
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        inside = torch.zeros(len(memory), dtype=torch.bool)
        for tensor in tensors:
            if tensor.untyped_storage().data_ptr() == address:
                strides = [step * tensor.itemsize for step in tensor.stride()]
                begin = tensor.storage_offset() * tensor.itemsize
                for byte in range(tensor.itemsize):
                    inside.as_strided(tensor.shape, strides, begin + byte).fill_(True)
        kept.append(memory[~inside])
    return torch.cat(kept)
