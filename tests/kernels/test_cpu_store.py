"""Rotate and store of the compiled kernels, against the reference, bit for bit, in every build that
runs here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from freight.errors import KernelError
from freight.fp8.cast import decode, torch_dtype
from freight.fp8.formats import Format
from freight.kernels import reference
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.interface import KernelSet
from freight.operands.kv_pages import KeyCenter, KVPages
from freight.operands.rotary import Rotary

BLOCK, POSITIONS = 8, 300
FP8 = (Format.E4M3FN, Format.E5M2, Format.E4M3FNUZ)
QUANTIZED = (*FP8, Format.INT8)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=library.runnable())
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    return CpuKernels(library.load(request.param))


def make_pages(
    format: Format,
    scales: str | None,
    heads: int,
    dim: int,
    num_blocks: int,
    v_dim: int | None = None,
) -> KVPages:
    torch.manual_seed(1)
    dims, slots = (dim, v_dim or dim), (num_blocks, BLOCK, heads)
    scale: list[Tensor | None] = [None, None]
    if scales == "static":
        scale = [torch.rand(heads, width) * 0.02 + 0.001 for width in dims]
    elif scales == "token":
        scale = [torch.zeros(slots, dtype=torch.bfloat16) for _ in dims]
    pages = (torch.zeros((*slots, width), dtype=torch_dtype(format)) for width in dims)
    return KVPages(*pages, *scale, torch.zeros(2, dtype=torch.int64))


def make_rotary(rotary_dim: int, norms: tuple[Tensor, Tensor] | None = None) -> Rotary:
    angles = torch.outer(
        torch.arange(POSITIONS).float(), 1e4 ** -torch.linspace(0, 1, rotary_dim // 2)
    )
    return Rotary(angles.cos(), angles.sin(), norms, 1e-6)


def make_qkv(rows: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Of all magnitudes, with NaN, infinities and negative zeros."""
    torch.manual_seed(0)
    return of_all_magnitudes(rows, heads + 2 * kv_heads, dim).to(dtype)


def of_all_magnitudes(rows: int, heads: int, dim: int) -> Tensor:
    x = torch.randn(rows, heads, dim).mul(10.0 ** torch.randint(-9, 9, (rows, 1, dim)))
    for value in (torch.nan, -torch.inf, -0.0):
        x[torch.rand(x.shape) < 0.02] = value
    return x


def assert_equal(got: Tensor, want: Tensor) -> None:
    """Bit for bit, but that a NaN is a NaN."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.itemsize]
    nan = decode(want).isnan()
    assert torch.equal(decode(got).isnan(), nan)
    assert torch.equal(got.view(bits)[~nan], want.view(bits)[~nan])


def assert_same(pages: KVPages, expected: KVPages) -> None:
    assert_equal(pages.k, expected.k)
    assert_equal(pages.v, expected.v)
    if pages.dynamic:
        assert torch.equal(pages.k_scale.view(torch.int16), expected.k_scale.view(torch.int16))
        assert torch.equal(pages.v_scale.view(torch.int16), expected.v_scale.view(torch.int16))
    assert pages.counters.tolist() == expected.counters.tolist()
    assert (pages.row_counters is None) == (expected.row_counters is None)
    if pages.row_counters is not None:
        assert torch.equal(pages.row_counters, expected.row_counters)


@pytest.mark.parametrize(("format", "scales"), [(Format.E4M3FN, "static"), (Format.BFLOAT16, None)])
def test_rows_are_counted_on_their_own(kernels, format, scales):
    """As the reference counts each row alone; not in a call of more rows than there is room for, and
    not where nothing is stored.
    """
    rows, dim = 9, 38
    qkv = make_qkv(rows, 3, 2, dim, torch.bfloat16).flatten(1)
    rotary, positions, slots = make_rotary(dim), torch.arange(rows), torch.arange(rows) + 5
    slots[2] = -1
    pages, expected = (
        replace(
            make_pages(format, scales, 2, dim, 2),
            row_counters=torch.full((12, 2), 77, dtype=torch.int64),
        )
        for _ in range(2)
    )
    kernels.rotate_store(qkv, rotary, positions, slots, pages)
    reference.rotate_store(qkv, rotary, positions, slots, expected)
    assert_same(pages, expected)
    assert pages.row_counters[9:].eq(77).all()
    assert pages.row_counters[2].tolist() == [0, 0]
    for row in range(rows):
        alone = make_pages(format, scales, 2, dim, 2)
        part = slice(row, row + 1)
        reference.rotate_store(qkv[part], rotary, positions[part], slots[part], alone)
        assert pages.row_counters[row].tolist() == alone.counters.tolist()
    assert pages.row_counters[:9, 0].any()
    assert pages.row_counters[:9, 1].any() == format.is_quantized
    counted = pages.row_counters.clone()
    kernels.rotate_store(qkv[:, : 3 * dim].contiguous(), rotary, positions, None, pages)
    many = torch.arange(13) % 9
    kernels.rotate_store(qkv[many], rotary, positions[many], torch.arange(13), pages)
    assert torch.equal(pages.row_counters, counted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_queries_alone_are_those_beside_keys(kernels, normed, dtype):
    """Without slots: the heads of q, for keys that another layer has stored; the pages keep what
    they hold.
    """
    heads, kv_heads, dim, rows = 3, 2, 38, 20
    qkv, positions = make_qkv(rows, heads, kv_heads, dim, dtype).flatten(1), torch.arange(rows)
    rotary = make_rotary(dim)
    if normed:
        rotary = replace(rotary, norms=(torch.rand(dim).to(dtype),) * 2)
    pages, untouched = (make_pages(Format.E4M3FN, "token", kv_heads, dim, 12) for _ in range(2))
    q = kernels.rotate_store(qkv[:, : heads * dim].contiguous(), rotary, positions, None, pages)
    assert_same(pages, untouched)
    assert_equal(q, kernels.rotate_store(qkv, rotary, positions, torch.full((rows,), -1), pages))
    wanted = reference.rotate_store(qkv[:, : heads * dim], rotary, positions, None, pages)
    torch.testing.assert_close(
        q, wanted, rtol=2 * torch.finfo(dtype).eps + 1e-6, atol=1e-6, equal_nan=True
    )


CACHES = [(format, scales) for format in FP8 for scales in (None, "static", "token")]
CACHES += [(Format.INT8, "token")]
CACHES += [(format, None) for format in (Format.FLOAT32, Format.FLOAT16, Format.BFLOAT16)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("format", "scales"), CACHES)
@pytest.mark.parametrize(("kv_heads", "dim", "rows"), [(1, 64, 1), (2, 38, 70), (8, 256, 40)])
def test_bits_are_the_references(kernels, format, scales, dtype, kv_heads, dim, rows):
    qkv = make_qkv(rows, 3, kv_heads, dim, dtype)
    slots, positions = torch.randperm(12 * BLOCK)[:rows], torch.randint(0, POSITIONS, (rows,))
    slots[::5] = -1 if rows > 1 else 3
    pages, expected = (make_pages(format, scales, kv_heads, dim, 12) for _ in range(2))
    arguments = (qkv.flatten(1), make_rotary(dim), positions, slots)
    assert_equal(
        kernels.rotate_store(*arguments, pages), reference.rotate_store(*arguments, expected)
    )
    assert_same(pages, expected)
    assert rows == 1 or (pages.counters[1] > 0) == format.is_quantized


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("format", "scales"), CACHES)
@pytest.mark.parametrize(
    ("dim", "v_dim", "rotary_dim"),
    [(64, 64, 16), (40, 64, 40), (48, 31, 0), (80, 38, 18), (256, 64, 192)],
)
def test_partial_rotary_and_values_of_another_width(
    kernels, format, scales, dtype, dim, v_dim, rotary_dim
):
    """The reference's bits, in any chunk and with any number of threads."""
    torch.manual_seed(0)
    heads, kv_heads, rows = 3, 2, 60
    parts = (
        of_all_magnitudes(rows, heads + kv_heads, dim),
        of_all_magnitudes(rows, kv_heads, v_dim),
    )
    qkv = torch.cat([part.flatten(1) for part in parts], 1).to(dtype)
    slots, positions = torch.randperm(12 * BLOCK)[:rows], torch.randint(0, POSITIONS, (rows,))
    slots[::5] = -1
    rotary = make_rotary(rotary_dim)
    pages, chunked, expected = (
        make_pages(format, scales, kv_heads, dim, 12, v_dim) for _ in range(3)
    )
    q = kernels.rotate_store(qkv, rotary, positions, slots, pages)
    assert_equal(q, reference.rotate_store(qkv, rotary, positions, slots, expected))
    assert_same(pages, expected)
    before = torch.get_num_threads()
    try:
        for threads, part in enumerate((slice(0, 1), slice(1, 38), slice(38, 60))):
            torch.set_num_threads(threads + 1)
            assert_equal(
                kernels.rotate_store(qkv[part], rotary, positions[part], slots[part], chunked),
                q[part],
            )
    finally:
        torch.set_num_threads(before)
    assert_same(chunked, pages)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "norm_dtypes", [(None, None), (torch.float32, None), (torch.float32, torch.float32)]
)
def test_norms_of_heads_before_partial_rotary(kernels, norm_dtypes, dtype):
    """Norms in the dtype (None) and in float32 are those of `add_rms_norm`, the center is
    subtracted after them.
    """
    torch.manual_seed(2)
    heads, kv_heads, dim, v_dim, rows = 4, 2, 80, 48, 33
    q, k, v = (
        torch.randn(rows, *shape).to(dtype) * 3
        for shape in ((heads, dim), (kv_heads, dim), (kv_heads, v_dim))
    )
    weights = [torch.rand(dim).add(0.5).to(of or dtype) for of in norm_dtypes]
    rotary = make_rotary(20, (weights[0], weights[1]))
    positions, slots = torch.randint(0, POSITIONS, (rows,)), torch.randperm(12 * BLOCK)[:rows]
    pages, expected = (
        make_pages(Format.E4M3FN, "static", kv_heads, dim, 12, v_dim) for _ in range(2)
    )
    add_rms_norm: Any = kernels.add_rms_norm
    normed_q, normed_k = (
        add_rms_norm(x.reshape(-1, dim), None, weight, 1e-6)[1].view(x.shape)
        for x, weight in zip((q, k), weights, strict=True)
    )
    b = torch.zeros(kv_heads, dim)
    b[:, :20] = torch.randn(kv_heads, 20)
    center = KeyCenter.of(b, *(KeyCenter.angle_tiles(table) for table in (rotary.cos, rotary.sin)))
    pages = replace(pages, k_center=center)
    got = kernels.rotate_store(
        torch.cat([x.flatten(1) for x in (q, k, v)], 1), rotary, positions, slots, pages
    )
    cos, sin = rotary.cos[positions], rotary.sin[positions]
    reference.store_kv(
        reference.rotate((normed_k.float() - b).to(dtype), cos, sin), v, slots, expected
    )
    assert_equal(got, reference.rotate(normed_q, cos, sin))
    assert_same(pages, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centered", [False, True])
def test_fused_is_the_composition_of_its_parts(kernels, centered, dtype):
    """Norms of heads are those of `add_rms_norm` of the same build; the center is subtracted after
    them.
    """
    torch.manual_seed(2)
    heads, kv_heads, dim, rows = 4, 2, 80, 33
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim).mul(3).to(dtype)
    weights = torch.rand(2, dim).add(0.5).to(dtype)
    rotary = make_rotary(dim, (weights[0], weights[1]))
    positions, slots = torch.randint(0, POSITIONS, (rows,)), torch.randperm(12 * BLOCK)[:rows]
    pages, expected = (make_pages(Format.E4M3FN, "static", kv_heads, dim, 12) for _ in range(2))
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    add_rms_norm: Any = kernels.add_rms_norm
    q, k = (
        add_rms_norm(x.reshape(-1, dim), None, weight, 1e-6)[1].view(x.shape)
        for x, weight in zip((q, k), weights, strict=True)
    )
    if centered:
        tables = (KeyCenter.angle_tiles(table) for table in (rotary.cos, rotary.sin))
        b = torch.randn(kv_heads, dim)
        pages = replace(pages, k_center=KeyCenter.of(b, *tables))
        k = (k.float() - b).to(dtype)
    cos, sin = rotary.cos[positions], rotary.sin[positions]
    reference.store_kv(reference.rotate(k, cos, sin), v, slots, expected)
    assert_equal(
        kernels.rotate_store(qkv.flatten(1), rotary, positions, slots, pages),
        reference.rotate(q, cos, sin),
    )
    assert_same(pages, expected)


def test_rows_do_not_see_each_other_nor_the_threads(kernels):
    qkv, rotary = make_qkv(70, 32, 8, 64, torch.bfloat16).flatten(1), make_rotary(64)
    positions, slots = torch.arange(70), torch.arange(70)
    before = torch.get_num_threads()
    whole, parts = (make_pages(Format.E4M3FN, "token", 8, 64, 12) for _ in range(2))
    try:
        torch.set_num_threads(3)
        q = kernels.rotate_store(qkv, rotary, positions, slots, whole)
        torch.set_num_threads(1)
        for rows in (slice(0, 1), slice(1, 38), slice(38, 70)):
            part = kernels.rotate_store(qkv[rows], rotary, positions[rows], slots[rows], parts)
            assert_equal(part, q[rows])
    finally:
        torch.set_num_threads(before)
    assert_same(parts, whole)


def store_values(kernels: Any, v: Tensor, slots: Tensor, pages: KVPages) -> None:
    """Store v, [rows, 1, dim], beside keys of zeros."""
    dim = v.shape[2]
    qkv, positions = torch.cat((torch.zeros_like(v), v), 1).flatten(1), torch.zeros_like(slots)
    kernels.rotate_store(qkv, make_rotary(dim), positions, slots, pages)


@pytest.mark.parametrize("format", QUANTIZED)
def test_every_rounding(kernels, format):
    """Every code, every point halfway between two, their neighbours, and what saturates."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch_dtype(format)).float()
    values = codes[codes.isfinite()].unique()
    values = torch.cat(
        [values, (values[1:] + values[:-1]) / 2, values * 4, torch.tensor([0.0, -0.0, torch.inf])]
    )
    values = torch.cat([values, torch.tensor([format.overflow])])
    infinity = torch.tensor(torch.inf)
    values = torch.cat([values, values.nextafter(infinity), values.nextafter(-infinity)])
    values = torch.cat([values, -values, torch.tensor([torch.nan, -torch.nan])]).view(-1, 1, 2)
    pages, expected = (make_pages(format, None, 1, 2, len(values) // BLOCK + 1) for _ in range(2))
    store_values(kernels, values, torch.arange(len(values)), pages)
    store_values(reference, values, torch.arange(len(values)), expected)
    assert_same(pages, expected)
    assert torch.equal(
        pages.v.view(torch.uint8), expected.v.view(torch.uint8)
    )  # the NaN of either sign, too
    nans, clipped = pages.counters.tolist()
    assert (nans, clipped) == (2, int((values.abs() > format.overflow).sum()))


@pytest.mark.parametrize("format", QUANTIZED)
def test_a_row_of_nothing_finite_and_a_tiny_row(kernels, format):
    v = torch.tensor([[torch.inf, torch.nan, -torch.inf, torch.nan], [1e-40, -1e-42, 0.0, 1e-45]])[
        :, None
    ]
    pages, expected = (make_pages(format, "token", 1, 4, 1) for _ in range(2))
    store_values(kernels, v, torch.tensor([2, 5]), pages)
    store_values(reference, v, torch.tensor([2, 5]), expected)
    assert_same(pages, expected)
    assert pages.counters.tolist() == [2, 2]


@pytest.mark.parametrize("format", [Format.E4M3FN, Format.INT8])
def test_what_a_measured_scale_rounds_is_not_clipped(kernels, format):
    """The largest value of a vector may lie above the format's largest after division, by the
    scale's own rounding.
    """
    torch.manual_seed(3)
    pages = make_pages(format, "token", 1, 64, 12)
    store_values(kernels, torch.randn(90, 1, 64), torch.arange(90), pages)
    assert (decode(pages.v).abs().flatten(0, 1)[:90].amax(-1) == format.max).all()
    assert pages.counters.tolist() == [0, 0]


def test_heads_too_wide_are_refused(kernels):
    pages = make_pages(Format.E4M3FN, None, 1, 1026, 1)
    with pytest.raises(KernelError, match="at most 1024, not 1026"):
        store_values(kernels, torch.zeros(1, 1, 1026), torch.zeros(1, dtype=torch.int64), pages)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [0, 18, 38])
def test_the_factor_of_queries_multiplies_them_once_they_are_rotated(kernels, rotary_dim, dtype):
    """Queries are the rotated ones times the factor of their position, in the dtype; what is stored
    is the same.
    """
    rows, kv_heads, dim = 40, 2, 38
    qkv = make_qkv(rows, 3, kv_heads, dim, dtype).flatten(1)
    positions, slots = torch.randint(0, POSITIONS, (rows,)), torch.randperm(12 * BLOCK)[:rows]
    plain = make_rotary(rotary_dim)
    scaled = replace(plain, q_factor=1 + 0.3 * torch.log1p(torch.arange(POSITIONS) // 64))
    pages, expected, without = (
        make_pages(Format.E4M3FN, "token", kv_heads, dim, 12) for _ in range(3)
    )
    q = kernels.rotate_store(qkv, scaled, positions, slots, pages)
    assert_equal(q, reference.rotate_store(qkv, scaled, positions, slots, expected))
    assert_same(pages, expected)
    rotated = kernels.rotate_store(qkv, plain, positions, slots, without)
    assert_equal(q, rotated * scaled.q_factor[positions].to(dtype)[:, None, None])
    assert not torch.equal(q.nan_to_num(), rotated.nan_to_num())
    assert_same(without, expected)
