"""Linear attention with a decay, the recurrence of `KernelSet.recurrence`, in two launches.

`products_kernel` multiplies each row's key and query by the keys of its tile, work that all value
heads of a key head and all blocks of their channels share. If each channel of a key has its own
decay, `channel_products_kernel` (`channels.py`) does so instead. `recurrence_kernel` computes the
rows of a sequence one after the other. A program has BLOCK_V channels of one value head, so that S
and the tile's u are private to it and stay in registers. Each row is computed by the same
instructions whether a step has one row of a sequence or thousands, so prefill and decoding have the
same bits. The end of a tile is a condition on positions, which are read on the device, so a graph
can capture the step.

All programs of a key head share its kept keys, and those of a value head its decays. A step may
begin a tile in the block of the tile before it, whose rows each program reads when it adds them up.
So the first launch copies those rows, the second reads the copies, and one program writes the
block.

Products of a row with S are sums in float32, not matrix instructions: those take at least 16 rows,
and in decoding there is one. The end of a tile has 16, and is a matrix product. Shapes are named as
in `states.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from freight.fp8.cast import format_of
from freight.fp8.formats import Format
from freight.kernels.triton.channels import LEAST, channel_products_kernel
from freight.kernels.triton.formats import Target, carrier
from freight.kernels.triton.sizes import cdiv, next_power_of_2
from freight.kernels.triton.states import (
    TILE,
    by_block,
    copy_tile,
    rounded,
    rows_of_tile,
    sequence_of_row,
    stored_tile,
)
from freight.operands.batch import Sequences
from freight.operands.recurrence import RecurrenceRule
from freight.operands.states import States
from freight.operands.tiles import STATE_TILE


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def products_kernel(
    q_ptr, q_stride, k_ptr, k_stride, kept_ptr, kept_stride, decay_ptr, decay_stride, factors_ptr, products_ptr,
    old_k_ptr, old_decay_ptr, starts_ptr, lengths_ptr, tables_ptr, table_stride, num_seqs, KEY_HEADS: tl.constexpr,
    RATIO: tl.constexpr, RATIO_BLOCK: tl.constexpr, K_DIM: tl.constexpr, K_BLOCK: tl.constexpr, EVERY: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """A program: one row and one key head.

    factors    [rows, KEY_HEADS, 2]: the factors of the row's query and key, with NORM
    products   [rows, KEY_HEADS, 2, T]: of the row's query, and of its key, with the key of each row
               of its tile so far
    old_k      [num_seqs, T, KEY_HEADS, K_DIM]: the stored keys of the open tile, copied if this
               step goes beyond it
    old_decay  [num_seqs, T, KEY_HEADS * RATIO]: its decays
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    seq = sequence_of_row(starts_ptr, row, num_seqs)
    begin = tl.load(starts_ptr + seq)
    end = tl.load(starts_ptr + seq + 1)
    length = tl.load(lengths_ptr + seq)
    if length < end - begin:
        return
    first = length - (end - begin)  # position of the first row in this step
    table_ptr = tables_ptr + seq.to(tl.int64) * table_stride
    _, _, _, _, query, key, keys = rows_of_tile(
        q_ptr, q_stride, k_ptr, k_stride, kept_ptr, kept_stride, factors_ptr, table_ptr, row, head, begin, first, True,
        KEY_HEADS, K_DIM, K_BLOCK, EVERY, NORM,
    )  # fmt: skip
    products = products_ptr + (row.to(tl.int64) * KEY_HEADS + head) * 2 * TILE + tl.arange(0, TILE)
    tl.store(products, tl.sum(keys * query[None, :], 1))
    tl.store(products + TILE, tl.sum(keys * key[None, :], 1))
    if (row == begin) & (first > 0):
        copy_tile(
            seq, tl.load(table_ptr + (first - 1) // EVERY).to(tl.int64), first, length, head, kept_ptr, kept_stride,
            old_k_ptr, decay_ptr, decay_stride, old_decay_ptr, KEY_HEADS, RATIO, RATIO_BLOCK, K_DIM, K_BLOCK,
        )  # fmt: skip


@triton.jit
def _advanced(
    state, u, decay, last, seq, row, position, first, k_ptr, k_stride, factors_ptr, old_k_ptr,
    sums_ptr, old_decay_ptr, value_head, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr, NORM: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Return S [D, C] after the tile before `position`; `last` is the total decay of that tile.

    BY_CHANNEL: decays are read from sums_ptr and, of rows before this step, from old_decay_ptr
    (`channels.py`).
    """
    head = value_head // (HEADS // KEY_HEADS)
    j = tl.arange(0, TILE)
    dims = tl.arange(0, K_BLOCK)
    of = position - TILE + j
    here = of >= first
    exists = (dims < K_DIM)[:, None]
    rows = (row - TILE + j).to(tl.int64)
    keys = tl.load(
        k_ptr + rows[None, :] * k_stride + head * K_DIM + dims[:, None],
        mask=exists & here[None, :],
        other=0.0,
    )
    old_place = ((seq.to(tl.int64) * TILE + j) * KEY_HEADS + head)[None, :] * K_DIM + dims[:, None]
    old = tl.load(
        old_k_ptr + old_place, mask=exists & ((of < first) & (of >= 0))[None, :], other=0.0
    )
    if NORM:
        factor = tl.load(factors_ptr + (rows * KEY_HEADS + head) * 2 + 1, mask=here, other=0.0)
        keys = keys.to(tl.float32) * factor[None, :]
    keys = tl.where(here[None, :], keys.to(old.dtype), old).to(tl.float32)
    if BY_CHANNEL:
        place = (rows * HEADS + value_head)[None, :] * K_DIM + dims[:, None]
        sums = tl.load(sums_ptr + place, mask=exists & here[None, :], other=0.0)
        old_place = ((seq.to(tl.int64) * TILE + j) * HEADS + value_head)[None, :] * K_DIM + dims[
            :, None
        ]
        sums += tl.load(
            old_decay_ptr + old_place, mask=exists & ((of < first) & (of >= 0))[None, :], other=0.0
        )
        total = tl.sum(tl.where((j == TILE - 1)[None, :], sums, 0.0), 1)[:, None]
        keys = keys * tl.exp(total - sums)
        state = state * tl.exp(total)
    else:
        keys = keys * tl.exp(last - decay)[None, :]
        state = state * tl.exp(last)
    return tl.dot(keys, u, state, input_precision="ieee")


@triton.jit
def _stays(start, length, EVERY: tl.constexpr):
    """Say whether the tile at `start` is the last of its block in a step that ends at `length`."""
    return start + TILE >= tl.minimum(length, (start // EVERY + 1) * EVERY)


@triton.jit
def _load_row(
    row, end, rows, head, channel, LIKE: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
    K_DIM: tl.constexpr, K_BLOCK: tl.constexpr, V_DIM: tl.constexpr, NORM: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Load a row; a row beyond `end` repeats the last one.

    Returns query [D], key [D], value [C], beta, log_decay, and the products of query and of key
    [T]. BY_CHANNEL: log_decay [D] is that since the tile's start, and products include the decays.
    """
    (
        q_ptr,
        q_stride,
        k_ptr,
        k_stride,
        v_ptr,
        v_stride,
        beta_ptr,
        decay_ptr,
        factors_ptr,
        products_ptr,
    ) = rows
    key_head = head // (HEADS // KEY_HEADS)
    wide = tl.minimum(row, end - 1).to(tl.int64)
    dims = tl.arange(0, K_BLOCK)
    j = tl.arange(0, TILE)
    exists = dims < K_DIM
    query = tl.load(q_ptr + wide * q_stride + key_head * K_DIM + dims, mask=exists, other=0.0).to(
        tl.float32
    )
    key = tl.load(k_ptr + wide * k_stride + key_head * K_DIM + dims, mask=exists, other=0.0).to(
        tl.float32
    )
    place = wide * KEY_HEADS + key_head
    if NORM:
        query *= tl.load(factors_ptr + place * 2)
        key *= tl.load(factors_ptr + place * 2 + 1)
    value_place = wide * v_stride + head * V_DIM + channel
    value = tl.load(v_ptr + value_place, mask=channel < V_DIM, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + wide * HEADS + head)
    if BY_CHANNEL:
        decay = tl.load(decay_ptr + (wide * HEADS + head) * K_DIM + dims, mask=exists, other=0.0)
        place = wide * HEADS + head
    else:
        decay = tl.load(decay_ptr + wide * HEADS + head)
        decay = tl.where(decay < LEAST, LEAST, decay)  # keeps NaN
    with_query = tl.load(products_ptr + place * 2 * TILE + j)
    with_key = tl.load(products_ptr + place * 2 * TILE + TILE + j)
    return query, key.to(LIKE).to(tl.float32), value, beta, decay, with_query, with_key


@triton.jit
def _next_row(
    state,
    u,
    decay,
    total,
    t,
    this,
    skip,
    DELTA: tl.constexpr,
    LIKE: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):
    """Add row t of the tile, `this` (`_load_row`), to u [T, C], to decay [T] and to its total.

    Returns these three, the row's u [C], and the row's result [C].
    """
    query, key, value, beta, log_decay, with_query, with_key = this
    j = tl.arange(0, TILE)
    if BY_CHANNEL:
        from_start = tl.exp(log_decay)
    else:
        total += log_decay
        decay = tl.where(j == t, total, decay)
        from_start = tl.exp(total)
        since = tl.exp(total - decay)
        with_key = since * with_key
        with_query = since * with_query
    row_u = value
    if DELTA:
        before = tl.where(j < t, with_key, 0.0)
        row_u -= tl.sum(state * (key * from_start)[:, None], 0) + tl.sum(u * before[:, None], 0)
    row_u = (row_u * beta).to(LIKE)
    u = tl.where((j == t)[:, None], row_u.to(tl.float32)[None, :], u)
    until = tl.where(j <= t, with_query, 0.0)
    result = tl.sum(state * (query * from_start)[:, None], 0) + tl.sum(u * until[:, None], 0)
    if skip is not None:
        result += skip * value
    return u, decay, total, row_u, result


@triton.jit
def _keep_row(
    t, head, total, this, kept_ptrs, LIKE: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
    K_DIM: tl.constexpr, dims, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Store the decay of row t, `this` (`_load_row`); with the first head of a key head the key."""
    decay_ptr, k_ptr = kept_ptrs
    RATIO: tl.constexpr = HEADS // KEY_HEADS
    if BY_CHANNEL:
        tl.store(decay_ptr + (t * HEADS + head) * K_DIM + dims, this[4], mask=dims < K_DIM)
    else:
        tl.store(decay_ptr + t * HEADS + head, total)
    if head % RATIO == 0:
        tl.store(
            k_ptr + (t * KEY_HEADS + head // RATIO) * K_DIM + dims,
            this[1].to(LIKE),
            mask=dims < K_DIM,
        )


@triton.jit(do_not_specialize=["table_stride"])
def recurrence_kernel(
    q_ptr, q_stride, k_ptr, k_stride, v_ptr, v_stride, beta_ptr, log_decay_ptr, skip_ptr, factors_ptr, products_ptr,
    old_k_ptr, old_decay_ptr, state_ptr, state_stride, scale_ptr, scale_stride, kept_k_ptr, k_part_stride, kept_u_ptr,
    u_part_stride, kept_decay_ptr, decay_part_stride, out_ptr, starts_ptr, lengths_ptr, tables_ptr, table_stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K_DIM: tl.constexpr, K_BLOCK: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, EVERY: tl.constexpr, FORMAT: tl.constexpr, DELTA: tl.constexpr, NORM: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """A program: BLOCK_V channels of one value head of one sequence.

    BY_CHANNEL: log_decay_ptr points to the `sums` of `channels.py`.
    """
    head = tl.program_id(1)
    seq = tl.program_id(2)
    begin = tl.load(starts_ptr + seq)
    end = tl.load(starts_ptr + seq + 1)
    length = tl.load(lengths_ptr + seq)
    if (begin == end) | (length < end - begin):
        return
    first = length - (end - begin)  # position of the first row in this step
    table_ptr = tables_ptr + seq.to(tl.int64) * table_stride
    channel = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    dims = tl.arange(0, K_BLOCK)
    in_v = channel < V_DIM
    in_state = (dims < K_DIM)[:, None] & (channel < V_DIM)[None, :]
    state_place = (head * K_DIM + dims)[:, None] * V_DIM + channel[None, :]
    u_place = head * V_DIM + channel
    like = kept_u_ptr.dtype.element_ty
    block = tl.load(table_ptr + (first - 1) // EVERY, mask=first > 0, other=0).to(tl.int64)
    state, u, decay, total = stored_tile(
        tl.where(first > 0, (first - 1) % TILE + 1, 0), block, state_ptr, state_stride, state_place, in_state,
        scale_ptr, scale_stride, kept_u_ptr, u_part_stride, u_place, in_v,
        old_decay_ptr + seq.to(tl.int64) * TILE * HEADS + head, HEADS, V_DIM, FORMAT, BY_CHANNEL,
    )  # fmt: skip
    stays = _stays(first // TILE * TILE, length, EVERY)
    skip = tl.load(skip_ptr + head) if skip_ptr is not None else None
    rows = (
        q_ptr,
        q_stride,
        k_ptr,
        k_stride,
        v_ptr,
        v_stride,
        beta_ptr,
        log_decay_ptr,
        factors_ptr,
        products_ptr,
    )
    coming = _load_row(
        begin,
        end,
        rows,
        head,
        channel,
        like,
        HEADS,
        KEY_HEADS,
        K_DIM,
        K_BLOCK,
        V_DIM,
        NORM,
        BY_CHANNEL,
    )
    # Not `for`: from its loops Triton 3.6 takes u a second time, in the layout of the product's
    # operand. Its sums have another order there, so that a tile's end depends on where the step
    # began, and thousands of registers spill.
    done = 0
    while done < end - begin:
        row = begin + done
        position = first + done
        t = position % TILE
        this = coming
        coming = _load_row(
            row + 1,
            end,
            rows,
            head,
            channel,
            like,
            HEADS,
            KEY_HEADS,
            K_DIM,
            K_BLOCK,
            V_DIM,
            NORM,
            BY_CHANNEL,
        )
        if t == 0:
            state = _advanced(
                state, u, decay, total, seq, row, position, first, k_ptr, k_stride, factors_ptr, old_k_ptr,
                log_decay_ptr, old_decay_ptr, head, KEY_HEADS, HEADS, K_DIM, K_BLOCK, NORM, BY_CHANNEL,
            )  # fmt: skip
            block = tl.load(table_ptr + position // EVERY).to(tl.int64)
            stays = _stays(position, length, EVERY)
            state = rounded(
                state, stays, state_ptr + block * state_stride + state_place, scale_ptr, block * scale_stride + u_place,
                in_state, in_v, FORMAT,
            )  # fmt: skip
            u = tl.zeros((TILE, BLOCK_V), tl.float32)
            decay = tl.zeros((TILE,), tl.float32)
            total = tl.full((), 0.0, tl.float32)
        u, decay, total, row_u, result = _next_row(
            state, u, decay, total, t, this, skip, DELTA, like, BY_CHANNEL
        )
        tl.store(out_ptr + row.to(tl.int64) * (HEADS * V_DIM) + u_place, result.to(like), mask=in_v)
        if stays:
            tl.store(
                kept_u_ptr + block * u_part_stride + t * (HEADS * V_DIM) + u_place, row_u, mask=in_v
            )
            if tl.program_id(0) == 0:
                kept_ptrs = (
                    kept_decay_ptr + block * decay_part_stride,
                    kept_k_ptr + block * k_part_stride,
                )
                _keep_row(
                    t, head, total, this, kept_ptrs, like, HEADS, KEY_HEADS, K_DIM, dims, BY_CHANNEL
                )
        done += 1


BLOCK_V = 16  # channels of a program: a step of one sequence with 48 heads of 128 is 384 programs


def _warps(target: Target, format: Format, k_block: int, by_channel: bool) -> int:
    """Return the number of warps with which a thread has 32 values of S, or 16 where 32 spill.

    They spill on NVIDIA GPUs if S is not quantized, or if each channel has its own decay.
    """
    few = target.backend == "hip" or (format.is_quantized and not by_channel)
    return max(1, k_block // (64 if few else 32))


def recurrence(
    target: Target,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    rule: RecurrenceRule,
    states: States,
    sequences: Sequences,
) -> Tensor:
    """Compute `KernelSet.recurrence`. q, k, v: contiguous within a row."""
    assert q.stride(1) == k.stride(1) == v.stride(1) == 1
    assert beta.is_contiguous()
    assert log_decay.is_contiguous()
    assert states.every % STATE_TILE == 0
    parts = states.parts
    assert parts["k"].dtype == parts["u"].dtype == v.dtype
    key_heads, k_dim = parts["k"].shape[2:]
    heads, v_dim = parts["u"].shape[2:]
    rows = len(v)
    num_seqs = sequences.num_seqs
    tables = sequences.block_tables
    format = format_of(parts["state"])
    factors = beta.new_empty(rows, key_heads, 2)
    by_channel = log_decay.ndim == 3
    products = beta.new_empty(rows, heads if by_channel else key_heads, 2, STATE_TILE)
    old_k = parts["k"].new_empty(num_seqs, STATE_TILE, key_heads, k_dim)
    old_decay = beta.new_empty(num_seqs, *parts["decay"].shape[1:])
    out = torch.empty(rows, heads * v_dim, dtype=v.dtype, device=v.device)
    k_block = max(16, next_power_of_2(k_dim))
    shared: dict[str, Any] = {
        "KEY_HEADS": key_heads,
        "K_DIM": k_dim,
        "K_BLOCK": k_block,
        "NORM": rule.norm,
    }
    shared["EVERY"] = states.every
    lengths = (sequences.query_starts, sequences.context_lens, tables, tables.stride(0))
    kept_k = by_block(parts["k"])
    kept_u = by_block(parts["u"])
    kept_decay = by_block(parts["decay"])
    read = (q, q.stride(0), k, k.stride(0), *kept_k)
    made = (old_k, old_decay, *lengths, num_seqs)
    constants: dict[str, Any] = {
        **shared,
        "RATIO": heads // key_heads,
        "num_warps": max(1, k_block // 64),
    }
    if by_channel:
        sums = torch.empty_like(log_decay)
        inputs = (*read, log_decay, *kept_decay, factors, products, sums)
        channel_products_kernel[(rows, heads)](*inputs, *made, **constants)
        log_decay = sums  # `recurrence_kernel` reads the sums in place of the decays
    else:
        constants["RATIO_BLOCK"] = next_power_of_2(heads // key_heads)
        products_kernel[(rows, key_heads)](
            *read, *kept_decay, factors, products, *made, **constants
        )
    scale = by_block(parts["scale"]) if format.is_quantized else (None, 0)
    recurrence_kernel[(cdiv(v_dim, BLOCK_V), heads, num_seqs)](
        q,
        q.stride(0),
        k,
        k.stride(0),
        v,
        v.stride(0),
        beta,
        log_decay,
        rule.skip,
        factors,
        products,
        old_k,
        old_decay,
        carrier(parts["state"], target),
        parts["state"].stride(0),
        *scale,
        *kept_k,
        *kept_u,
        *kept_decay,
        out,
        *lengths,
        **shared,
        HEADS=heads,
        V_DIM=v_dim,
        BLOCK_V=BLOCK_V,
        FORMAT=str(format) if format.is_quantized else "",
        DELTA=rule.delta,
        BY_CHANNEL=by_channel,
        num_warps=_warps(target, format, k_block, by_channel),
    )
    return out
