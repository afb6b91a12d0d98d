"""Causal convolution of each channel over its sequence.

Lengths stay on the device: grids follow from shapes alone. A sequence of length 0 pads a captured
step: none of its state is read or written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from freight.kernels.triton.attention import sequence_of
from freight.kernels.triton.sizes import cdiv
from freight.kernels.triton.states import by_block
from freight.operands.batch import Sequences
from freight.operands.recurrence import Convolution
from freight.operands.states import States


@triton.jit
def _keep_columns(
    x_ptr, x_stride, columns_ptr, block_stride, source_ptr, table_ptr, begin, first, length, channel,
    CHANNELS: tl.constexpr, KEPT: tl.constexpr, EARLIER: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Write the last KEPT inputs of each block: of this step, or the EARLIER ones before it, which are
    at source_ptr.
    """
    exists = channel < CHANNELS
    for block in range(first // EVERY, (length - 1) // EVERY + 1):
        stop = tl.minimum(length, block * EVERY + EVERY)
        target_ptr = columns_ptr + tl.load(table_ptr + block).to(tl.int64) * block_stride + channel
        for j in tl.static_range(KEPT):
            position = stop - KEPT + j
            place = position % KEPT * CHANNELS
            if position >= first:
                new_ptr = x_ptr + (begin + position - first).to(tl.int64) * x_stride + channel
                tl.store(target_ptr + place, tl.load(new_ptr, mask=exists, other=0.0), mask=exists)
            elif (position >= 0) & (position >= first - EARLIER):
                tl.store(
                    target_ptr + place,
                    tl.load(source_ptr + place, mask=exists, other=0.0),
                    mask=exists,
                )


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def convolve_kernel(
    x_ptr, x_stride, weight_ptr, bias_ptr, columns_ptr, block_stride, out_ptr, starts_ptr, lengths_ptr, tables_ptr,
    table_stride, num_seqs, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, KEPT: tl.constexpr,
    SILU: tl.constexpr, EVERY: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program: BLOCK channels of ROWS rows of one sequence. ROWS 1: every sequence has one row.

    Only the program of a sequence's first rows reads old columns, so it also writes the new ones.
    """
    EARLIER: tl.constexpr = WIDTH - 1
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.program_id(1)
    seq = tile
    if ROWS > 1:
        seq = sequence_of(starts_ptr, tile, num_seqs, ROWS)
    begin = tl.load(starts_ptr + seq)
    end = tl.load(starts_ptr + seq + 1)
    length = tl.load(lengths_ptr + seq)
    first_row = begin
    if ROWS > 1:
        first_row += (tile - begin // ROWS - seq) * ROWS
    if first_row >= end or length < end - begin:
        return
    first = length - (end - begin)  # position of the first row in this step
    table_ptr = tables_ptr + seq.to(tl.int64) * table_stride
    source = tl.load(table_ptr + (first - 1) // EVERY, mask=first > 0, other=0).to(tl.int64)
    source_ptr = columns_ptr + source * block_stride + channel
    exists = channel < CHANNELS
    row = first_row + tl.arange(0, ROWS)
    live = (row < end)[:, None] & exists[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channel, mask=exists, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(WIDTH):
        of = row - EARLIER + j
        position = first + of - begin
        here = (of >= begin)[:, None]
        before = ((of < begin) & (position >= 0))[:, None]
        x = tl.load(
            x_ptr + of.to(tl.int64)[:, None] * x_stride + channel[None, :],
            mask=live & here,
            other=0.0,
        )
        old = tl.load(
            source_ptr[None, :] + (position % KEPT * CHANNELS)[:, None],
            mask=live & before,
            other=0.0,
        )
        weight = tl.load(weight_ptr + channel * WIDTH + j, mask=exists, other=0.0).to(tl.float32)
        total += weight[None, :] * tl.where(here, x, old).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    target_ptr = out_ptr + row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(target_ptr, total.to(out_ptr.dtype.element_ty), mask=live)
    if first_row == begin:
        tl.debug_barrier()  # all threads have read the columns that are overwritten now
        _keep_columns(
            x_ptr, x_stride, columns_ptr, block_stride, source_ptr, table_ptr, begin, first, length, channel, CHANNELS,
            KEPT, EARLIER, EVERY,
        )  # fmt: skip


def convolve(x: Tensor, convolution: Convolution, states: States, sequences: Sequences) -> Tensor:
    """Compute `KernelSet.convolve`. x: [rows, channels], contiguous within a row."""
    weight = convolution.weight
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    rows, channels = x.shape
    num_seqs = sequences.num_seqs
    tables = sequences.block_tables
    out = x.new_empty(rows, channels)
    single = rows == num_seqs  # a sequence has at least one row
    tile, block = (1, 256) if single else (16, 64)  # rows and channels of a program
    assert weight.shape[1] <= 8 <= 16, "only the first tile of a sequence reads stored columns"
    grid = (cdiv(channels, block), num_seqs if single else rows // tile + num_seqs)
    convolve_kernel[grid](
        x,
        x.stride(0),
        weight,
        convolution.bias,
        *by_block(states.parts["columns"]),
        out,
        sequences.query_starts,
        sequences.context_lens,
        tables,
        tables.stride(0),
        num_seqs,
        CHANNELS=channels,
        BLOCK=block,
        WIDTH=weight.shape[1],
        KEPT=states.parts["columns"].shape[1],
        SILU=convolution.silu,
        EVERY=states.every,
        ROWS=tile,
        num_warps=2 if single else 4,
    )
    return out
