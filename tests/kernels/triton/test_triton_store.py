"""Rotate-and-store against the reference: the same bytes, scales and counts, slot by slot.

On a GPU a rotation may be contracted into fused multiply-adds, so there what is rotated is compared
as numbers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from freight.fp8.cast import decode, torch_dtype
from freight.fp8.formats import Format
from freight.kernels import reference
from freight.kernels.triton import store
from freight.kernels.triton.formats import current_target
from freight.operands.kv_pages import KeyCenter, KVPages
from freight.operands.rotary import Rotary

BLOCK, NUM_BLOCKS, POSITIONS = 8, 9, 50
FP8 = [format for format in Format if format.is_fp8]
CACHES = [(format, kind) for format in FP8 for kind in ("unit", "static", "token")]
CACHES += [(format, "unit") for format in (Format.BFLOAT16, Format.FLOAT16, Format.FLOAT32)]


def make_pages(
    format: Format, scales: str, heads: int, dim: int, device: str, v_dim: int | None = None
) -> KVPages:
    shapes = [(NUM_BLOCKS, BLOCK, heads, width) for width in (dim, v_dim or dim)]
    kept: list[torch.Tensor | None] = [None, None]
    if scales == "static":
        generator = torch.Generator().manual_seed(5)
        kept = [(torch.rand(s[2:], generator=generator) * 0.02 + 1e-3).to(device) for s in shapes]
    elif scales == "token":
        kept = [torch.full(shapes[0][:3], -1.0, dtype=torch.bfloat16, device=device) for _ in "kv"]
    pages = [torch.zeros(shape, device=device).to(torch_dtype(format)) for shape in shapes]
    return KVPages(*pages, *kept, torch.zeros(2, dtype=torch.int64, device=device))


def assert_same(got: KVPages, expected: KVPages) -> None:
    for a, b in ((got.k, expected.k), (got.v, expected.v)):
        left, right = decode(a), decode(b)
        assert torch.equal(left.isnan(), right.isnan())
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.itemsize]
        assert torch.equal(a.view(bits)[~left.isnan()], b.view(bits)[~left.isnan()])
    for a, b in ((got.k_scale, expected.k_scale), (got.v_scale, expected.v_scale)):
        assert (a is None and b is None) or torch.equal(a, b)
    assert got.counters.tolist() == expected.counters.tolist()


def make_rotary(
    dim: int, device: str, norms: tuple[torch.Tensor, torch.Tensor] | None = None
) -> Rotary:
    angles = torch.outer(torch.arange(POSITIONS).float(), 1e4 ** -torch.linspace(0, 1, dim // 2))
    return Rotary(angles.cos().to(device), angles.sin().to(device), norms, 1e-6)


def rotate_store(qkv: torch.Tensor, *arguments: torch.Tensor | Rotary | KVPages) -> torch.Tensor:
    return store.rotate_store(current_target(), qkv.flatten(1), *arguments)


RARE = [
    (Format.E4M3FNUZ, "unit"),
    (Format.E4M3FNUZ, "static"),
    (Format.E5M2, "unit"),
    (Format.FLOAT16, "unit"),
]
OTHER_SHAPE = (torch.float32, 1, 40)
WIDTHS = [(Format.E4M3FN, "static"), (Format.E4M3FN, "token"), (Format.FLOAT32, "unit")]


@pytest.mark.parametrize(
    ("format", "scales", "dtype", "heads", "dim"),
    [
        *((*cache, torch.bfloat16, 2, 32) for cache in CACHES if cache not in RARE),
        *(pytest.param(*cache, torch.bfloat16, 2, 32, marks=pytest.mark.slow) for cache in RARE),
        (Format.E4M3FN, "token", *OTHER_SHAPE),
        (Format.E5M2, "static", *OTHER_SHAPE),
        (Format.FLOAT32, "unit", *OTHER_SHAPE),
    ],
)
def test_stored_bytes_are_the_reference_s(format, scales, dtype, heads, dim, device):
    torch.manual_seed(0)
    rows = 7
    qkv = (torch.randn(rows, 3 * heads, dim) * 10 ** torch.randn(rows, 1, 1)).to(dtype).to(device)
    qkv[3, :, 1], qkv[4, :, 2], qkv[5] = torch.inf, torch.nan, 0.0
    slots, positions = (
        torch.randperm(BLOCK * NUM_BLOCKS)[:rows],
        torch.randint(0, POSITIONS, (rows,)),
    )
    slots[2] = slots[6] = -1
    rotary = make_rotary(dim, device)
    if device != "cpu":
        rotary = replace(rotary, cos=torch.ones_like(rotary.cos), sin=torch.zeros_like(rotary.sin))
    expected, got = (make_pages(format, scales, heads, dim, device) for _ in range(2))
    arguments = (qkv, rotary, positions.to(device), slots.to(device))
    wanted, q = (
        reference.rotate_store(qkv.flatten(1), *arguments[1:], expected),
        rotate_store(*arguments, got),
    )
    assert_same(got, expected)
    assert torch.equal(q.isnan(), wanted.isnan())
    assert torch.equal(q[~q.isnan()], wanted[~wanted.isnan()])
    nans, clipped = got.counters.tolist()
    assert nans >= 2 * heads
    assert (clipped > 0) == format.is_fp8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_and_a_center(dtype, device):
    """A norm's root and sum differ in their last bits: as numbers."""
    torch.manual_seed(1)
    rows, heads, kv_heads, dim = 5, 3, 2, 24
    qkv = (torch.randn(rows, heads + 2 * kv_heads, dim) * 3).to(dtype).to(device)
    weights = (torch.rand(2, dim) + 0.5).to(dtype).to(device)
    rotary = make_rotary(dim, device, (weights[0], weights[1]))
    positions, slots = (
        torch.randint(0, POSITIONS, (rows,), device=device),
        torch.arange(rows, device=device) + 5,
    )
    tables = (KeyCenter.angle_tiles(table) for table in (rotary.cos, rotary.sin))
    center = KeyCenter.of(torch.randn(kv_heads, dim).to(device), *tables)
    pages = make_pages(Format.FLOAT32, "unit", kv_heads, dim, device)
    expected, got = (
        replace(pages, k=pages.k.clone(), v=pages.v.clone(), k_center=center) for _ in range(2)
    )
    wanted = reference.rotate_store(qkv.flatten(1), rotary, positions, slots, expected)
    bound = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    torch.testing.assert_close(rotate_store(qkv, rotary, positions, slots, got), wanted, **bound)
    torch.testing.assert_close(got.k, expected.k, **bound)
    assert torch.equal(got.v, expected.v)


@pytest.mark.parametrize(
    ("format", "scales", "rotary_dim", "k_dim", "v_dim"),
    [
        *((*cache, 8, 24, 16) for cache in WIDTHS),
        (Format.E4M3FN, "token", 0, 16, 24),
        (Format.E4M3FN, "static", 24, 24, 8),
        *(pytest.param(*WIDTHS[i], 0, 16, 24, marks=pytest.mark.slow) for i in (0, 2)),
        *(pytest.param(*WIDTHS[i], 24, 24, 8, marks=pytest.mark.slow) for i in (1, 2)),
    ],
)
def test_partial_rotary_and_values_of_another_width(
    format, scales, rotary_dim, k_dim, v_dim, device
):
    """Only the first rotary_dim channels turn, in pairs (i, i + rotary_dim / 2); the others pass,
    to the bit.
    """
    torch.manual_seed(2)
    rows, heads, kv_heads = 5, 3, 2
    qkv = (torch.randn(rows, heads * k_dim + kv_heads * (k_dim + v_dim)) * 3).bfloat16().to(device)
    qkv[0, :k_dim] = -0.0  # kept where nothing turns
    slots, positions = (
        torch.tensor([3, 40, -1, 4, 71]).to(device),
        torch.randint(0, POSITIONS, (rows,)).to(device),
    )
    rotary = make_rotary(rotary_dim, device)
    if device != "cpu":
        rotary = replace(rotary, cos=torch.ones_like(rotary.cos), sin=torch.zeros_like(rotary.sin))
    expected, got = (make_pages(format, scales, kv_heads, k_dim, device, v_dim) for _ in range(2))
    wanted = reference.rotate_store(qkv, rotary, positions, slots, expected)
    q = store.rotate_store(current_target(), qkv, rotary, positions, slots, got)
    assert q.shape == (rows, heads, k_dim)
    assert torch.equal(q.view(torch.int16), wanted.view(torch.int16))
    assert_same(got, expected)


def test_float32_weights_of_head_norms_and_a_center_with_partial_rotary(device):
    torch.manual_seed(3)
    rows, heads, kv_heads, k_dim, v_dim = 4, 2, 1, 24, 8
    qkv = (torch.randn(rows, heads * k_dim + kv_heads * (k_dim + v_dim)) * 3).bfloat16().to(device)
    weights = (1 + torch.randn(2, k_dim) * 0.2).to(device)
    rotary = make_rotary(8, device, (weights[0], weights[1]))
    positions, slots = (
        torch.randint(0, POSITIONS, (rows,), device=device),
        torch.arange(rows, device=device) + 5,
    )
    b = torch.randn(kv_heads, k_dim).to(device)
    unused = torch.zeros(0, device=device)
    pages = make_pages(Format.FLOAT32, "unit", kv_heads, k_dim, device, v_dim)
    pages = replace(pages, k_center=KeyCenter(b, unused, unused, unused, unused))
    expected, got = (replace(pages, k=pages.k.clone(), v=pages.v.clone()) for _ in range(2))
    wanted = reference.rotate_store(qkv, rotary, positions, slots, expected)
    q = store.rotate_store(current_target(), qkv, rotary, positions, slots, got)
    # a root may differ in its last bit, which seldom changes what is rounded to 16 bits; another
    # order of rounding does
    assert (q == wanted).float().mean() > 0.97
    assert (got.k == expected.k).float().mean() > 0.97
    assert torch.equal(got.v, expected.v)


@pytest.mark.parametrize(
    ("scales", "turns"),
    [("static", 2), ("token", 3), pytest.param("token", 4, marks=pytest.mark.slow)],
)
def test_many_rows_are_stored_as_few_are(scales, turns, monkeypatch, device):
    """By programs of one head, and of several: the last may have fewer, and one may have heads of
    q, k and v.
    """
    torch.manual_seed(1)
    monkeypatch.setattr(store, "TURNS", turns)
    qkv, positions = torch.randn(17, 5, 16).bfloat16().to(device), torch.arange(17, device=device)
    slots = torch.randperm(BLOCK * NUM_BLOCKS)[:17].to(device)
    few, many = (make_pages(Format.E4M3FN, scales, 2, 16, device) for _ in range(2))
    q = rotate_store(qkv, make_rotary(16, device), positions, slots, few)
    monkeypatch.setattr(store, "FEW_ROWS", 0)
    assert torch.equal(rotate_store(qkv, make_rotary(16, device), positions, slots, many), q)
    assert_same(many, few)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rotary_dim", [0, 8, 24])
def test_the_factor_of_queries(rotary_dim, dtype, device):
    """It multiplies queries, unrotated channels too, once they are rounded; what is stored does not
    depend on it.
    """
    torch.manual_seed(4)
    rows, heads, kv_heads, k_dim, v_dim = 6, 3, 2, 24, 16
    qkv = (torch.randn(rows, heads * k_dim + kv_heads * (k_dim + v_dim)) * 3).to(dtype).to(device)
    slots, positions = torch.arange(rows, device=device) + 5, (torch.arange(rows) * 9).to(device)
    rotary = replace(
        make_rotary(rotary_dim, device), q_factor=torch.linspace(1, 2, POSITIONS, device=device)
    )
    if device != "cpu":
        rotary = replace(rotary, cos=torch.ones_like(rotary.cos), sin=torch.zeros_like(rotary.sin))
    expected, got = (
        make_pages(Format.E4M3FN, "token", kv_heads, k_dim, device, v_dim) for _ in range(2)
    )
    wanted = reference.rotate_store(qkv, rotary, positions, slots, expected)
    q = store.rotate_store(current_target(), qkv, rotary, positions, slots, got)
    assert torch.equal(q, wanted)
    assert_same(got, expected)
    plain = reference.rotate_store(qkv, replace(rotary, q_factor=None), positions, slots, expected)
    assert (q[1:] != plain[1:]).float().mean() > 0.9
    assert_same(got, expected)


def test_queries_alone_are_those_beside_keys(device):
    """Without slots: the heads of q, for keys that another layer has stored; the pages keep what
    they hold.
    """
    torch.manual_seed(0)
    rows, heads, kv_heads, dim = 3, 3, 2, 32
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim).bfloat16().to(device)
    weight = torch.rand(dim).bfloat16().to(device)
    rotary, positions = (
        make_rotary(dim, device, (weight, weight)),
        torch.arange(rows, device=device) % POSITIONS,
    )
    pages, untouched = (make_pages(Format.E4M3FN, "token", kv_heads, dim, device) for _ in range(2))
    nowhere = torch.full_like(positions, -1)
    q = rotate_store(qkv[:, :heads].contiguous(), rotary, positions, None, pages)
    assert_same(pages, untouched)
    assert torch.equal(q, rotate_store(qkv, rotary, positions, nowhere, pages))
