"""Attention of rows that see the keys after them, too, of the reference and of every build that runs
here.

The oracle is torch's scaled_dot_product_attention in float64, with a mask, over what is stored.
Pages start as NaN and NaN stands beside every token, so whatever is read beyond a sequence shows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.covering import covered
from tests.kernels.test_cpu_attention import CACHES, Cache, make_cache

from freight.fp8.cast import decode
from freight.fp8.formats import Format
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.reference_set import REFERENCE
from freight.operands.attention import AttentionCall
from freight.operands.batch import Sequences

LENGTHS = [65, 1, 1090, 64, 63, 200]  # about a tile of 64 keys; more keys than a split of 1024
STORED = [
    (Format.FLOAT32, None),
    (Format.FLOAT16, None),
    (Format.BFLOAT16, None),
    (Format.E4M3FN, "token"),
    (Format.E4M3FN, "channel"),
    (Format.INT8, "token"),
]


@pytest.fixture(params=["reference", *library.runnable()])
def attention(request: pytest.FixtureRequest) -> Any:
    if request.param == "reference":
        return REFERENCE.attention
    return CpuKernels(library.load(request.param)).attention


def whole(cache: Cache, which: list[int] | None = None) -> Sequences:
    """Every row of the sequences numbered `which`; None: of all."""
    chosen = range(len(cache.lengths)) if which is None else which
    rows = [length if i in chosen else 0 for i, length in enumerate(cache.lengths)]
    return cache.batch(rows).sequences(0)


def stored(cache: Cache, seq: int, part: str) -> torch.Tensor:
    """The true keys or values of a sequence, [heads, tokens, dim] float64."""
    page = getattr(cache.pages, part)
    scale = getattr(cache.pages, f"{part}_scale")
    blocks = cache.blocks[seq]
    values = decode(torch.stack([page[block] for block in blocks])).double()
    if scale is not None:
        factors = scale[blocks].double()[..., None] if cache.pages.dynamic else scale.double()
        values = values * factors
    return values.flatten(0, 1)[: cache.lengths[seq]].transpose(0, 1)


def mask(length: int, window: int | None) -> torch.Tensor:
    at = torch.arange(length)
    distance = (at[:, None] - at).abs()
    return distance < (length if window is None else window)


def exact(q: torch.Tensor, cache: Cache, window: int | None, scale: float) -> torch.Tensor:
    """scaled_dot_product_attention of each sequence alone, [rows, num_heads, v_dim] float64."""
    outs = []
    for seq, rows in enumerate(q.split(cache.lengths)):
        k, v = (stored(cache, seq, part)[None] for part in "kv")
        queries = rows.double().transpose(0, 1)[None]
        seen = mask(len(rows), window)
        out = F.scaled_dot_product_attention(
            queries, k, v, attn_mask=seen, scale=scale, enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def check(attention: Any, cache: Cache, group: int, window: int | None, dtype: torch.dtype) -> None:
    heads, dim = cache.pages.k.shape[2:]
    scale = dim**-0.5
    q = torch.randn(sum(cache.lengths), heads * group, dim).to(dtype)
    out = attention(q, cache.pages, whole(cache), AttentionCall(scale, window, causal=False))
    want = exact(q, cache, window, scale)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}[dtype]
    assert out.dtype == dtype
    assert (out.double() - want).abs().max() <= tolerance * max(1.0, want.abs().max().item())


@pytest.mark.parametrize(
    ("cache", "window", "group", "dtype"),
    covered(
        CACHES,
        (None, 1, 33, 64, 513),
        (1, 3, 8),
        (torch.float32, torch.float16, torch.bfloat16),
    ),
)
def test_both_sides(attention, cache, window, group, dtype):
    check(attention, make_cache(*cache, LENGTHS, 2, 64), group, window, dtype)


@pytest.mark.parametrize(("dim", "v_dim"), [(16, 16), (33, 48), (192, 128), (256, 256)])
@pytest.mark.parametrize("window", [None, 70])
def test_other_widths(attention, dim, v_dim, window):
    cache = make_cache(Format.E4M3FN, "token", [130, 65, 1030], 1, dim, v_dim=v_dim)
    for dtype in (torch.float32, torch.bfloat16):
        check(attention, cache, 4, window, dtype)


@pytest.mark.parametrize("window", [1025, 1024, 1023, 3000])
def test_windows_about_a_split(attention, window):
    cache = make_cache(Format.BFLOAT16, None, [2100, 70], 1, 16)
    check(attention, cache, 2, window, torch.float32)


@pytest.mark.parametrize(
    ("cache", "window", "dtype"),
    covered(STORED, (None, 3, 64, 1100), (torch.float32, torch.bfloat16)),
)
def test_neither_other_sequences_nor_threads_change_a_bit(attention, cache, window, dtype):
    made = make_cache(*cache, LENGTHS, 2, 40)
    q = torch.randn(sum(LENGTHS), 6, 40).to(dtype)
    call = AttentionCall(0.15, window, causal=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = attention(q, made.pages, whole(made), call).split(LENGTHS)
        for threads in (2, 3):
            torch.set_num_threads(threads)
            again = attention(q, made.pages, whole(made), call).split(LENGTHS)
            for seq, rows in enumerate(q.split(LENGTHS)):
                alone = attention(rows, made.pages, whole(made, [seq]), call)
                assert torch.equal(alone, together[seq])
                assert torch.equal(again[seq], together[seq])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_the_rows_that_see_it_alone(attention, part, value, dtype):
    cache, clean = (make_cache(Format.BFLOAT16, None, [150], 2, 64) for _ in range(2))
    slot = cache.batch([150]).slots[0][70]
    getattr(cache.pages, part).flatten(0, 1)[slot, 0] = value
    q = torch.rand(150, 4, 64).to(dtype)
    call = AttentionCall(0.125, 20, causal=False)
    out, expected = (attention(q, c.pages, whole(c), call) for c in (cache, clean))
    sees = torch.zeros(150, 4, dtype=torch.bool)
    sees[51:90, :2] = True
    assert torch.equal(out[~sees], expected[~sees])
    assert not out[sees].isfinite().any()


def test_soft_caps_and_sinks(attention):
    """The last row of a sequence sees what it sees causally, and so has the same bits."""
    cache = make_cache(Format.E4M3FN, "token", [1090, 64], 2, 40)
    q = torch.randn(1154, 6, 40).bfloat16()
    sinks = torch.tensor([-30.0, -1.0, 0.0, 1.0, 3.0, 30.0])
    for window, soft_cap in ((None, None), (70, None), (None, 2.0)):
        call = AttentionCall(0.15, window, soft_cap, sinks)
        causal = attention(q, cache.pages, whole(cache), call)
        out = attention(q, cache.pages, whole(cache), replace(call, causal=False))
        for last in (1089, 1153):
            assert torch.equal(out[last], causal[last])
        assert not torch.equal(out, causal)


def test_a_part_of_a_sequence_is_a_mistake(attention):
    cache = make_cache(Format.BFLOAT16, None, [70], 1, 16)
    part = cache.batch([20]).sequences(0)
    with pytest.raises(AssertionError, match="later keys"):
        attention(torch.zeros(20, 2, 16), cache.pages, part, AttentionCall(0.25, causal=False))
