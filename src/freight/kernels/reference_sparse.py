"""Sparse attention in plain torch: an indexer scores the keys before a row, and attention reads the
best of them (DSA; DeepSeek-V3.2-Exp, DeepSeek-AI 2025, and inference/model.py there).

A row's result depends on its own history alone, to the bit, as everywhere in `reference.py`: scores
are computed for tiles of keys at absolute positions in one shape, and a row's attention reads what
it chose in the order of positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from freight.fp8.cast import amax, decode, encode, index_scale
from freight.kernels.reference import (
    QUERY_TILE,
    Fp8Products,
    attend_tile,
    load_keys_and_values,
    load_slots,
    rotate,
    slots_at,
)
from freight.operands.attention import AttentionCall
from freight.operands.batch import Sequences
from freight.operands.kv_pages import IndexPages, KVPages, write_slots
from freight.operands.rotary import Rotary


def hadamard(x: Tensor) -> Tensor:
    """Multiply each vector by the Hadamard matrix of its size n, a power of two, divided by the root
    of n (Sylvester's; `rotate_activation` of DeepSeek-V3.2-Exp, inference/model.py).

    The matrix is orthogonal, so products of two rotated vectors are those of the vectors, and a
    large channel is spread over all of them, so that fewer bits are lost when they are rounded.

    x: [..., n]. In float32: for distances d = 1, 2, ..., n / 2 each pair of channels (i, i + d)
    becomes (a + b, a - b); then the product with n^-0.5. Rounded to x's dtype.
    """
    size = x.shape[-1]
    assert size & (size - 1) == 0, "refused by name in model.config.latent"
    values = x.float()
    distance = 1
    while distance < size:
        pairs = values.unflatten(-1, (-1, 2, distance))
        first = pairs[..., 0, :]
        second = pairs[..., 1, :]
        values = torch.stack((first + second, first - second), -2).flatten(-3)
        distance *= 2
    factor: float = size**-0.5
    return (values * factor).to(x.dtype)


def index_vectors(
    x: Tensor, rotary: Rotary, positions: Tensor, index: IndexPages
) -> tuple[Tensor, Tensor | None]:
    """Return queries or keys of an indexer as they are multiplied, in the format of `index`, and
    their scales, float32 [rows, heads]; None in 16 or 32 bits.

    The first channels are rotated by position. With 8 bits the vectors are multiplied by `hadamard`
    and rounded with one scale each (`index_scale`). x: [rows, heads, channels].
    """
    rotated = rotate(x, rotary.cos[positions], rotary.sin[positions])
    if not index.format.is_quantized:
        return rotated.to(index.k.dtype), None
    rotated = hadamard(rotated)
    scale = index_scale(amax(rotated, -1), index.format)
    return encode(rotated, scale[..., None], index.format), scale


def store_index(
    k: Tensor, rotary: Rotary, positions: Tensor, slots: Tensor, index: IndexPages
) -> None:
    """Store the keys of an indexer, normed, in `slots` (`SparseKernels.store_index`)."""
    codes, scale = index_vectors(k[:, None], rotary, positions, index)
    stores = slots >= 0
    write_slots(index.k, slots[stores], codes[stores])
    if index.scale is not None:
        assert scale is not None
        write_slots(index.scale, slots[stores], scale[stores])


def index_scores(
    q: Tensor,
    weights: Tensor,
    k: Tensor,
    k_scale: Tensor | None,
) -> Tensor:
    """Score tiles of keys for a tile of rows: float32 [QUERY_TILE, tiles * KEY_TILE].

    A score is the sum over heads h, in their order, of weights_h * max(0, q_h . k), times the scale
    of the key. q . k is a float32 product of the stored values; each product with a weight, each sum
    and the product with the scale rounds to float32.

    q: float32 [QUERY_TILE, heads, channels]; weights: float32 [QUERY_TILE, heads]; k: float32
    [tiles, channels, KEY_TILE]; k_scale: float32 [tiles * KEY_TILE]
    """
    queries = q.transpose(0, 1).flatten(0, 1).contiguous()  # [heads * QUERY_TILE, channels]
    tiles = []
    for tile in k:
        products = torch.relu(torch.mm(queries, tile)).unflatten(0, (-1, QUERY_TILE))
        total = torch.zeros_like(products[0])
        for head, product in enumerate(products):
            total = total + weights[:, head, None] * product
        tiles.append(total)
    scores = torch.cat(tiles, 1)
    return scores if k_scale is None else scores * k_scale


def highest(scores: Tensor, seen: Tensor, count: int) -> Tensor:
    """Return the positions of the `count` highest scores of each row among those seen, int32 [rows,
    count], rising; -1 behind the last, where a row sees fewer.

    Of equal scores the lowest position is chosen. 0 and -0 are equal, and NaN is above every number:
    a NaN is read then, and not lost. scores: float32 [rows, keys]; seen: bool [rows, keys], of each
    row the first keys.
    """
    keys = (scores + 0.0).masked_fill(~seen, -torch.inf)  # makes 0 of -0
    best = torch.sort(keys, dim=-1, descending=True, stable=True).indices[:, :count]
    last = torch.iinfo(torch.int64).max
    rising = torch.sort(best.masked_fill(~seen.gather(1, best), last), dim=-1).values
    rising = rising.masked_fill(rising == last, -1).int()
    return F.pad(rising, (0, count - best.shape[1]), value=-1)


def choose(
    q: Tensor,
    weights: Tensor,
    rotary: Rotary,
    positions: Tensor,
    index: IndexPages,
    sequences: Sequences,
    count: int,
) -> Tensor:
    """Choose the keys that each row reads (`SparseKernels.choose`)."""
    codes, scale = index_vectors(q, rotary, positions, index)
    queries = decode(codes)
    if scale is not None:
        weights = weights * scale
    chosen = torch.full((len(q), count), -1, dtype=torch.int32, device=q.device)
    starts = sequences.query_starts.tolist()
    for seq, length in enumerate(sequences.context_lens.tolist()):
        begin = starts[seq]
        end = starts[seq + 1]
        if begin == end:
            continue
        table = sequences.block_tables[seq, : -(-length // index.block_size)].long()
        key = torch.arange(length, dtype=torch.int64, device=q.device)
        slots = slots_at(key, table, index.block_size)
        k = load_slots(index.k, None, slots)[:, 0].transpose(1, 2).contiguous()
        k_scale = None
        if index.scale is not None:
            k_scale = load_slots(index.scale[..., None], None, slots).flatten()
        for row in range(begin, end, QUERY_TILE):
            rows = slice(row, min(row + QUERY_TILE, end))
            size = rows.stop - rows.start
            padding = QUERY_TILE - size
            scores = index_scores(
                F.pad(queries[rows], (0, 0, 0, 0, 0, padding)),
                F.pad(weights[rows], (0, 0, 0, padding)),
                k,
                k_scale,
            )
            first = length - (end - row)  # position of the tile's first row
            position = first + torch.arange(size, dtype=torch.int64, device=q.device)
            seen = key <= position[:, None]
            chosen[rows] = highest(scores[:size, :length], seen, count)
    return chosen


def attention(
    q: Tensor,
    pages: KVPages,
    sequences: Sequences,
    call: AttentionCall,
    chosen: Tensor,
    products: Fp8Products = Fp8Products.NONE,
) -> Tensor:
    """Compute attention of each row over the keys that it chose (`SparseKernels.attention`).

    It is attention over a sequence of these keys alone, in the order of their positions: tiles of
    KEY_TILE hold chosen keys only. So a row that chose every key that it sees has the bits of
    `reference.attention`.
    """
    assert call.causal
    assert call.window is None
    assert pages.k_center is None, "its angles are those of positions"
    out = q.new_empty(*q.shape[:2], pages.v.shape[3])
    starts = sequences.query_starts.tolist()
    for seq, table in enumerate(sequences.block_tables.long()):
        for row in range(starts[seq], starts[seq + 1]):
            keys = chosen[row].long()
            keys = keys[keys >= 0]
            k, v = load_keys_and_values(pages, slots_at(keys, table, pages.block_size))
            count = len(keys)
            one = slice(row, row + 1)
            out[one] = attend_tile(
                q[one],
                k,
                v,
                count - 1,
                count,
                0,
                pages,
                call,
                products,
            )
    return out
