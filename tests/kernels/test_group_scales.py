"""`group` scales of latents: what is stored, and attention over it, of the reference and of every
build that runs here.

A latent's codes have a scale for 128 channels; what is rotated is bfloat16. Pages start as NaN, so
whatever is read beyond a row's own keys shows.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from freight.cache.groups import Pages
from freight.cache.pages import allocate_pages
from freight.cache.spec import LayerKVSpec
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.fp8.cast import decode, encode
from freight.fp8.formats import Format, Granularity, ScaleKind
from freight.kernels import reference
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.interface import KernelSet
from freight.kernels.reference_set import REFERENCE
from freight.operands.attention import AttentionCall
from freight.operands.batch import Sequences
from freight.operands.kv_pages import KVPages, read_slots
from freight.operands.rotary import Rotary
from freight.settings.engine import PageLayout

FORMATS = (Format.E4M3FN, Format.INT8, Format.E4M3FNUZ)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDTHS = [(64, 512), (8, 128), (18, 256), (0, 128)]  # rotated, latent
ROWS, BLOCKS, POSITIONS = 60, 14, 300


@pytest.fixture(params=["reference", *library.runnable()])
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    return REFERENCE if request.param == "reference" else CpuKernels(library.load(request.param))


def empty_pages(
    format: Format,
    rotated: int,
    latent: int,
    block_size: int = 7,
    layout: PageLayout = PageLayout.TOKENS,
) -> KVPages:
    """Full of bytes that are NaN as bfloat16, and as E4M3FN."""
    spec = LayerKVSpec(format, Granularity.GROUP, 1, rotated + latent, latent, v_in_k=True)
    pages = allocate_pages(spec, layout, None, BLOCKS * 8 // block_size + 2, block_size, "cpu")
    tensors = (pages.k, pages.rotated, pages.k_scale)
    size = sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )  # type: ignore[union-attr]
    assert size == (BLOCKS * 8 // block_size + 2) * block_size * spec.bytes_per_token
    for tensor in tensors:
        assert tensor is not None
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0xFF)
    return pages


def rotary_of(rotated: int) -> Rotary:
    angles = torch.outer(
        torch.arange(POSITIONS).float(), 1e4 ** -torch.linspace(0, 1, rotated // 2)
    )
    return Rotary(angles.cos(), angles.sin(), None, 1e-6)


def projected(rows: int, heads: int, rotated: int, latent: int, dtype: torch.dtype) -> Tensor:
    """q and one key: of all magnitudes, with NaN, infinities, and groups of zeros."""
    torch.manual_seed(0)
    x = torch.randn(rows, heads + 1, rotated + latent).mul(
        10.0 ** torch.randint(-4, 4, (rows, 1, rotated + latent))
    )
    for value in (torch.nan, -torch.inf, -0.0):
        x[torch.rand(x.shape) < 0.005] = value
    x[1::4, -1, -128:] = 0.0
    return x.flatten(1).to(dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
    )


def assert_same(got: KVPages, want: KVPages, slots: Tensor) -> None:
    """Bit for bit, but that a NaN is a NaN."""
    for one, other in zip(
        (got.k, got.rotated, got.k_scale), (want.k, want.rotated, want.k_scale), strict=True
    ):
        assert one is not None
        assert other is not None
        one, other = read_slots(one, slots), read_slots(other, slots)
        nan = decode(other).isnan()
        assert torch.equal(decode(one).isnan(), nan)
        assert torch.equal(bits(one)[~nan], bits(other)[~nan])
    assert got.counters.tolist() == want.counters.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rotated", "latent"), WIDTHS)
def test_what_is_stored(kernels, format, rotated, latent, dtype):
    """By its definition, group by group; and the bits of chunks, other layouts and block sizes are
    the same.
    """
    x, rotary = projected(ROWS, 3, rotated, latent, dtype), rotary_of(rotated)
    slots, positions = torch.randperm(BLOCKS * 7)[:ROWS], torch.randint(0, POSITIONS, (ROWS,))
    slots[::5] = -1
    kept = slots >= 0
    pages = empty_pages(format, rotated, latent)
    q = kernels.rotate_store(x, rotary, positions, slots, pages)
    key = reference.rotate(
        x[kept].unflatten(1, (4, -1))[:, 3:],
        rotary.cos[positions[kept]],
        rotary.sin[positions[kept]],
    )
    first, codes = key[..., :rotated], key[..., rotated:].float()
    assert pages.rotated is not None
    assert pages.k_scale is not None
    torch.testing.assert_close(
        read_slots(pages.rotated, slots[kept]), first.bfloat16(), rtol=0, atol=0, equal_nan=True
    )
    clipped = 0
    for group in range(latent // 128):
        channels = slice(128 * group, 128 * (group + 1))
        values, scale = (
            codes[..., channels],
            read_slots(pages.k_scale, slots[kept])[..., group : group + 1].float(),
        )
        largest = values.abs().masked_fill(~values.isfinite(), 0.0).amax(-1, keepdim=True)
        assert torch.equal(scale, (largest / format.max).clamp(min=2.0**-126).bfloat16().float())
        stored, wanted = (
            decode(read_slots(pages.k, slots[kept]))[..., channels],
            decode(encode(values, scale, format)),
        )
        torch.testing.assert_close(stored, wanted, rtol=0, atol=0, equal_nan=True)
        clipped += int(values.isinf().sum())
    assert pages.counters.tolist() == [int(key.isnan().sum()), clipped]
    for block_size, layout in (
        (7, PageLayout.HEADS),
        (16, PageLayout.BLOCKS),
        (1, PageLayout.TOKENS),
    ):
        other = empty_pages(format, rotated, latent, block_size, layout)
        for part in (slice(0, 1), slice(1, 38), slice(38, ROWS)):
            chunk = kernels.rotate_store(x[part], rotary, positions[part], slots[part], other)
            assert torch.equal(bits(chunk), bits(q[part]))
        assert_same(other, pages, slots[kept])


def test_queries_alone(kernels):
    pages, rotary = empty_pages(Format.E4M3FN, 8, 128), rotary_of(8)
    q, positions = torch.randn(5, 3 * 136).bfloat16(), torch.arange(5)
    got = kernels.rotate_store(q, rotary, positions, None, pages)
    assert torch.equal(got, reference.rotate_queries(q.unflatten(1, (3, 136)), rotary, positions))
    assert not pages.counters.any()


LENGTHS = [1, 40, 1200, 17]
STEPS = ([1, 1, 1, 0], [1, 9, 50, 17])


def stored_sequences(
    format: Format,
    rotated: int,
    latent: int,
    block_size: int,
    layout: PageLayout = PageLayout.TOKENS,
) -> tuple[KVPages, list[list[int]]]:
    """One sequence for each of LENGTHS in blocks of no order, whose groups differ by powers of ten;
    all else is NaN.
    """
    torch.manual_seed(0)
    spec = LayerKVSpec(format, Granularity.GROUP, 1, rotated + latent, latent, v_in_k=True)
    counts = [-(-length // block_size) for length in LENGTHS]
    pages = allocate_pages(spec, layout, None, sum(counts) + 2, block_size, "cpu")
    for tensor in (pages.k, pages.rotated, pages.k_scale):
        assert tensor is not None
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0xFF)
    order = iter(torch.randperm(sum(counts) + 2).tolist())
    blocks = [[next(order) for _ in range(count)] for count in counts]
    spread = 10.0 ** torch.linspace(-1.5, 0.5, latent // 128).repeat_interleave(128)
    key = torch.randn(sum(LENGTHS), 1, rotated + latent) * torch.cat((torch.ones(rotated), spread))
    reference.store_kv(key, key[..., rotated:], batch(pages, blocks, LENGTHS)[1], pages)
    return pages, blocks


def batch(pages: KVPages, blocks: list[list[int]], rows: list[int]) -> tuple[Sequences, Tensor]:
    slices = [
        SequenceSlice([0] * count, length - count, (own,), Logits.NONE)
        for count, length, own in zip(rows, LENGTHS, blocks, strict=True)
        if count
    ]
    prepared = prepare(slices, [Pages((0,), 0, None, pages.block_size)])
    return prepared.sequences(0), prepared.slots[0]


def exact(
    q: Tensor, pages: KVPages, sequences: Sequences, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """float64 attention over what is stored, and the sum of p * |v|, which errors are measured
    against.
    """
    assert pages.rotated is not None
    assert pages.k_scale is not None
    outs, sizes = [], []
    for seq, (begin, end) in enumerate(pairwise(sequences.query_starts.tolist())):
        length = int(sequences.context_lens[seq])
        table = sequences.block_tables[seq, : -(-length // pages.block_size)].long()
        position = torch.arange(length)
        slots = table[position // pages.block_size] * pages.block_size + position % pages.block_size
        scale = read_slots(pages.k_scale, slots).double().repeat_interleave(128, -1)
        v = (decode(read_slots(pages.k, slots)).double() * scale)[:, 0]
        k = torch.cat((read_slots(pages.rotated, slots).double()[:, 0], v), -1)
        scores = q[begin:end].double().transpose(0, 1) @ k.T * softmax_scale
        seen = position <= torch.arange(length - (end - begin), length)[:, None]
        p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outs.append((p @ v).transpose(0, 1))
        sizes.append((p @ v.abs()).transpose(0, 1))
    return torch.cat(outs), torch.cat(sizes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", STEPS, ids=["decode", "mixed"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("rotated", "latent", "block_size"), [(64, 512, 16), (18, 256, 7), (0, 128, 16)]
)
def test_attention(kernels, rotated, latent, block_size, format, rows, dtype):
    """Over float64; and the bits of each row alone, with 1 to 3 threads, in other layouts, are the
    same.
    """
    pages, blocks = stored_sequences(format, rotated, latent, block_size)
    sequences = batch(pages, blocks, rows)[0]
    q = torch.randn(sum(rows), 5, rotated + latent).to(dtype)
    factor = (rotated + latent) ** -0.5
    out = kernels.attention(q, pages, sequences, AttentionCall(factor))
    want, size = exact(q, pages, sequences, factor)
    bound = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert ((out.double() - want).abs() <= bound * size + 1e-30).all()
    threads = torch.get_num_threads()
    try:
        for count, layout in ((2, PageLayout.HEADS), (3, PageLayout.BLOCKS)):
            torch.set_num_threads(
                threads if kernels is REFERENCE else count
            )  # torch's own sums may differ
            moved, _ = stored_sequences(format, rotated, latent, block_size, layout)
            assert torch.equal(kernels.attention(q, moved, sequences, AttentionCall(factor)), out)
    finally:
        torch.set_num_threads(threads)
    row = 0
    for seq, count in enumerate(rows):
        if count:
            last = [1 if i == seq else 0 for i in range(len(rows))]
            alone = kernels.attention(
                q[row + count - 1 : row + count],
                pages,
                batch(pages, blocks, last)[0],
                AttentionCall(factor),
            )
            assert torch.equal(alone, out[row + count - 1 : row + count])
        row += count


@pytest.mark.parametrize("format", FORMATS)
def test_a_nan_reaches_those_rows_alone_that_see_it(kernels, format):
    pages, blocks = stored_sequences(format, 8, 256, 16)
    rows = [0, 0, 40, 0]
    slot = blocks[2][1180 // 16] * 16 + 1180 % 16  # of rows 1160 to 1199
    bad = torch.randn(1, 1, 264)
    bad[..., 200] = torch.nan
    reference.store_kv(bad, bad[..., 8:], torch.tensor([slot]), pages)
    q = torch.randn(40, 4, 264).bfloat16()
    out = kernels.attention(q, pages, batch(pages, blocks, rows)[0], AttentionCall(0.06))
    assert out[:20].isfinite().all()
    assert out[20:].isnan().any(-1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_scales_that_are_nan_reach_no_other_sequence(kernels, format, dtype):
    """Nor the next tile, whose last keys are no token's: what a tile has in their place is not of
    the tile before.
    """
    pages, blocks = stored_sequences(format, 8, 256, 16)
    assert pages.k_scale is not None
    q = torch.randn(4, 4, 264).to(dtype)

    def row(i: int) -> Tensor:
        return kernels.attention(
            q[i : i + 1],
            pages,
            batch(pages, blocks, [int(j == i) for j in range(4)])[0],
            AttentionCall(0.06),
        )

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = [row(i) for i in range(4)]
        pages.k_scale[blocks[2]] = torch.nan
        together = kernels.attention(
            q, pages, batch(pages, blocks, [1, 1, 1, 1])[0], AttentionCall(0.06)
        )
        for i in (0, 1, 3):
            assert torch.equal(together[i : i + 1], alone[i])
            row(2)
            assert torch.equal(row(i), alone[i])
        assert together[2].isnan().any(-1).all()
    finally:
        torch.set_num_threads(threads)


def test_no_product_is_of_fp8(kernels):
    """Where products may be of FP8, these are not: a key has several scales."""
    pages, blocks = stored_sequences(Format.E4M3FN, 8, 128, 16)
    assert pages.scale_kind is ScaleKind.GROUP
    assert pages.dynamic
    q, sequences = torch.randn(12, 4, 136).bfloat16(), batch(pages, blocks, [0, 12, 0, 0])[0]
    both = reference.attention(
        q, pages, sequences, AttentionCall(0.1), products=reference.Fp8Products.BOTH
    )
    assert torch.equal(both, reference.attention(q, pages, sequences, AttentionCall(0.1)))
    assert kernels.attention(q, pages, sequences, AttentionCall(0.1)).shape == (12, 4, 128)


def test_values_apart_are_refused():
    pages = empty_pages(Format.E4M3FN, 8, 128)
    with pytest.raises(AssertionError):
        replace(pages, v_in_k=False)
    with pytest.raises(AssertionError):
        replace(pages, rotated=None)
