"""Centered keys: attention adds back what was subtracted, in every kernel set of this machine.

Keys are stored as R(p)(k - b); what is compared with is float64 attention over R(p)k made of what
is stored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from freight.cache.groups import Pages
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.fp8.cast import decode, torch_dtype
from freight.fp8.formats import Format
from freight.kernels import reference
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.operands.attention import AttentionCall
from freight.operands.batch import Sequences
from freight.operands.kv_pages import KeyCenter, KVPages

HEADS, GROUP = 3, 2
SETS = ["reference", *library.runnable()]
BLOCK_SIZE = 16
BIAS = 100.0


@pytest.fixture(params=SETS)
def attention(request: pytest.FixtureRequest) -> Any:
    return (
        reference.attention
        if request.param == "reference"
        else CpuKernels(library.load(request.param)).attention
    )


def angles(positions: int, dim: int, base: float = 1e4) -> torch.Tensor:
    return torch.outer(
        torch.arange(positions, dtype=torch.float64), base ** (-torch.arange(0, dim, 2) / dim)
    )


def make_pages(
    format: Format, scales: str | None, length: int, dim: int, rotary_dim: int | None = None
) -> KVPages:
    """One sequence in blocks 1, 2, … of the pages; b is `BIAS` on some pairs of heads 0 and 1."""
    torch.manual_seed(0)
    rotary_dim = rotary_dim or dim
    num_blocks = -(-length // BLOCK_SIZE) + 1
    shape = (num_blocks, BLOCK_SIZE, HEADS, dim)
    stored = [torch.zeros(shape, dtype=torch_dtype(format)) for _ in "kv"]
    scale: list[torch.Tensor | None] = [None, None]
    if scales == "channel":
        scale = [torch.rand(HEADS, dim) * 0.02 + 0.01 for _ in "kv"]
    elif scales == "token":
        scale = [torch.full(shape[:3], torch.nan, dtype=torch.bfloat16) for _ in "kv"]
    b = torch.zeros(HEADS, dim)
    b[0, [1, rotary_dim // 2 + 1, rotary_dim // 2 - 1]] = BIAS
    b[1, [0, 1, 3]] = torch.tensor([BIAS, -BIAS, BIAS / 2])
    turns = angles(length, rotary_dim)
    cos, sin = turns.cos().float(), turns.sin().float()
    center = KeyCenter.of(b, KeyCenter.angle_tiles(cos), KeyCenter.angle_tiles(sin))
    result = KVPages(*stored, *scale, torch.zeros(2, dtype=torch.int64), center)
    k, v = (torch.randn(length, HEADS, dim) for _ in "kv")
    reference.store_kv(reference.rotate(k, cos, sin), v, torch.arange(length) + BLOCK_SIZE, result)
    return result


def batch_of(*rows: tuple[int, int]) -> Sequences:
    """Slices (first position, end) of the sequence, each as a sequence of its own in the batch."""
    return prepare(
        [
            SequenceSlice(
                [0] * (end - begin), begin, (range(1, -(-end // BLOCK_SIZE) + 1),), Logits.NONE
            )
            for begin, end in rows
        ],
        [Pages((0,), 0, None, BLOCK_SIZE)],
    ).sequences(0)


def exact(
    q: torch.Tensor,
    pages: KVPages,
    begin: int,
    window: int | None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention of rows at `begin`, …; and sum of p * |v|."""
    length, dim = begin + len(q), q.shape[2]
    sides = []
    for page, scale in ((pages.k, pages.k_scale), (pages.v, pages.v_scale)):
        values = decode(page[1:]).double()
        if scale is not None:
            values = values * (scale[1:].double()[..., None] if pages.dynamic else scale.double())
        sides.append(values.flatten(0, 1)[:length])
    k, v = sides
    assert pages.k_center is not None
    half = pages.k_center.cos.shape[1]
    first, second, rest = pages.k_center.b.double().tensor_split((half, 2 * half), -1)
    # The tables hold float32: what a kernel can know of an angle.
    cos, sin = (
        table(angles(length, 2 * half)).float().double()[:, None]
        for table in (torch.cos, torch.sin)
    )
    turned = (first * cos - second * sin, second * cos + first * sin, rest.expand(length, -1, -1))
    k = k + torch.cat(turned, -1)
    k, v = (x.repeat_interleave(GROUP, 1).transpose(0, 1) for x in (k, v))
    i, j = torch.arange(begin, length)[:, None], torch.arange(length)
    seen = (j <= i) if window is None else (j <= i) & (i - j < window)
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * dim**-0.5
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
    p = scores.softmax(-1)[..., :length]
    return (p @ v).transpose(0, 1), (p @ v.abs()).transpose(0, 1)


@pytest.mark.parametrize(
    ("format", "scales"),
    [
        (Format.E4M3FN, "channel"),
        (Format.E4M3FN, "token"),
        (Format.E4M3FNUZ, "channel"),
        (Format.E5M2, None),
        (Format.BFLOAT16, None),
        (Format.FLOAT32, None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (70, None), (70, 2.0)])
def test_scores_are_those_of_the_whole_keys(attention, format, scales, dtype, window, soft_cap):
    length, dim = 200, 64
    pages = make_pages(format, scales, length, dim)
    q = (torch.randn(150, HEADS * GROUP, dim) * 0.05).to(dtype)
    out = attention(q, pages, batch_of((50, 200)), AttentionCall(dim**-0.5, window, soft_cap))
    want, size = exact(q, pages, 50, window, soft_cap)
    tolerance = 4e-3 if dtype == torch.bfloat16 else 2e-5
    assert (
        (out.double() - want).abs() <= tolerance * size + torch.finfo(dtype).eps * want.abs()
    ).all()
    without = attention(
        q,
        replace(pages, k_center=None),
        batch_of((50, 200)),
        AttentionCall(dim**-0.5, window, soft_cap),
    )
    assert (without.double() - want).abs().max() > 0.1


@pytest.mark.parametrize(
    ("format", "scales"), [(Format.E4M3FN, "channel"), (Format.E4M3FN, "token")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 70])
def test_sinks_count_as_they_do_beside_whole_keys(attention, format, scales, dtype, window):
    """A center moves all scores of a row alike where its pairs hardly turn, which a softmax without
    sinks forgives.
    """
    length, dim = 200, 64
    pages = make_pages(format, scales, length, dim)
    q = (torch.randn(150, HEADS * GROUP, dim) * 0.05).to(dtype)
    sinks = torch.tensor([5.0, 6.0, 5.0, 8.0, 5.0, 4.0])
    out = attention(q, pages, batch_of((50, 200)), AttentionCall(dim**-0.5, window, sinks=sinks))
    want, size = exact(q, pages, 50, window, sinks=sinks)
    tolerance = 4e-3 if dtype == torch.bfloat16 else 2e-5
    assert (
        (out.double() - want).abs() <= tolerance * size + torch.finfo(dtype).eps * want.abs()
    ).all()
    without = exact(q, pages, 50, window)[0]
    assert (without - want).abs().amax((0, 2)).min() > 0.1


@pytest.mark.parametrize(
    ("dim", "rotary_dim"),
    [(16, 16), (40, 40), (80, 80), (128, 128), (40, 16), (80, 20), (33, 8), (256, 64)],
)
def test_shapes(attention, dim, rotary_dim):
    pages = make_pages(Format.E4M3FN, "channel", 130, dim, rotary_dim)
    q = torch.randn(7, HEADS * GROUP, dim) * 0.05
    out = attention(q, pages, batch_of((123, 130)), AttentionCall(dim**-0.5))
    want, size = exact(q, pages, 123, None)
    assert ((out.double() - want).abs() <= 2e-5 * size + 1e-6).all()


@pytest.mark.parametrize(("rotary_dim", "dtype"), [(64, torch.float32), (16, torch.bfloat16)])
def test_a_row_is_the_same_in_any_batch(attention, rotary_dim, dtype):
    length, dim = 1100, 64  # two key splits
    pages = make_pages(Format.E4M3FN, "channel", length, dim, rotary_dim)
    q = torch.randn(length, HEADS * GROUP, dim).to(dtype)
    whole = attention(q, pages, batch_of((0, length)), AttentionCall(dim**-0.5))
    for rows in ([(1099, 1100)], [(1000, 1063), (20, 21), (0, 5)]):
        part = attention(
            torch.cat([q[a:b] for a, b in rows]), pages, batch_of(*rows), AttentionCall(dim**-0.5)
        )
        assert torch.equal(part, torch.cat([whole[a:b] for a, b in rows]))


def test_only_pairs_in_use_are_kept():
    center = make_pages(Format.FLOAT32, None, 70, 64).k_center
    assert center is not None
    assert center.pairs.shape == (HEADS, 3)
    assert [
        sorted(row[:count].tolist()) for row, count in zip(center.pairs, (2, 3, 0), strict=True)
    ] == [
        [1, 31],
        [0, 1, 3],
        [],
    ]
    assert center.cos.shape == center.sin.shape == (2, 32, 64)
    assert not center.parts[:, 2].any()
