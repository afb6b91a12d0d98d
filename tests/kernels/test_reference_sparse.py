"""Sparse attention of the reference kernels: against plain definitions, and its promise about bits."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from freight.fp8.cast import decode, index_scale, torch_dtype
from freight.fp8.formats import Format
from freight.kernels import reference, reference_sparse
from freight.kernels.reference_set import REFERENCE
from freight.operands.attention import AttentionCall
from freight.operands.batch import Sequences
from freight.operands.kv_pages import IndexPages, KVPages, read_slots
from freight.operands.rotary import Rotary

BLOCK = 8
HEADS, CHANNELS, ROTATED = 3, 32, 8
LATENT = 24
COUNT = 20
LENGTH = 150
FORMATS = (Format.FLOAT32, Format.BFLOAT16, Format.E4M3FN, Format.E4M3FNUZ, Format.INT8)
NO_PRODUCTS_OF_FP8 = AttentionCall(0.2)


def angles() -> Rotary:
    table = torch.outer(torch.arange(LENGTH).float(), 50.0 ** -torch.arange(0, 1, 2 / ROTATED))
    return Rotary(table.cos(), table.sin())


def index_pages(format: Format, num_blocks: int = 40) -> IndexPages:
    """Of NaN, so that what is read before it is stored shows."""
    k = torch.full((num_blocks, BLOCK, 1, CHANNELS), torch.nan).to(torch_dtype(format))
    scale = torch.full((num_blocks, BLOCK, 1), torch.nan) if format.is_quantized else None
    return IndexPages(k, scale)


def latent_pages(format: Format = Format.FLOAT32, num_blocks: int = 40) -> KVPages:
    k = torch.randn(num_blocks, BLOCK, 1, LATENT + ROTATED).to(torch_dtype(format))
    return KVPages(k, k[..., ROTATED:], None, None, torch.zeros(2, dtype=torch.int64), v_in_k=True)


@dataclass(frozen=True)
class Inputs:
    """What a layer gives its indexer for every token of a sequence."""

    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def random(cls, seed: int, length: int = LENGTH, dtype: torch.dtype = torch.float32) -> Inputs:
        g = torch.Generator().manual_seed(seed)
        q = torch.randn(length, HEADS, CHANNELS, generator=g).to(dtype)
        k = torch.randn(length, CHANNELS, generator=g).to(dtype)
        return cls(q, k, torch.randn(length, HEADS, generator=g))


def steps(
    index: IndexPages, sequences: list[Inputs], cuts: list[list[int]], count: int = COUNT
) -> list[torch.Tensor]:
    """Run sequences together, each cut into chunks; step i has chunk i of those that have as many."""
    sparse = REFERENCE.sparse
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    tables = torch.zeros(len(sequences), 19, dtype=torch.int32)
    order = torch.randperm(19 * len(sequences), generator=torch.Generator().manual_seed(5)).int()
    for row, blocks in enumerate(order.split(19)):
        tables[row] = blocks
    for step in range(max(map(len, cuts))):
        there = [i for i, cut in enumerate(cuts) if step + 1 < len(cut)]
        if not there:
            break
        spans = [(cuts[i][step], cuts[i][step + 1]) for i in there]
        positions = torch.cat([torch.arange(*span) for span in spans])
        starts = torch.tensor([0, *np.cumsum([end - begin for begin, end in spans])]).int()
        lengths = torch.tensor([end for _, end in spans]).int()
        batch = Sequences(starts, lengths, tables[there])
        rows = [slice(*span) for span in spans]
        slots = torch.cat(
            [
                tables[i].long()[torch.arange(*span) // BLOCK] * BLOCK + torch.arange(*span) % BLOCK
                for i, span in zip(there, spans, strict=True)
            ]
        )
        given = [sequences[i] for i in there]
        q, k, weights = (
            torch.cat([getattr(one, name)[part] for one, part in zip(given, rows, strict=True)])
            for name in ("q", "k", "weights")
        )
        sparse.store_index(k, angles(), positions, slots, index)
        chosen = sparse.choose(q, weights, angles(), positions, index, batch, count)
        for i, (begin, end) in zip(there, pairwise(starts.tolist()), strict=True):
            found[i].append(chosen[begin:end])
    return [torch.cat(parts) for parts in found]


def plain_rotation(x: torch.Tensor) -> torch.Tensor:
    """By complex numbers. x: float64 [tokens, ..., CHANNELS]"""
    half = ROTATED // 2
    frequencies = 50.0 ** -torch.arange(0, 1, 2 / ROTATED).float()
    angle = torch.outer(torch.arange(len(x)).float(), frequencies).double()
    angle = angle.view(len(x), *[1] * (x.ndim - 2), half)
    rotated = torch.complex(x[..., :half], x[..., half:ROTATED]) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat((rotated.real, rotated.imag, x[..., ROTATED:]), -1)


def published_codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`act_quant` with round_scale of DeepSeek-V3.2-Exp (inference/kernel.py): the exponent of
    amax / 448 from its bits.
    """
    amax = x.float().abs().amax(-1).clamp(min=1e-4)
    bits = (amax * torch.tensor(1 / 448)).numpy().view(np.uint32)
    exponent = (bits >> 23).astype(np.int64) - 127 + (bits & ((1 << 23) - 1) != 0)
    scale = torch.from_numpy(((exponent + 127) << 23).astype(np.uint32).view(np.float32))
    stored = (x.float() / scale[..., None]).clamp(-448, 448)
    return stored.to(torch.float8_e4m3fn), scale


def sylvester(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1, 1], [1, -1]]).double(), matrix)
    factor: float = size**-0.5
    return matrix * factor


@pytest.mark.parametrize("size", [1, 2, 8, 128])
def test_a_rotation_is_the_product_with_hadamards_matrix(size: int) -> None:
    x = torch.randn(5, 3, size)
    expected = x.double() @ sylvester(size)
    assert (reference_sparse.hadamard(x) - expected).abs().max() <= 1e-6
    assert reference_sparse.hadamard(x.bfloat16()).dtype is torch.bfloat16


def test_e4m3_keys_are_quantized_as_published() -> None:
    """Rotated in bfloat16, multiplied by Hadamard's matrix, rounded again, and quantized with a power
    of two that is no less than that of 1e-4.
    """
    given = Inputs.random(1, dtype=torch.bfloat16)
    magnitudes = 2.0 ** torch.randint(-20, 12, (LENGTH, 1))
    k = (given.k * magnitudes).bfloat16()
    k[3] = 0
    k[4] = torch.tensor([448.0] + [0.0] * (CHANNELS - 1))
    index = index_pages(Format.E4M3FN)
    slots = torch.arange(LENGTH) + 16
    REFERENCE.sparse.store_index(k, angles(), torch.arange(LENGTH), slots, index)
    rotated = plain_rotation(k.double()).bfloat16()
    codes, scale = published_codes((rotated.double() @ sylvester(CHANNELS)).bfloat16())
    assert index.scale is not None
    stored, scales = read_slots(index.k, slots)[:, 0], read_slots(index.scale, slots)[:, 0]
    assert torch.equal(scales[:2], scale[:2])
    assert scale.unique().numel() > 20
    # float32 sums and those of float64 may fall on two sides of a number between two of bfloat16
    same = (stored.view(torch.uint8) == codes.view(torch.uint8)).float().mean()
    assert same >= 0.99
    assert (scales == scale).float().mean() >= 0.99
    error = (stored.float() * scales[:, None] - codes.float() * scale[:, None]).abs().amax(-1)
    assert (error <= 2**-3 * rotated.float().abs().amax(-1)).all()


def test_a_scale_of_an_fp8_vector_is_the_least_power_of_two() -> None:
    amax = torch.cat((torch.rand(1000) * 2.0 ** torch.randint(-30, 30, (1000,)), torch.zeros(1)))
    _, expected = published_codes(amax[:, None])
    assert torch.equal(index_scale(amax, Format.E4M3FN), expected)
    assert (amax / expected <= 448).all()
    large = amax > 1e-3
    assert (amax[large] / (expected[large] / 2) > 448).all()
    assert torch.equal(index_scale(amax, Format.INT8), (amax / 127).clamp(min=2.0**-126))


@pytest.mark.parametrize("format", FORMATS)
def test_the_best_keys_by_a_plain_definition(format: Format) -> None:
    """Scores in float64 of what is stored; keys that differ lie at the cut."""
    given = Inputs.random(2)
    index = index_pages(format)
    (chosen,) = steps(index, [given], [[0, LENGTH]])
    order = torch.randperm(19, generator=torch.Generator().manual_seed(5))
    slots = order[torch.arange(LENGTH) // BLOCK] * BLOCK + torch.arange(LENGTH) % BLOCK
    k = decode(read_slots(index.k, slots))[:, 0].double()
    q = plain_rotation(given.q.double())
    if index.scale is not None:
        k = k * read_slots(index.scale, slots).double()
        k = k @ sylvester(CHANNELS)  # its own inverse
    scores = torch.einsum(
        "rhk,rh->rk", torch.relu(torch.einsum("rhc,kc->rhk", q, k)), given.weights.double()
    )
    near = {Format.FLOAT32: 1e-5, Format.BFLOAT16: 0.2, Format.INT8: 0.4}.get(format, 2.0)
    exact = 0
    for row in range(LENGTH):
        keys = chosen[row][chosen[row] >= 0].long()
        assert len(keys) == min(COUNT, row + 1)
        assert (keys.diff() > 0).all()
        assert keys[-1] <= row
        visible = scores[row, : row + 1]
        expected = set(np.lexsort((np.arange(row + 1), -visible.numpy()))[:COUNT].tolist())
        cut = visible[list(expected)].min()
        others = expected ^ set(keys.tolist())
        exact += not others
        assert all(abs(visible[key] - cut) <= near for key in others)
    assert exact >= (LENGTH if format is Format.FLOAT32 else LENGTH // 4)


@pytest.mark.parametrize("format", FORMATS)
def test_neither_chunks_nor_batches_nor_blocks_change_a_choice(format: Format) -> None:
    sequences = [Inputs.random(seed, length) for seed, length in ((3, LENGTH), (4, 70), (5, 1))]
    whole = [[0, LENGTH], [0, 70], [0, 1]]
    alone = [
        steps(index_pages(format), [one], [cut])[0]
        for one, cut in zip(sequences, whole, strict=True)
    ]
    cuts = ([0, 1, 33, 34, 97, LENGTH], [0, 64, 65, 66, 70], [0, 1])
    singly = [list(range(len(one.k) + 1)) for one in sequences]
    for those in (whole, cuts, singly):
        together = steps(index_pages(format, 60), sequences, list(those))
        assert all(map(torch.equal, alone, together))


def test_of_equal_scores_the_lowest_positions_are_chosen() -> None:
    scores = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0], [0.0, -0.0, 0.0, -0.0, 9.0, 9.0]])
    seen = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    chosen = reference_sparse.highest(scores, seen, 3)
    assert chosen.tolist() == [[0, 1, 3], [0, 1, 2]]
    assert reference_sparse.highest(scores, seen, 5).tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, -1]]
    odd = torch.tensor([[1.0, -torch.inf, torch.nan, torch.inf, 3.0, torch.nan]])
    found = reference_sparse.highest(odd, torch.tensor([[True] * 5 + [False]]), 2)
    assert found.tolist() == [[2, 3]]
    low = torch.full((1, 4), -torch.inf)
    assert reference_sparse.highest(low, torch.tensor([[True] * 3 + [False]]), 4).tolist() == [
        [0, 1, 2, -1]
    ]


@pytest.mark.parametrize("format", FORMATS)
def test_equal_keys_tie(format: Format) -> None:
    """Keys that are not rotated are equal where their tokens are."""
    given = Inputs.random(6)
    k = given.k.clone()
    k[1:] = k[0]
    none = Rotary(torch.empty(LENGTH, 0), torch.empty(LENGTH, 0))
    index, slots = index_pages(format), torch.arange(LENGTH)
    table = torch.arange(19).int()[None]
    REFERENCE.sparse.store_index(k, none, slots, slots, index)
    batch = Sequences(torch.tensor([0, LENGTH]).int(), torch.tensor([LENGTH]).int(), table)
    chosen = REFERENCE.sparse.choose(given.q, given.weights, none, slots, index, batch, COUNT)
    assert (chosen[COUNT - 1 :] == torch.arange(COUNT)).all()


@pytest.mark.parametrize("format", [Format.FLOAT32, Format.BFLOAT16, Format.E4M3FN])
def test_attention_over_what_was_chosen(format: Format) -> None:
    """A row that chose all keys has the bits of dense attention; another those of plain attention
    over its keys.
    """
    pages = latent_pages(format)
    tables = torch.randperm(40)[:38].view(2, 19).int()
    batch = Sequences(torch.tensor([0, 50, 53]).int(), torch.tensor([LENGTH, 40]).int(), tables)
    q = torch.randn(53, 4, LATENT + ROTATED)
    positions = torch.cat((torch.arange(100, LENGTH), torch.arange(37, 40)))
    every = torch.arange(LENGTH).int().expand(53, -1)
    every = every.masked_fill(every > positions[:, None], -1)
    dense = reference.attention(q, pages, batch, NO_PRODUCTS_OF_FP8)
    assert torch.equal(
        REFERENCE.sparse.attention(q, pages, batch, NO_PRODUCTS_OF_FP8, every), dense
    )
    chosen = torch.full((53, 80), -1, dtype=torch.int32)
    for row, position in enumerate(positions.tolist()):
        keys = torch.randperm(position + 1)[: 80 if row % 2 else 7].sort().values
        chosen[row, : len(keys)] = keys
    found = REFERENCE.sparse.attention(q, pages, batch, NO_PRODUCTS_OF_FP8, chosen)
    for row in range(53):
        keys = chosen[row][chosen[row] >= 0].long()
        blocks = tables[int(row >= 50)].long()
        k = decode(read_slots(pages.k, blocks[keys // BLOCK] * BLOCK + keys % BLOCK))[:, 0]
        expected = F.scaled_dot_product_attention(
            q[row, None, :].double(), k[None].double(), k[None, :, ROTATED:].double(), scale=0.2
        )[0]
        assert (found[row] - expected).abs().max() <= 1e-5
    assert (found - dense).abs().max() > 0.1
