"""Reading and writing of the state of a recurrence (`operands/states.py`) in Triton.

S is rounded to its stored type where a tile begins. A program continues with the rounded values,
without reading them back. Shapes: D = k_dim padded to a power of two; C = channels of a program;
T = STATE_TILE rows of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from freight.kernels.triton.formats import decode, encode, finite_amax, scale_from_amax
from freight.operands.tiles import STATE_TILE

TILE = tl.constexpr(STATE_TILE)
# Added to a float32 below 2 ** 22 and subtracted again, it rounds to an integer, ties to even.
ROUNDING = tl.constexpr(1.5 * 2.0**23)


def by_block(part: Tensor) -> tuple[Tensor, int]:
    """Return a part of `States` with the stride of its blocks, each of which is contiguous."""
    assert part[0].is_contiguous()
    return part, part.stride(0)


@triton.jit
def sequence_of_row(starts_ptr, row, num_seqs):
    """Find the sequence that a row belongs to, by binary search."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) <= row:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _decoded(stored, scale, FORMAT: tl.constexpr):
    """Decode stored S [D, C] to float32. FORMAT: '' for 16 and 32 bits; scale: [C]."""
    if FORMAT == "int8":
        value = tl.where(stored == -128, float("nan"), stored.to(tl.float32)) * scale[None, :]
    elif FORMAT != "":
        value = decode(stored, FORMAT).to(tl.float32) * scale[None, :]
    else:
        value = stored.to(tl.float32)
    return value


@triton.jit
def _encoded(state, scale, like: tl.constexpr, FORMAT: tl.constexpr):
    """Encode S [D, C] for storage in type `like`, as `fp8.cast.encode` does."""
    if FORMAT == "":
        stored = state.to(like)
    else:
        values = tl.div_rn(state, tl.broadcast_to(scale[None, :], state.shape))
        if FORMAT == "int8":
            code = tl.clamp(values, -127.0, 127.0) + ROUNDING - ROUNDING
            stored = tl.where(state == state, code, -128.0).to(tl.int32).to(tl.int8)
        else:
            stored = encode(values, like, FORMAT)
    return stored


@triton.jit
def rounded(state, stays, state_ptr, scale_ptr, scale_place, in_state, in_v, FORMAT: tl.constexpr):
    """Round S [D, C] to the values that a later step would read; store it if `kept`.

    state_ptr, in_state: [D, C]; scale_place, in_v: [C]
    """
    scale = tl.full((state.shape[1],), 1.0, tl.float32)
    if FORMAT != "":
        stored = scale_from_amax(finite_amax(state, 0), FORMAT).to(scale_ptr.dtype.element_ty)
        if stays:
            tl.store(scale_ptr + scale_place, stored, mask=in_v)
        scale = stored.to(tl.float32)
    code = _encoded(state, scale, state_ptr.dtype.element_ty, FORMAT)
    if stays:
        tl.store(state_ptr, code, mask=in_state)
    return _decoded(code, scale, FORMAT)


@triton.jit
def stored_tile(
    count, block, state_ptr, state_stride, state_place, in_state, scale_ptr, scale_stride, u_ptr, u_stride, u_place,
    in_v, old_decay_ptr, HEADS: tl.constexpr, V_DIM: tl.constexpr, FORMAT: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Load a stored tile of `count` rows; everything is 0 if it has none.

    Returns S at its start [D, C], u [T, C], decay [T], and the decay of its last row.
    old_decay_ptr: the head's decays [T, HEADS]. BY_CHANNEL: decays are not read, and are 0.
    """
    j = tl.arange(0, TILE)
    there = in_v & (u_place < tl.where(count > 0, HEADS * V_DIM, 0))
    scale = tl.full(u_place.shape, 1.0, tl.float32)
    if FORMAT != "":
        scale = tl.load(scale_ptr + block * scale_stride + u_place, mask=there, other=0.0).to(
            tl.float32
        )
    stored = tl.load(
        state_ptr + block * state_stride + state_place, mask=in_state & there[None, :], other=0.0
    )
    rows_ptr = u_ptr + block * u_stride + j[:, None] * (HEADS * V_DIM) + u_place[None, :]
    u = tl.load(rows_ptr, mask=(j < count)[:, None] & in_v[None, :], other=0.0).to(tl.float32)
    decay = tl.zeros((TILE,), tl.float32)
    if not BY_CHANNEL:
        decay = tl.load(old_decay_ptr + j * HEADS, mask=j < count, other=0.0)
    tl.debug_barrier()  # all threads have read what is overwritten later
    return (
        _decoded(stored, scale, FORMAT),
        u,
        decay,
        tl.sum(tl.where(j == count - 1, decay, 0.0), 0),
    )


@triton.jit
def rows_of_tile(
    q_ptr, q_stride, k_ptr, k_stride, kept_ptr, kept_stride, factors_ptr, table_ptr, row, head, begin, first, stores,
    KEY_HEADS: tl.constexpr, K_DIM: tl.constexpr, K_BLOCK: tl.constexpr, EVERY: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Load a row of a key head, and the keys of its tile up to the row.

    Returns the row's index t in its tile, the tile's block, the index in the tile of the first row
    of this step, a mask of the keys of the tile that the row sees [T, D], the row's query [D] and
    key [D], and the tile's keys [T, D].

    begin    the first row of the sequence in this step, which has the position `first`
    stores   True if this program writes the factors of query and key to factors_ptr, with NORM
    """
    position = first + row - begin
    t = position % TILE
    j = tl.arange(0, TILE)
    dims = tl.arange(0, K_BLOCK)
    exists = dims < K_DIM
    fresh_from = first - (position - t)
    here = position - t + j >= first
    until = (j <= t)[:, None] & exists[None, :]
    place = (row - t + j).to(tl.int64)[:, None] * k_stride + head * K_DIM + dims[None, :]
    keys = tl.load(k_ptr + place, mask=until & here[:, None], other=0.0).to(tl.float32)
    block = tl.load(table_ptr + position // EVERY, mask=t > row - begin, other=0).to(tl.int64)
    place = block * kept_stride + (j * KEY_HEADS + head)[:, None] * K_DIM + dims[None, :]
    stored_rows = tl.load(kept_ptr + place, mask=until & (here == 0)[:, None], other=0.0)
    query_place = row.to(tl.int64) * q_stride + head * K_DIM + dims
    query = tl.load(q_ptr + query_place, mask=exists, other=0.0).to(tl.float32)
    if NORM:
        of_query = tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * (K_DIM**-0.5)
        of_keys = tl.rsqrt(tl.sum(keys * keys, 1) + 1e-6)
        if stores:
            factors = factors_ptr + (row.to(tl.int64) * KEY_HEADS + head) * 2
            tl.store(factors, of_query)
            tl.store(factors + 1, tl.sum(tl.where(j == t, of_keys, 0.0), 0))
        query *= of_query
        keys *= of_keys[:, None]
    keys = tl.where(here[:, None], keys.to(stored_rows.dtype), stored_rows).to(tl.float32)
    key = tl.sum(tl.where((j == t)[:, None], keys, 0.0), 0)
    return t, block, fresh_from, until, query, key, keys


@triton.jit
def copy_rows(
    from_ptr, to_ptr, count, head, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy the first `count` rows [T, HEADS, WIDTH] of one head."""
    j = tl.arange(0, TILE)
    index = tl.arange(0, BLOCK)
    place = (j * HEADS + head)[:, None] * WIDTH + index[None, :]
    mask = (j < count)[:, None] & (index < WIDTH)[None, :]
    tl.store(to_ptr + place, tl.load(from_ptr + place, mask=mask, other=0.0), mask=mask)


@triton.jit
def copy_tile(
    seq, block, first, length, head, k_ptr, k_stride, old_k_ptr, decay_ptr, decay_stride, old_decay_ptr,
    KEY_HEADS: tl.constexpr, RATIO: tl.constexpr, RATIO_BLOCK: tl.constexpr, K_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the rows of the tile before position `first` that all programs of a key head read.

    One of those programs overwrites the original in the second launch. Copies the decays of the
    value heads to [num_seqs, T, KEY_HEADS * RATIO]. If this step, which ends at `length`, goes
    beyond the tile, also copies the keys, to [num_seqs, T, KEY_HEADS, K_DIM].
    """
    count = (first - 1) % TILE + 1
    of_seq = seq.to(tl.int64) * TILE * KEY_HEADS
    decays_ptr = decay_ptr + block * decay_stride
    copy_rows(
        decays_ptr, old_decay_ptr + of_seq * RATIO, count, head, KEY_HEADS, RATIO, RATIO_BLOCK
    )
    if (length - 1) // TILE > (first - 1) // TILE:
        copy_rows(
            k_ptr + block * k_stride,
            old_k_ptr + of_seq * K_DIM,
            count,
            head,
            KEY_HEADS,
            K_DIM,
            K_BLOCK,
        )
