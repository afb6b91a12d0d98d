"""What LoRA adapters add to the rows of a product, in two launches: the sums A x, then the outputs.

A program has TILE rows, in the order of the step, and multiplies those of one adapter at a time;
what the others have there counts as zero and is not stored. Grids follow from shapes alone, and
nothing is sorted: so the host never waits for the device, and a CUDA graph can capture both. Of few
rows each may have another adapter, and each adapter of a tile has a program of its own, which
returns at once if the tile has fewer. Of many rows most tiles have one adapter, and a program takes
all adapters of its tile in turn.

Tiles have one size for any number of rows, and the sums of each PART inputs are added up in order.
So a row's bits depend on that row and its adapter alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freight.kernels.triton.sizes import cdiv, next_power_of_2
from freight.operands.adapters import AdapterBank

TILE = 16  # rows of a program, and ranks that it takes at a time
PART = 1024  # inputs whose sums are separate
FEW_ROWS = 128  # up to these every adapter of a tile has a program of its own
OUTPUTS = 128  # of a program, at most


@triton.jit
def slots_of(adapters_ptr, row, num_rows, NUM_SLOTS: tl.constexpr):
    """Return the slots of rows [TILE], -1 without one, and where each occurs for the first time."""
    slots = tl.load(adapters_ptr + row, mask=row < num_rows, other=-1)
    slots = tl.where(slots < NUM_SLOTS, slots, -1)
    index = tl.arange(0, row.shape[0])
    earlier = (slots[:, None] == slots[None, :]) & (index[None, :] < index[:, None])
    return slots, (slots >= 0) & (tl.sum(earlier.to(tl.int32), 1) == 0)


@triton.jit
def numbers_of(first, ADAPTERS: tl.constexpr):
    """Return the begin and the end of the program's share of a tile's adapters, by their number."""
    begin = tl.program_id(2) * ADAPTERS
    return begin, tl.minimum(begin + ADAPTERS, tl.sum(first.to(tl.int32), 0))


@triton.jit
def slot_of(slots, first, number):
    """Return the slot with this number among the different slots of a tile, in ascending order."""
    lower = (slots[None, :] < slots[:, None]) & first[None, :]
    return tl.max(tl.where(first & (tl.sum(lower.to(tl.int32), 1) == number), slots, -1), 0)


@triton.jit(do_not_specialize=["num_rows"])
def adapter_sums_kernel(
    x_ptr, a_ptr, adapters_ptr, ranks_ptr, sums_ptr, num_rows, x_stride, SIZE: tl.constexpr, PART: tl.constexpr,
    NUM_SLOTS: tl.constexpr, NUM_PARTS: tl.constexpr, MAX_RANK: tl.constexpr, TILE: tl.constexpr,
    INPUTS: tl.constexpr, ADAPTERS: tl.constexpr,
):  # fmt: skip
    """A program: TILE rows by TILE ranks of a part, over PART inputs, of ADAPTERS adapters at most.

    x: [num_rows, SIZE], rows at multiples of x_stride; sums: float32 [num_rows, parts of SIZE,
    NUM_PARTS, MAX_RANK].
    """
    BLOCKS: tl.constexpr = (MAX_RANK + TILE - 1) // TILE
    PIECES: tl.constexpr = (SIZE + PART - 1) // PART
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    module = tl.program_id(1) // (BLOCKS * PIECES)
    block = tl.program_id(1) // PIECES % BLOCKS
    piece = tl.program_id(1) % PIECES
    rank = block * TILE + tl.arange(0, TILE)
    slots, first = slots_of(adapters_ptr, row, num_rows, NUM_SLOTS)
    number, end = numbers_of(first, ADAPTERS)
    while number < end:
        slot = slot_of(slots, first, number)
        number += 1
        used = tl.load(ranks_ptr + slot * NUM_PARTS + module)
        if block * TILE < used:
            live = slots == slot
            x_row = x_ptr + row.to(tl.int64)[:, None] * x_stride
            a_row = ((slot * NUM_PARTS + module).to(tl.int64) * MAX_RANK + rank) * SIZE
            acc = tl.zeros((TILE, TILE), tl.float32)
            for begin in range(0, PART, INPUTS):
                index = piece * PART + begin + tl.arange(0, INPUTS)
                inside = index < SIZE
                x = tl.load(x_row + index[None, :], mask=live[:, None] & inside[None, :], other=0.0)
                a = tl.load(
                    a_ptr + a_row[None, :] + index[:, None],
                    mask=inside[:, None] & (rank < used)[None, :],
                    other=0.0,
                )
                acc = tl.dot(x, a, acc, input_precision="ieee")
            place = ((row.to(tl.int64) * PIECES + piece) * NUM_PARTS + module) * MAX_RANK
            tl.store(
                sums_ptr + place[:, None] + rank[None, :],
                acc,
                mask=live[:, None] & (rank < used)[None, :],
            )


@triton.jit(do_not_specialize=["num_rows"])
def adapter_outputs_kernel(
    y_ptr, b_ptr, adapters_ptr, ranks_ptr, scalings_ptr, sums_ptr, num_rows, BEGIN: tl.constexpr, END: tl.constexpr,
    MODULE: tl.constexpr, NUM_OUTPUTS: tl.constexpr, PIECES: tl.constexpr, NUM_SLOTS: tl.constexpr,
    NUM_PARTS: tl.constexpr, MAX_RANK: tl.constexpr, TILE: tl.constexpr, OUTPUTS: tl.constexpr, ADAPTERS: tl.constexpr,
):  # fmt: skip
    """A program: TILE rows by OUTPUTS outputs of part MODULE, BEGIN to END, of ADAPTERS adapters at most."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    output = BEGIN + tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = output < END
    slots, first = slots_of(adapters_ptr, row, num_rows, NUM_SLOTS)
    number, end = numbers_of(first, ADAPTERS)
    while number < end:
        slot = slot_of(slots, first, number)
        number += 1
        used = tl.load(ranks_ptr + slot * NUM_PARTS + MODULE)
        if used > 0:
            live = slots == slot
            acc = tl.zeros((TILE, OUTPUTS), tl.float32)
            for begin in range(0, used, TILE):
                rank = begin + tl.arange(0, TILE)
                known = rank < used
                t = tl.zeros((TILE, TILE), tl.float32)
                for piece in range(PIECES):
                    place = ((row.to(tl.int64) * PIECES + piece) * NUM_PARTS + MODULE) * MAX_RANK
                    t += tl.load(
                        sums_ptr + place[:, None] + rank[None, :],
                        mask=live[:, None] & known[None, :],
                        other=0.0,
                    )
                b_row = (slot.to(tl.int64) * MAX_RANK + rank) * NUM_OUTPUTS
                b = tl.load(
                    b_ptr + b_row[:, None] + output[None, :],
                    mask=known[:, None] & inside[None, :],
                    other=0.0,
                )
                acc = tl.dot(t, b.to(tl.float32), acc, input_precision="ieee")
            mask = live[:, None] & inside[None, :]
            y_row = y_ptr + row.to(tl.int64)[:, None] * NUM_OUTPUTS + output[None, :]
            y = tl.load(y_row, mask=mask, other=0.0)
            scaling = tl.load(scalings_ptr + slot * NUM_PARTS + MODULE)
            result = y.to(tl.float32) + acc * scaling
            tl.store(y_row, result.to(y.dtype), mask=mask)


def add_adapters(y: Tensor, x: Tensor, bank: AdapterBank, adapters: Tensor) -> Tensor:
    """Compute `KernelSet.add_adapters` in place. x is contiguous within a row."""
    rows, size = x.shape
    num_slots, num_parts, max_rank, _ = bank.a.shape
    num_outputs = bank.ends[-1]
    assert y.shape == (rows, num_outputs)
    assert y.is_contiguous()
    assert bank.a.shape[3] == size
    assert adapters.shape == (rows,)
    assert x.stride(1) == 1 or size == 1
    assert y.dtype == x.dtype == bank.a.dtype == bank.b.dtype
    if not rows:
        return y
    tiles = cdiv(rows, TILE)
    pieces = cdiv(size, PART)
    most = min(TILE, num_slots)  # adapters of a tile
    programs = most if rows <= FEW_ROWS else 1
    inputs = min(128 if x.itemsize == 2 else 64, max(16, next_power_of_2(size)))
    constants = {
        "NUM_SLOTS": num_slots,
        "NUM_PARTS": num_parts,
        "MAX_RANK": max_rank,
        "TILE": TILE,
        "ADAPTERS": most // programs,
        "num_warps": 4,
    }
    sums = torch.empty(rows, pieces, num_parts, max_rank, dtype=torch.float32, device=x.device)
    blocks = num_parts * cdiv(max_rank, TILE) * pieces
    adapter_sums_kernel[(tiles, blocks, programs)](
        x, bank.a, adapters, bank.ranks, sums, rows, x.stride(0),
        SIZE=size, PART=min(PART, cdiv(size, inputs) * inputs), INPUTS=inputs, **constants,
    )  # fmt: skip
    for module, (begin, end) in enumerate(bank.outputs):
        if begin == end:
            continue
        outputs = min(OUTPUTS, max(16, next_power_of_2(end - begin)))
        adapter_outputs_kernel[(tiles, cdiv(end - begin, outputs), programs)](
            y, bank.b, adapters, bank.ranks, bank.scalings, sums, rows,
            BEGIN=begin, END=end, MODULE=module, NUM_OUTPUTS=num_outputs, PIECES=pieces, OUTPUTS=outputs, **constants,
        )  # fmt: skip
    return y
