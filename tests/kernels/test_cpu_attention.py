"""Attention of the compiled kernels against float64 arithmetic over what is stored, in every build
that runs here.

Pages start as NaN and NaN stands beside every token, so whatever is read beyond a row's own keys
shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.refusals import refuses

from freight.cache.groups import Pages
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.errors import KernelError
from freight.fp8.cast import decode, torch_dtype
from freight.fp8.formats import Format
from freight.kernels import reference
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.reference_set import REFERENCE
from freight.operands.attention import AttentionCall
from freight.operands.batch import ForwardBatch, Sequences
from freight.operands.kv_pages import KVPages

FP8 = (Format.E4M3FN, Format.E5M2, Format.E4M3FNUZ)
WIDE = (Format.FLOAT32, Format.FLOAT16, Format.BFLOAT16)
CACHES = [*((format, scales) for format in FP8 for scales in (None, "head", "channel", "token"))]
CACHES += [(Format.INT8, "token"), *((format, None) for format in WIDE)]
BUILDS = library.runnable()
NAN = {Format.E4M3FNUZ: 0x80, Format.E4M3FN: 0x7F, Format.E5M2: 0x7F, Format.INT8: 0x80}


@pytest.fixture(params=BUILDS)
def attention(request: pytest.FixtureRequest) -> Any:
    return CpuKernels(library.load(request.param)).attention


@dataclass(frozen=True)
class Cache:
    """Pages that hold one sequence per entry of `lengths`, in blocks of no order, NaN everywhere
    else.
    """

    pages: KVPages
    blocks: list[list[int]]
    lengths: list[int]

    def batch(self, rows: list[int], ends: list[int] | None = None) -> ForwardBatch:
        """The last `rows` positions before `ends` (default: all that is stored) of each sequence;
        0: not in it.
        """
        size = self.pages.block_size
        slices = [
            SequenceSlice([0] * count, end - count, (blocks,), Logits.NONE)
            for count, end, blocks in zip(rows, ends or self.lengths, self.blocks, strict=True)
            if count
        ]
        return prepare(slices, [Pages((0,), 0, None, size)])


def make_cache(
    format: Format,
    scales: str | None,
    lengths: list[int],
    heads: int,
    dim: int,
    block_size: int = 16,
    v_dim: int | None = None,
) -> Cache:
    torch.manual_seed(0)
    dims = (dim, v_dim or dim)
    counts = [-(-length // block_size) for length in lengths]
    shape = (sum(counts) + 2, block_size, heads)
    order = torch.randperm(shape[0]).tolist()
    blocks = [order[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(len(counts))]

    def page(dim: int) -> torch.Tensor:
        if format.is_quantized:
            return torch.full((*shape, dim), NAN[format], dtype=torch.uint8).view(
                torch_dtype(format)
            )
        return torch.full((*shape, dim), torch.nan, dtype=torch_dtype(format))

    scale: list[torch.Tensor | None] = [None, None]
    if scales == "head":
        scale = [
            (torch.rand(heads, 1) * 0.02 + 0.01).expand(heads, width).contiguous() for width in dims
        ]
    elif scales == "channel":
        scale = [torch.rand(heads, width) * 0.02 + 0.01 for width in dims]
    elif scales == "token":
        scale = [torch.full(shape, torch.nan, dtype=torch.bfloat16) for _ in dims]
    pages = KVPages(*map(page, dims), *scale, torch.zeros(2, dtype=torch.int64))
    cache = Cache(pages, blocks, lengths)
    k, v = (torch.randn(sum(lengths), heads, width) for width in dims)
    reference.store_kv(k, v, cache.batch(lengths).slots[0], pages)
    return cache


def exact(
    q: torch.Tensor,
    cache: Cache,
    batch: Sequences,
    window: int | None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention over the stored values, and sum of p * |v|: what errors are measured
    against.
    """
    outs, sizes = [], []
    rows = batch.query_starts.tolist()
    group = q.shape[1] // cache.pages.k.shape[2]
    for seq, (begin, end) in enumerate(pairwise(rows)):
        length = int(batch.context_lens[seq])
        blocks = batch.block_tables[seq, : -(-length // cache.pages.block_size)].long()
        stored = []
        for page, scale in (
            (cache.pages.k, cache.pages.k_scale),
            (cache.pages.v, cache.pages.v_scale),
        ):
            values = decode(torch.stack([page[block] for block in blocks.tolist()])).double()
            if scale is not None:
                values = values * (
                    scale[blocks].double()[..., None] if cache.pages.dynamic else scale.double()
                )
            stored.append(values.flatten(0, 1)[:length].repeat_interleave(group, 1).transpose(0, 1))
        k, v = stored
        i, j = torch.arange(length - (end - begin), length)[:, None], torch.arange(length)
        seen = (j <= i) if window is None else (j <= i) & (i - j < window)
        scores = q[begin:end].double().transpose(0, 1) @ k.transpose(1, 2) * q.shape[2] ** -0.5
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(i), 1)), -1)
        p = scores.softmax(-1)[..., :length]
        outs.append((p @ v).transpose(0, 1))
        sizes.append((p @ v.abs()).transpose(0, 1))
    return torch.cat(outs), torch.cat(sizes)


def check(
    attention: Any,
    cache: Cache,
    rows: list[int],
    group: int,
    window: int | None,
    dtype: torch.dtype,
    soft_cap: float | None = None,
    size_of_q: float = 1.0,
    sinks: torch.Tensor | None = None,
) -> None:
    batch = cache.batch(rows).sequences(0)
    _, _, heads, dim = cache.pages.k.shape
    q = (torch.randn(sum(rows), heads * group, dim) * size_of_q).to(dtype)
    out = attention(q, cache.pages, batch, AttentionCall(dim**-0.5, window, soft_cap, sinks))
    want, size = exact(q, cache, batch, window, soft_cap, sinks)
    assert out.dtype == dtype
    assert out.shape == want.shape == (*q.shape[:2], cache.pages.v.shape[3])
    tolerance = 4e-3 if dtype == torch.bfloat16 else 1e-5
    rounding = torch.finfo(dtype).eps / 2 * want.abs() + torch.finfo(dtype).tiny
    assert ((out.double() - want).abs() <= tolerance * size + rounding).all()


@pytest.mark.parametrize(("format", "scales"), CACHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 70])
def test_formats(attention, format, scales, dtype, window):
    cache = make_cache(format, scales, [200, 64, 65, 1], 2, 64)
    check(attention, cache, [40, 1, 65, 1], 4, window, dtype)


@pytest.mark.parametrize(("format", "scales"), CACHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("soft_cap", "size_of_q"), [(0.8, 1.0), (50.0, 1.0), (5.0, 1000.0)])
def test_soft_caps(attention, format, scales, dtype, soft_cap, size_of_q):
    """Scores far below the cap, about it, and far beyond it."""
    cache = make_cache(format, scales, [200, 64, 1], 2, 64)
    check(attention, cache, [40, 1, 1], 4, 70, dtype, soft_cap, size_of_q)


@pytest.mark.parametrize(("format", "scales"), CACHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (70, None), (None, 2.0)])
def test_sinks(attention, format, scales, dtype, window, soft_cap):
    """Far below the scores, about them, and so far above them that keys hardly count; over one
    split and over two.
    """
    cache = make_cache(format, scales, [1030, 64, 1], 2, 64)
    sinks = torch.tensor([-30.0, -1.0, 0.0, 1.0, 3.0, 30.0])
    check(attention, cache, [40, 1, 1], 3, window, dtype, soft_cap, sinks=sinks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_of_minus_infinity_changes_no_bit(attention, dtype):
    cache = make_cache(Format.E4M3FN, "token", [1100], 2, 40)
    q, batch = torch.randn(80, 4, 40).to(dtype), cache.batch([80]).sequences(0)
    want = attention(q, cache.pages, batch, AttentionCall(0.15))
    sinks = torch.tensor([-torch.inf, 8.0, -torch.inf, -torch.inf])
    out = attention(q, cache.pages, batch, AttentionCall(0.15, sinks=sinks))
    same = (out == want).flatten(2).all(-1)
    assert same.tolist() == [[True, False, True, True]] * 80


@pytest.mark.parametrize("dim", [32, 33, 40, 64, 80, 96, 100, 128, 192, 255, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize(
    "cache", [(Format.E4M3FN, "token"), (Format.INT8, "token"), (Format.BFLOAT16, None)]
)
def test_shapes(attention, cache, group, dim):
    heads = 3 if dim < 128 else 1
    for dtype in (torch.bfloat16, torch.float32):
        check(attention, make_cache(*cache, [70, 33], heads, dim), [9, 1], group, None, dtype)


@pytest.mark.parametrize("group", [1, 2, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("block_size", [8, 24, 64])
def test_groups_and_block_sizes(attention, group, block_size):
    """Contexts that end in the first slot of a block, in its last, and in between."""
    lengths = [block_size, 2 * block_size + 1, 3 * block_size - 1]
    cache = make_cache(Format.E5M2, None, lengths, 2, 48, block_size)
    for rows in ([1, 1, 1], [block_size, 2, 20]):
        check(attention, cache, rows, group, None, torch.bfloat16)


@pytest.mark.parametrize(("format", "scales"), CACHES)
@pytest.mark.parametrize(("dim", "v_dim"), [(192, 128), (40, 100), (33, 64)])
def test_values_of_another_width(attention, format, scales, dim, v_dim):
    cache = make_cache(format, scales, [1030, 65, 1], 2, dim, v_dim=v_dim)
    for dtype, window, soft_cap in (
        (torch.float32, None, None),
        (torch.bfloat16, 70, None),
        (torch.bfloat16, None, 2),
    ):
        check(attention, cache, [20, 1, 1], 3, window, dtype, soft_cap)


@pytest.mark.parametrize(
    ("format", "scales"),
    [(Format.E4M3FN, "token"), (Format.INT8, "token"), (Format.BFLOAT16, None)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("window", "rows", "block_size"), [(100, 1, 16), (64, 90, 16), (1500, 1, 24), (3, 200, 64)]
)
def test_no_key_before_the_window_is_read(
    attention, format, scales, dtype, window, rows, block_size
):
    """Blocks before the first tile that a window touches are block 0 in the table, which holds NaN
    alone.
    """
    length = 3000
    cache = make_cache(format, scales, [length], 2, 40, block_size)
    q, batch = torch.randn(rows, 4, 40).to(dtype), cache.batch([rows]).sequences(0)
    want = attention(q, cache.pages, batch, AttentionCall(0.15, window))
    first_tile = (length - rows - window + 1) // 64 * 64
    table = torch.zeros_like(batch.block_tables)
    kept = slice(first_tile // block_size, -(-length // block_size))
    table[0, kept] = torch.arange(1, kept.stop - kept.start + 1)

    def moved(page: torch.Tensor | None) -> torch.Tensor | None:
        """`page` with the blocks that stay, from block 1 on, and NaN in block 0."""
        if page is None:
            return None
        nan = page.view(torch.uint8).new_full(
            page[:1].view(torch.uint8).shape, NAN.get(format, 0xFF)
        )
        if page.itemsize == 2:
            nan = torch.full_like(page[:1], torch.nan)
        stay = page.view(torch.uint8)[batch.block_tables[0, kept].long()]
        parts = [nan.view(torch.uint8), stay]
        return torch.cat(parts).view(page.dtype)

    k, v, k_scale, v_scale = map(
        moved, (cache.pages.k, cache.pages.v, cache.pages.k_scale, cache.pages.v_scale)
    )
    assert k is not None
    assert v is not None
    pages = replace(cache.pages, k=k, v=v, k_scale=k_scale, v_scale=v_scale)
    assert decode(pages.k[0]).isnan().all()
    out = attention(q, pages, replace(batch, block_tables=table), AttentionCall(0.15, window))
    assert want.isfinite().all()
    assert torch.equal(out, want)


def test_float16_queries(attention):
    check(
        attention, make_cache(Format.E4M3FN, "channel", [130], 2, 64), [130], 2, None, torch.float16
    )


@pytest.mark.parametrize("window", [None, 1500])
def test_long_contexts_are_cut_and_merged(attention, window):
    cache = make_cache(Format.E4M3FN, "token", [3000, 1025, 1024], 2, 32)
    check(attention, cache, [1, 1, 1], 2, window, torch.float32)
    check(attention, cache, [50, 3, 1024], 2, window, torch.bfloat16)


@pytest.mark.parametrize("first", [1023, 1024])
def test_a_window_begins_at_the_edge_of_a_split(attention, first):
    """Keys are merged every 1024: the window has the last key of a split, or begins with the next."""
    cache = make_cache(Format.E4M3FN, "token", [1100], 2, 32)
    check(attention, cache, [1], 2, 1100 - first, torch.bfloat16)
    check(attention, cache, [1], 2, 1100 - first, torch.float32)


def test_one_key_tells_which_value(attention):
    """A query that matches one key far more than any other returns that key's value."""
    cache = make_cache(Format.FLOAT32, None, [300], 1, 64)
    pages = cache.pages
    k, v = (page[cache.blocks[0]].flatten(0, 1)[:300, 0] for page in (pages.k, pages.v))
    for position in (0, 63, 64, 200, 299):
        q = (k[position] * 1000)[None, None]
        assert torch.allclose(
            attention(q, pages, cache.batch([1]).sequences(0), AttentionCall(1.0))[0, 0],
            v[position],
            atol=1e-5,
        )


@settings(max_examples=12)
@given(
    stored=st.sampled_from(CACHES),
    cuts=st.sets(st.integers(1, 1299), max_size=12),
    window=st.sampled_from([None, 3, 64, 1100]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    soft_cap=st.sampled_from([None, 1.0]),
    v_dim=st.sampled_from([40, 24, 72, 80]),
    sink=st.sampled_from([None, -1.0, 8.0]),
)
@pytest.mark.parametrize("build", BUILDS)
def test_chunks_batches_and_threads_change_no_bit(
    build, stored, cuts, window, dtype, soft_cap, v_dim, sink
):
    sinks = None if sink is None else torch.arange(6) / 3 + sink
    attention = CpuKernels(library.load(build)).attention
    call = AttentionCall(0.15, window, soft_cap, sinks)
    cache = make_cache(*stored, [1300, 200, 7], 2, 40, v_dim=v_dim)
    q = torch.randn(1300, 6, 40).to(dtype)
    others = torch.randn(207, 6, 40).to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = attention(q, cache.pages, cache.batch([1300, 0, 0]).sequences(0), call)
        for threads, (begin, end) in enumerate(pairwise([0, *sorted(cuts), 1300])):
            torch.set_num_threads(threads % 4 + 1)
            count = end - begin
            alone = attention(
                q[begin:end],
                cache.pages,
                cache.batch([count, 0, 0], [end, 0, 0]).sequences(0),
                call,
            )
            assert torch.equal(alone, whole[begin:end])
            batch = cache.batch([count, 200, 7], [end, 200, 7]).sequences(0)
            together = attention(torch.cat([q[begin:end], others]), cache.pages, batch, call)
            assert torch.equal(together[:count], whole[begin:end])
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            last = attention(q[-1:], cache.pages, cache.batch([1, 0, 0]).sequences(0), call)
            assert torch.equal(last, whole[-1:])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_the_rows_that_see_it_alone(attention, part, value, dtype):
    cache, clean = (make_cache(Format.BFLOAT16, None, [100], 2, 64) for _ in range(2))
    slot = cache.batch([100]).slots[0][70]
    getattr(cache.pages, part).flatten(0, 1)[slot, 0] = value
    q = torch.rand(100, 4, 64).to(dtype)
    out, expected = (
        attention(q, c.pages, c.batch([100]).sequences(0), AttentionCall(0.125, 20))
        for c in (cache, clean)
    )
    sees = torch.zeros(100, 4, dtype=torch.bool)
    sees[70:90, :2] = True
    assert torch.equal(out[~sees], expected[~sees])
    assert not out[sees].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize(
    ("format", "code"),
    [
        (Format.INT8, 0x80),
        (Format.E4M3FN, 0x7F),
        (Format.E4M3FN, 0xFF),
        (Format.E4M3FNUZ, 0x80),
        (Format.E5M2, 0x7D),
    ],
)
def test_a_nan_among_codes_reaches_the_rows_that_see_it_alone(
    attention, format, code, part, dtype, soft_cap
):
    """Rows of a chunk and rows alone; the zeros and the largest codes stay what they are."""
    clean, cache = (make_cache(format, "token", [100], 2, 64) for _ in range(2))
    slot = cache.batch([100]).slots[0][70]
    for each in (clean, cache):
        codes = getattr(each.pages, part).view(torch.uint8).flatten(0, 1)
        codes[slot, 0, 6:10] = torch.tensor([0, 0x01, 0x7B, 0xFB], dtype=torch.uint8)
    codes[slot, 0, 5] = code
    q = torch.rand(100, 4, 64).to(dtype)
    call = AttentionCall(0.125, 20, soft_cap)
    out, expected = (
        attention(q, c.pages, c.batch([100]).sequences(0), call) for c in (cache, clean)
    )
    hit = torch.zeros(100, 4, 64, dtype=torch.bool)
    hit[70:90, :2, slice(None) if part == "k" else 5] = True
    assert torch.equal(out[~hit], expected[~hit])
    assert out[hit].isnan().all()
    for row in (69, 70, 89, 90, 99):
        alone = attention(
            q[row : row + 1], cache.pages, cache.batch([1], [row + 1]).sequences(0), call
        )
        assert torch.equal(alone.nan_to_num(), out[row : row + 1].nan_to_num())
        assert torch.equal(alone.isnan(), out[row : row + 1].isnan())


@pytest.mark.parametrize(("format", "scales"), CACHES)
@pytest.mark.parametrize("dims", [(64, 64), (80, 112), (33, 48)])
def test_a_row_alone_has_the_bits_of_a_chunk(attention, format, scales, dims):
    """Few rows are multiplied by other code than many, in some builds."""
    cache = make_cache(format, scales, [150], 2, dims[0], v_dim=dims[1])
    for group in (1, 2, 3, 4, 5, 6, 8):
        q = torch.randn(150, 2 * group, dims[0])
        call = AttentionCall(0.2)
        whole = attention(q, cache.pages, cache.batch([150]).sequences(0), call)
        for begin, end in ((149, 150), (127, 128), (64, 65), (140, 142), (62, 66)):
            rows = cache.batch([end - begin], [end]).sequences(0)
            assert torch.equal(attention(q[begin:end], cache.pages, rows, call), whole[begin:end])


def test_rows_of_q_may_lie_apart(attention):
    cache = make_cache(Format.E4M3FN, "head", [50], 2, 64)
    qkv = torch.randn(50, 8, 64)
    q, batch = qkv[:, :4], cache.batch([50]).sequences(0)
    a, b = (
        attention(rows, cache.pages, batch, AttentionCall(0.125)) for rows in (q, q.contiguous())
    )
    assert torch.equal(a, b)


def test_heads_too_wide_are_refused(attention):
    cache = make_cache(Format.E4M3FN, None, [3], 1, 1025)
    with pytest.raises(KernelError, match="at most 1024, not 1025"):
        attention(
            torch.zeros(3, 1, 1025), cache.pages, cache.batch([3]).sequences(0), AttentionCall(1.0)
        )


@pytest.mark.parametrize("format", [Format.FLOAT32, Format.BFLOAT16, Format.E4M3FN])
@pytest.mark.parametrize("rows", [1, 70])
def test_the_longest_context_that_its_type_can_say(attention, format, rows):
    """2^31 - 1 tokens in one block again and again: 2^30 tokens earlier all is the same, and so are
    the bits.
    """
    cache = make_cache(format, None, [2**14], heads=1, dim=16, block_size=2**14)
    q = torch.randn(rows, 2, 16).bfloat16()
    table = torch.tensor(cache.blocks, dtype=torch.int32).expand(1, 2**17).contiguous()
    outs = []
    for length in (2**31 - 1, 2**30 - 1):
        starts, lengths = (torch.tensor(ints, dtype=torch.int32) for ints in ([0, rows], [length]))
        batch = replace(
            cache.batch([rows]).sequences(0),
            query_starts=starts,
            context_lens=lengths,
            block_tables=table,
        )
        outs.append(attention(q, cache.pages, batch, AttentionCall(0.25, 100)))
    assert outs[0].isfinite().all()
    assert torch.equal(*outs)


@pytest.mark.parametrize(("rows", "ends"), [([1], [0]), ([3], [2]), ([2, 5], [9, 4])])
@pytest.mark.parametrize(
    "attend", [REFERENCE.attention, *(CpuKernels(library.load(b)).attention for b in BUILDS)]
)
def test_a_context_shorter_than_its_queries_is_refused(attend, rows, ends):
    cache = make_cache(Format.BFLOAT16, None, [16] * len(rows), heads=1, dim=8)
    batch = replace(
        cache.batch(rows).sequences(0), context_lens=torch.tensor(ends, dtype=torch.int32)
    )
    q = torch.randn(sum(rows), 2, 8).bfloat16()
    with refuses(KernelError, "more queries than keys"):
        attend(q, cache.pages, batch, AttentionCall(0.35))
