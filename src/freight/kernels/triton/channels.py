"""First launch of a recurrence (`recurrence.py`) in which each channel of a key has its own decay.

The decay between two keys is inside the sum of their product, so the product belongs to a value
head, not to a key head. The same program sums up the decays of its row's tile, one row after the
other, and the second launch reads the sums. Shapes are named as in `states.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freight.kernels.triton.states import TILE, copy_rows, rows_of_tile, sequence_of_row
from freight.operands.tiles import LEAST_DECAY

LEAST = tl.constexpr(LEAST_DECAY)


@triton.jit
def _sums(
    row,
    t,
    fresh_from,
    head,
    decay_ptr,
    kept_ptr,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
):
    """Sum the log decays since the tile's start: of its rows up to t [T, D], and of row t [D].

    The sums of rows before `fresh_from` are read from kept_ptr [T, HEADS, K_DIM].
    """
    j = tl.arange(0, TILE)
    dims = tl.arange(0, K_BLOCK)
    total = tl.zeros((K_BLOCK,), tl.float32)
    mine = tl.zeros((K_BLOCK,), tl.float32)
    sums = tl.zeros((TILE, K_BLOCK), tl.float32)
    for i in range(TILE):
        size = tl.where(i <= t, K_DIM, 0)
        fresh = tl.where(i >= fresh_from, size, 0)
        place = (row - t + i).to(tl.int64) * (HEADS * K_DIM) + head * K_DIM + dims
        decay = tl.load(decay_ptr + place, mask=dims < fresh, other=0.0)
        kept_place = (i * HEADS + head) * K_DIM + dims
        stored_sum = tl.load(kept_ptr + kept_place, mask=dims < size - fresh, other=0.0)
        bounded = tl.where(decay < LEAST, LEAST, decay)  # keeps NaN
        total = tl.where(i >= fresh_from, bounded + total, stored_sum)
        sums = tl.where((j == i)[:, None], total[None, :], sums)
        mine = tl.where(i == t, total, mine)
    return sums, mine


@triton.jit
def _copy_tile(
    seq, first, head, block, k_ptr, k_stride, old_k_ptr, decay_ptr, decay_stride, old_decay_ptr,
    KEY_HEADS: tl.constexpr, RATIO: tl.constexpr, K_DIM: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the rows of the tile before position `first` that all programs of a head read.

    One of those programs overwrites the original in the second launch.
    """
    HEADS: tl.constexpr = KEY_HEADS * RATIO
    count = (first - 1) % TILE + 1
    of_seq = seq.to(tl.int64) * TILE * K_DIM
    decays_ptr = decay_ptr + block * decay_stride
    copy_rows(decays_ptr, old_decay_ptr + of_seq * HEADS, count, head, HEADS, K_DIM, K_BLOCK)
    if head % RATIO == 0:
        keys_ptr = k_ptr + block * k_stride
        copy_rows(
            keys_ptr,
            old_k_ptr + of_seq * KEY_HEADS,
            count,
            head // RATIO,
            KEY_HEADS,
            K_DIM,
            K_BLOCK,
        )


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def channel_products_kernel(
    q_ptr, q_stride, k_ptr, k_stride, kept_ptr, kept_stride, log_decay_ptr, decay_ptr, decay_stride, factors_ptr,
    products_ptr, sums_ptr, old_k_ptr, old_decay_ptr, starts_ptr, lengths_ptr, tables_ptr, table_stride, num_seqs,
    KEY_HEADS: tl.constexpr, RATIO: tl.constexpr, K_DIM: tl.constexpr, K_BLOCK: tl.constexpr, EVERY: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """A program: one row and one value head.

    factors    [rows, KEY_HEADS, 2]: the factors of the row's query and key, with NORM
    products   [rows, HEADS, 2, T]: of the row's query, and of its key, with the decayed key of each
               row of its tile
    sums       [rows, HEADS, K_DIM]: the row's log decay since its tile's start
    old_k      [num_seqs, T, KEY_HEADS, K_DIM]: the stored keys of the open tile, copied if this
               step goes beyond it
    old_decay  [num_seqs, T, HEADS, K_DIM]: its decays, likewise
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    HEADS: tl.constexpr = KEY_HEADS * RATIO
    key_head = head // RATIO
    seq = sequence_of_row(starts_ptr, row, num_seqs)
    begin = tl.load(starts_ptr + seq)
    end = tl.load(starts_ptr + seq + 1)
    length = tl.load(lengths_ptr + seq)
    if length < end - begin:
        return
    first = length - (end - begin)  # position of the first row in this step
    table_ptr = tables_ptr + seq.to(tl.int64) * table_stride
    t, block, fresh_from, until, query, key, keys = rows_of_tile(
        q_ptr, q_stride, k_ptr, k_stride, kept_ptr, kept_stride, factors_ptr, table_ptr, row, key_head, begin, first,
        head % RATIO == 0, KEY_HEADS, K_DIM, K_BLOCK, EVERY, NORM,
    )  # fmt: skip
    j = tl.arange(0, TILE)
    dims = tl.arange(0, K_BLOCK)
    olds_ptr = decay_ptr + block * decay_stride
    sums, mine = _sums(row, t, fresh_from, head, log_decay_ptr, olds_ptr, HEADS, K_DIM, K_BLOCK)
    tl.store(sums_ptr + (row.to(tl.int64) * HEADS + head) * K_DIM + dims, mine, mask=dims < K_DIM)
    decayed = keys * tl.where(until, tl.exp(mine[None, :] - sums), 0.0)
    products = products_ptr + (row.to(tl.int64) * HEADS + head) * 2 * TILE + j
    tl.store(products, tl.sum(decayed * query[None, :], 1))
    tl.store(products + TILE, tl.sum(decayed * key[None, :], 1))
    if (row == begin) & (first > 0) & ((length - 1) // TILE > (first - 1) // TILE):
        _copy_tile(
            seq, first, head, tl.load(table_ptr + (first - 1) // EVERY).to(tl.int64), kept_ptr, kept_stride, old_k_ptr,
            decay_ptr, decay_stride, old_decay_ptr, KEY_HEADS, RATIO, K_DIM, K_BLOCK,
        )  # fmt: skip
