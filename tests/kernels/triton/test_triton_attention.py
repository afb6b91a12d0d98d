"""Paged attention in Triton against the reference, and what changes no bit of a row."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from freight.cache.groups import Pages
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.kernels import reference
from freight.kernels.reference import Fp8Products
from freight.kernels.triton import paged
from freight.kernels.triton.formats import Target, current_target
from freight.kernels.triton.paged import Tile
from freight.kernels.triton.rows import quantize
from freight.operands.attention import AttentionCall
from freight.operands.kv_pages import KeyCenter, KVPages
from freight.operands.weight import Activations, Weight

BLOCK = 8
CACHES = [
    *((Format.E4M3FN, scales) for scales in ("unit", "static", "token")),
    *((Format.E4M3FNUZ, scales) for scales in ("static", "token")),
    *((Format.E5M2, scales) for scales in ("unit", "token")),
    (Format.BFLOAT16, "unit"),
    (Format.FLOAT32, "unit"),
]
RARE = [(Format.E4M3FNUZ, "static"), (Format.E5M2, "unit")]
# rows of each sequence in this step, and the keys it has before it
MIXED = [(5, 0), (1, 0), (9, 14), (1, 75)]
DECODES = [(1, 33), (1, 0), (1, 80)]


TILES = (paged.prefill_tile, paged.decode_tile)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Tiles and splits small enough that a short sequence has several of each, of either size."""
    monkeypatch.setattr(paged, "SPLIT", 32)
    monkeypatch.setattr(paged, "LONG", 90)
    monkeypatch.setattr(paged, "LONG_SPLIT", 64)
    monkeypatch.setattr(paged, "MERGE_TILE", 2)
    monkeypatch.setattr(paged, "prefill_tile", lambda *_: Tile(16, 16, 4, 1))
    monkeypatch.setattr(paged, "decode_tile", lambda *_: Tile(16, 16, 4, 1))


class Case:
    """Sequences in shuffled blocks, their keys stored, everything that no key was stored to full of
    NaN.
    """

    def __init__(
        self,
        sequences,
        format,
        scales,
        dtype,
        heads,
        group,
        dim,
        device,
        extra_blocks=0,
        v_dim=None,
    ):
        torch.manual_seed(0)
        self.device, self.dim, v_dim = device, dim, v_dim or dim
        counts = [-(-(rows + before) // BLOCK) for rows, before in sequences]
        order = (torch.randperm(sum(counts)) + 1).tolist()  # block 0 belongs to nobody
        self.blocks = [[order.pop() for _ in range(count)] for count in counts]
        self.pages = self._pages(1 + sum(counts), format, scales, heads, v_dim)
        lengths = [rows + before for rows, before in sequences]
        self.q = [
            torch.randn(length, heads * group, dim, dtype=dtype, device=device)
            for length in lengths
        ]
        for blocks, length in zip(self.blocks, lengths, strict=True):
            k, v = (torch.randn(length, heads, width, device=device) * torch.rand(length, 1, 1, device=device)
                    for width in (dim, v_dim))  # fmt: skip
            slots = self.batch([(length, 0)], [blocks]).slots[0]
            reference.store_kv(k.to(dtype), v.to(dtype), slots, self.pages)
        self.sequences = sequences
        self.padding = [0] * extra_blocks

    def _pages(self, num_blocks, format, scales, heads, v_dim) -> KVPages:
        shapes = [(num_blocks, BLOCK, heads, width) for width in (self.dim, v_dim)]
        nan = [
            torch.full(shape, torch.nan, device=self.device).to(torch_dtype(format))
            for shape in shapes
        ]
        kept: list[Tensor | None] = [None, None]
        if scales == "static":
            kept = [torch.rand(shape[2:], device=self.device) * 0.02 + 0.01 for shape in shapes]
        elif scales == "token":
            kept = [
                torch.full(shapes[0][:3], torch.nan, dtype=torch.bfloat16, device=self.device)
                for _ in "kv"
            ]
        return KVPages(*nan, *kept, torch.zeros(2, dtype=torch.int64, device=self.device))

    def batch(self, sequences, blocks):
        padding, pairs = getattr(self, "padding", []), zip(sequences, blocks, strict=True)
        slices = [
            SequenceSlice([0] * r, before, ([*own, *padding],), Logits.NONE)
            for (r, before), own in pairs
        ]
        return prepare(slices, [Pages((0,), 0, None, BLOCK)], self.device)

    def run(
        self,
        which,
        window=None,
        dtype=None,
        soft_cap=None,
        products=Fp8Products.NONE,
        sinks=None,
        consumer=None,
        causal=True,
    ) -> Any:
        """Triton's output for the sequences numbered `which`; with `dtype` the reference's,
        computed in it.
        """
        sequences = [self.sequences[i] for i in which]
        q = torch.cat(
            [
                self.q[i][before : before + rows]
                for i, (rows, before) in zip(which, sequences, strict=True)
            ]
        )
        batch = self.batch(sequences, [self.blocks[i] for i in which]).sequences(0)
        if dtype is not None:
            scale = self.dim**-0.5
            return reference.attention(
                q.to(dtype),
                self.pages,
                batch,
                AttentionCall(scale, window, soft_cap, sinks, causal),
                products=products,
            )
        fp8 = products is not Fp8Products.NONE
        scale = self.dim**-0.5
        return paged.attention(
            current_target(),
            q,
            self.pages,
            batch,
            AttentionCall(scale, window, soft_cap, sinks, causal),
            fp8=fp8,
            consumer=consumer,
        )


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Outputs are sums of values near 1: the tolerance is that of the rounded probabilities and of
    the result.
    """
    bound = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[got.dtype]
    assert (got.float() - expected).abs().max() <= bound * max(1.0, expected.abs().max())


@pytest.mark.parametrize(
    ("format", "scales", "window"),
    [
        *((*cache, None) for cache in CACHES if cache not in RARE),
        *(pytest.param(*cache, None, marks=pytest.mark.slow) for cache in RARE),
        *((*CACHES[i], 20) for i in (1, 2, -2)),
    ],
)
def test_a_mixed_batch(format, scales, window, device):
    case = Case(MIXED, format, scales, torch.bfloat16, 2, 3, 32, device)
    which = range(len(MIXED))
    assert_close(case.run(which, window), case.run(which, window, torch.float32))


@pytest.mark.parametrize(
    ("format", "scales", "dtype"),
    [
        (Format.E4M3FN, "static", torch.float32),
        (Format.E4M3FN, "token", torch.float16),
        (Format.FLOAT16, "unit", torch.float16),
        pytest.param(Format.E4M3FN, "static", torch.float16, marks=pytest.mark.slow),
        pytest.param(Format.E4M3FN, "token", torch.float32, marks=pytest.mark.slow),
        pytest.param(Format.FLOAT16, "unit", torch.float32, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("heads", "group", "dim"), [(1, 1, 40), (1, 18, 16)])
def test_other_compute_types_and_shapes(dtype, format, scales, heads, group, dim, device):
    case = Case(MIXED, format, scales, dtype, heads, group, dim, device)
    which = range(len(MIXED))
    assert_close(case.run(which), case.run(which, None, torch.float32))


@pytest.mark.parametrize(
    ("format", "scales", "window"),
    [
        (Format.E4M3FN, "token", None),
        (Format.E4M3FN, "static", 20),
        (Format.BFLOAT16, "unit", None),
        (Format.BFLOAT16, "unit", 1),
        (Format.FLOAT32, "unit", 33),
    ],
)
def test_rows_that_see_both_ways(format, scales, window, device):
    """Every row of each sequence: of one key, about a tile of 16, and of more."""
    whole = [(rows, 0) for rows in (15, 1, 16, 17, 40)]
    case = Case(whole, format, scales, torch.bfloat16, 1, 2, 16, device)
    together = case.run(range(5), window, causal=False)
    assert_close(together, case.run(range(5), window, torch.float32, causal=False))
    for i, expected in enumerate(together.split([rows for rows, _ in whole])):
        assert torch.equal(case.run([i], window, causal=False), expected)


@pytest.mark.parametrize(
    ("format", "scales"), [(Format.E4M3FN, "token"), (Format.BFLOAT16, "unit")]
)
def test_other_sequences_change_no_bit(format, scales, device):
    case = Case(MIXED, format, scales, torch.bfloat16, 1, 2, 16, device)
    together = case.run(range(len(MIXED))).split([rows for rows, _ in MIXED])
    for i, expected in enumerate(together):
        assert torch.equal(case.run([i]), expected)


@pytest.mark.parametrize("window", [None, 20])
def test_neither_programs_nor_the_table_s_width_change_a_bit_of_a_decode(
    window, monkeypatch, device
):
    case = Case(DECODES, Format.E4M3FN, "static", torch.bfloat16, 1, 2, 16, device, extra_blocks=30)
    wide = case.run([0, 1, 2], window)
    case.padding = []
    for programs in (1, 2, 7):
        monkeypatch.setattr(paged, "programs_for", lambda *_, programs=programs: programs)
        assert torch.equal(case.run([0, 1, 2], window), wide)


@pytest.mark.parametrize("window", [None, 20, 90, 100])
def test_splits_of_either_size(window, device):
    """Sequences of LONG keys, one more, and many more; windows of fewer than LONG, LONG, and more.

    Below LONG a window's splits are short however long its sequence is.
    """
    sequences = [(1, 299), (1, 89), (1, 90), (1, 250)]
    case = Case(sequences, Format.E4M3FN, "token", torch.bfloat16, 2, 2, 16, device)
    together = case.run(range(4), window)
    assert_close(together, case.run(range(4), window, torch.float32))
    for i, expected in enumerate(together):
        assert torch.equal(case.run([i], window)[0], expected)


@pytest.mark.parametrize("window", [None, 20])
def test_chunks_of_prefill_change_no_bit(window, device):
    case = Case([(40, 0)], Format.E4M3FN, "token", torch.bfloat16, 1, 2, 16, device)
    whole = case.run([0], window)
    before = 0
    for rows in (2, 21, 17):
        case.sequences = [(rows, before)]
        assert torch.equal(case.run([0], window), whole[before : before + rows])
        before += rows


def test_a_row_for_padding_is_left_out(device):
    """A graph's unused rows are sequences without keys: nothing is read for them, and the others do
    not change.
    """
    case = Case(DECODES, Format.E4M3FN, "token", torch.bfloat16, 1, 2, 16, device)
    batch = case.batch([*DECODES, (1, -1)], [*case.blocks, [0]])
    q = torch.cat([case.q[i][before:] for i, (_, before) in enumerate(DECODES)])
    out = paged.attention(
        current_target(), torch.cat((q, q[:1])), case.pages, batch.sequences(0), AttentionCall(0.25)
    )
    assert torch.equal(out[:3], case.run([0, 1, 2]))


def centered(case: Case, positions: int, rotary_dim: int | None = None) -> Case:
    """The same pages, whose keys lack 100 on some pairs of channels."""
    heads, half = case.pages.k.shape[2], (rotary_dim or case.dim) // 2
    b = torch.zeros(heads, case.dim, device=case.device)
    b[0, [1, half + 1, half - 1]] = 100.0
    b[-1, 0] = -100.0
    angles = torch.outer(torch.arange(positions).float(), 1e4 ** (-torch.arange(half) / half)).to(
        case.device
    )
    tables = (KeyCenter.angle_tiles(table) for table in (angles.cos(), angles.sin()))
    case.pages = replace(case.pages, k_center=KeyCenter.of(b, *tables))
    case.q = [q * 0.05 for q in case.q]
    return case


@pytest.mark.parametrize(
    ("format", "scales", "window"),
    [
        (Format.E4M3FN, "static", None),
        (Format.E4M3FN, "token", 20),
        (Format.BFLOAT16, "unit", None),
    ],
)
def test_what_was_taken_off_keys_comes_back(format, scales, window, device):
    case = centered(Case(MIXED, format, scales, torch.bfloat16, 2, 3, 32, device), 100)
    which = range(len(MIXED))
    expected = case.run(which, window, torch.float32)
    assert_close(case.run(which, window), expected)
    case.pages = replace(case.pages, k_center=None)
    assert (case.run(which, window, torch.float32) - expected).abs().max() > 0.1


@pytest.mark.parametrize(
    ("scales", "dim", "v_dim"), [("static", 24, 16), ("static", 16, 40), ("token", 16, 40)]
)
def test_values_of_another_width(scales, dim, v_dim, device):
    case = Case(
        [(5, 9), (1, 40)], Format.E4M3FN, scales, torch.bfloat16, 2, 3, dim, device, v_dim=v_dim
    )
    which = range(2)
    got = case.run(which)
    assert got.shape[1:] == (6, v_dim)
    assert_close(got, case.run(which, None, torch.float32))


def test_a_center_of_keys_that_turn_in_part(device):
    """Angles are [tiles, rotary_dim / 2, 64], and channel i is paired with i + rotary_dim / 2."""
    case = centered(
        Case([(1, 33), (5, 9)], Format.E4M3FN, "token", torch.bfloat16, 2, 2, 24, device), 100, 8
    )
    which = range(len(case.sequences))
    expected = case.run(which, None, torch.float32)
    assert_close(case.run(which), expected)
    case.pages = replace(case.pages, k_center=None)
    assert (case.run(which, None, torch.float32) - expected).abs().max() > 0.1


@pytest.mark.parametrize("keys", [16, 32, 64])
@pytest.mark.parametrize(
    ("sequences", "scales"), [([(1, 197), (1, 150)], "token"), ([(9, 150)], "static")]
)
def test_blocks_before_a_window_may_be_gone(sequences, scales, keys, monkeypatch, device):
    """No key before the first 64-key tile that the first row's window touches: not even its block's
    number.
    """
    monkeypatch.setattr(paged, "SPLIT", 64)
    monkeypatch.setattr(paged, "prefill_tile", lambda *_: Tile(16, keys, 4, 1))
    monkeypatch.setattr(paged, "decode_tile", lambda *_: Tile(16, keys, 4, 1))
    case = Case(sequences, Format.E4M3FN, scales, torch.bfloat16, 1, 2, 16, device)
    which = range(len(sequences))
    expected = case.run(which, 20)
    for own, (_, before) in zip(case.blocks, sequences, strict=True):
        gone = (before - 19) // 64 * 64 // BLOCK
        assert gone >= 16
        case.pages.k[own[:gone]] = case.pages.v[own[:gone]] = torch.nan
        if case.pages.dynamic:
            case.pages.k_scale[own[:gone]] = case.pages.v_scale[own[:gone]] = torch.nan
        own[:gone] = [0] * gone  # block 0 is full of NaN
    assert torch.equal(case.run(which, 20), expected)
    assert case.run(which, None, torch.float32).isnan().all()


def test_a_step_of_prefill_alone_launches_nothing_for_decoding(monkeypatch, device):
    case = Case([(5, 20), (17, 0)], Format.E4M3FN, "token", torch.bfloat16, 2, 3, 32, device)
    monkeypatch.setattr(paged, "_decode", lambda *_: pytest.fail("no sequence has one row"))
    assert_close(case.run(range(2), None), case.run(range(2), None, torch.float32))


def test_tiles_of_keys_divide_those_that_the_cache_keeps():
    for target in (
        *(Target("cuda", arch) for arch in (80, 89, 90)),
        Target("hip", "gfx942"),
        Target("hip", "gfx950"),
    ):
        for dim in (64, 128, 256, 512):
            for size in (1, 2, 4):
                tiles = [
                    *(TILES[1](target, dim, size, 4, stored) for stored in (1, 2)),
                    *(
                        TILES[0](target, dim, size, *kind)
                        for kind in itertools.product((False, True), (1, 2))
                    ),
                ]
                assert all(reference.KEY_TILE % tile.keys == 0 for tile in tiles)
                assert all(
                    tile.keys >= (32 if size == 1 else 16) for tile in tiles
                )  # products of FP8 sum over 32
                if dim == 512:  # more rows spill
                    assert all(tile.rows <= 32 for tile in tiles)


@pytest.mark.parametrize(
    ("format", "scales", "size_of_q", "with_center"),
    [
        (Format.E4M3FN, "token", 1.0, True),
        (Format.E4M3FN, "static", 1000.0, False),
        (Format.FLOAT32, "unit", 1.0, False),
    ],
)
def test_soft_caps(format, scales, with_center, size_of_q, device):
    dtype = torch.bfloat16 if format.is_fp8 else torch.float32
    case = Case(MIXED, format, scales, dtype, 2, 3, 32, device)
    if with_center:
        case = centered(case, 100)
    case.q = [q * size_of_q for q in case.q]
    which = range(len(MIXED))
    expected = case.run(which, 20, torch.float32, soft_cap=0.8)
    assert_close(case.run(which, 20, soft_cap=0.8), expected)
    assert (case.run(which, 20, torch.float32) - expected).abs().max() > 0.1


@pytest.mark.parametrize(
    ("format", "scales", "window", "soft_cap"),
    [
        pytest.param(Format.E4M3FN, "unit", None, None, marks=pytest.mark.slow),
        (Format.E4M3FN, "static", 20, 2.0),
        (Format.E4M3FN, "token", None, None),
        (Format.E4M3FNUZ, "static", None, None),
    ],
)
def test_fp8_products(format, scales, window, soft_cap, monkeypatch, device):
    """The same roundings as the reference's where both see keys in the same tiles; and they cost
    what FP8 costs.
    """
    monkeypatch.setattr(paged, "SPLIT", 4096)
    monkeypatch.setattr(paged, "LONG", 4096)
    monkeypatch.setattr(reference, "KEY_TILE", 16)
    sequences = [
        (5, 0),
        (1, 40),
        (1, 0),
        (19, 14),
        (1, 75),
    ]  # enough values that their errors average out
    case = Case(sequences, format, scales, torch.bfloat16, 2, 3, 32, device)
    which = range(len(sequences))
    exact = case.run(which, window, torch.float32, soft_cap)
    expected = case.run(which, window, torch.float32, soft_cap, Fp8Products.BOTH)
    cost = (expected - exact).norm() / exact.norm()
    assert 0.005 < cost < 0.08
    got = case.run(which, window, None, soft_cap, Fp8Products.BOTH).float()
    if device == "cpu":  # a GPU may multiply less in FP8: Target.fp8_products
        assert (got - expected).norm() / exact.norm() < 0.2 * cost
    assert (got - exact).norm() / exact.norm() < 1.2 * cost


def test_fp8_products_change_no_bit_with_other_sequences(device):
    case = Case(MIXED, Format.E4M3FN, "static", torch.bfloat16, 1, 2, 16, device)
    together = case.run(range(len(MIXED)), products=Fp8Products.BOTH).split(
        [rows for rows, _ in MIXED]
    )
    for i, expected in enumerate(together):
        assert torch.equal(case.run([i], products=Fp8Products.BOTH), expected)


@pytest.mark.parametrize(("format", "least"), [(Format.E4M3FN, 32), (Format.BFLOAT16, 16)])
def test_small_heads_are_padded_to_what_matrix_units_take(format, least, device):
    """FP8 is multiplied in sums of 32 values or more, without which a kernel does not compile;
    values come in pairs.
    """
    case = Case([(1, 3)], format, "unit", torch.bfloat16, 1, 2, 8, device)
    made = paged.constants(case.q[0], case.pages, None, None)
    assert (made["K_DIM"], made["K_BLOCK"], made["V_BLOCK"]) == (8, least, 32)


def test_centers_change_no_bit_with_other_sequences(device):
    case = centered(Case(MIXED, Format.E4M3FN, "static", torch.bfloat16, 1, 2, 16, device), 100)
    together = case.run(range(len(MIXED))).split([rows for rows, _ in MIXED])
    for i, expected in enumerate(together):
        assert torch.equal(case.run([i]), expected)


@pytest.mark.parametrize(
    ("format", "scales", "window", "with_center"),
    [
        (Format.E4M3FN, "static", None, False),
        (Format.E4M3FN, "token", 20, True),
        (Format.BFLOAT16, "unit", 20, False),
    ],
)
def test_sinks(format, scales, window, with_center, device):
    """In chunks of prefill and in decoding over several splits; far below the scores, about them
    and above them.
    """
    case = Case(MIXED, format, scales, torch.bfloat16, 2, 3, 32, device)
    if with_center:
        case = centered(case, 100)
    which, sinks = (
        range(len(MIXED)),
        torch.tensor([-30.0, -1.0, 0.0, 1.0, 3.0, 30.0], device=device),
    )
    expected = case.run(which, window, torch.float32, sinks=sinks)
    together = case.run(which, window, sinks=sinks)
    assert_close(together, expected)
    changed = (case.run(which, window, torch.float32) - expected).abs().amax((0, 2))
    assert changed[1:].min() > 0.1
    for i, alone in enumerate(together.split([rows for rows, _ in MIXED])):
        assert torch.equal(case.run([i], window, sinks=sinks), alone)


@pytest.mark.parametrize("format", [Format.E4M3FN, Format.E4M3FNUZ])
def test_sinks_beside_fp8_products(format, device):
    """Probabilities are multiplied by a power of two there, and so is what a sink adds to their
    sum.
    """
    case = Case(MIXED, format, "static", torch.bfloat16, 2, 3, 32, device)
    which, sinks = range(len(MIXED)), torch.tensor([-1.0, 0.0, 1.0, 2.0, 3.0, 4.0], device=device)
    expected = case.run(which, None, torch.float32, sinks=sinks)
    got = case.run(which, products=Fp8Products.BOTH, sinks=sinks)
    assert (got - expected).norm() < 0.1 * expected.norm()


def consumer_of(kind: str, size: int, device: str) -> Weight:
    """A weight that takes rows of `size` values with scales of this kind."""
    codes = torch.zeros(8, size, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.ones((1, -(-size // 128)) if "group" in kind else (8,), device=device)
    static = (Activations.STATIC, 0.003) if "static" in kind else (Activations.DYNAMIC, None)
    return Weight(codes, scale, *static)


def same(*both: Any) -> bool:
    return all(
        torch.equal(*(getattr(x, part).view(torch.uint8) for x in both))
        for part in ("codes", "scale")
    )


@pytest.mark.parametrize(
    ("kind", "heads", "group", "v_dim"),
    [
        ("static", 2, 3, 40),
        ("row", 1, 3, 128),
        ("group", 1, 3, 128),
        ("group", 2, 3, 64),
        *(pytest.param(*rare, marks=pytest.mark.slow)
          for rare in (("static, group", 1, 3, 64), ("row", 2, 3, 40), ("group", 1, 2, 384), ("group", 1, 5, 40))),
    ],
)  # fmt: skip
def test_merged_rows_are_quantized_for_their_consumer(
    kind, heads, group, v_dim, monkeypatch, device
):
    """As `quantize` does it afterwards, in a step of decodes and beside a chunk of prefill."""
    monkeypatch.setattr(paged, "MERGE_CHUNK", 2)
    case = Case(
        MIXED, Format.E4M3FN, "static", torch.bfloat16, heads, group, 16, device, v_dim=v_dim
    )
    case.pages.v.view(torch.uint8)[case.blocks[3][0], 0, 0, 5] = (
        0x7F  # a NaN, which changes no scale
    )
    consumer = consumer_of(kind, heads * group * v_dim, device)
    for which in ([1, 3], [2, 1]):
        got = case.run(which, consumer=consumer)
        assert same(got, quantize(current_target(), case.run(which).flatten(1), consumer)), which
    assert len(got.codes.view(torch.uint8).unique()) > 50


def test_a_row_for_padding_changes_no_quantized_row(device):
    case = Case(DECODES, Format.E4M3FN, "static", torch.bfloat16, 1, 2, 16, device)
    batch = case.batch([*DECODES, (1, -1)], [*case.blocks, [0]])
    consumer = consumer_of("row", 32, device)
    q = torch.cat([*(case.q[i][before:] for i, (_, before) in enumerate(DECODES)), case.q[0][:1]])
    got = paged.attention(
        current_target(), q, case.pages, batch.sequences(0), AttentionCall(0.25), consumer=consumer
    )
    assert same(
        replace(got, codes=got.codes[:3], scale=got.scale[:3]),
        case.run([0, 1, 2], consumer=consumer),
    )
