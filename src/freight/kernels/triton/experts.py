"""Experts of all rows in two grouped products; see `KernelSet.experts`.

A slot is one expert of one row: row * top_k + its index among the row's ids. `sort_kernel` lists
slots by expert and cuts the list into tiles of one expert each; `experts_kernel` multiplies a
tile's rows by its expert's matrix with `product` of linear.py. Grids follow from shapes alone: they
have the largest possible number of tiles, and programs without a tile return at once. So the host
never waits for the device, and a CUDA graph can capture all launches.

Tiles have one size for any number of rows, so a row's bits do not depend on the other rows.

`heads_kernel` is the product of each head (`KernelSet.by_head`). Every row uses every matrix there,
so nothing is sorted; tiles are those of `linear.matmul_kernel`, by the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from freight.fp8.cast import format_of
from freight.kernels.triton import elementwise
from freight.kernels.triton.adapters import add_adapters
from freight.kernels.triton.formats import Target, carrier
from freight.kernels.triton.linear import FEW_ROWS, Tile, check, dot_type, matmul_tile, product
from freight.kernels.triton.rows import Quantized, quantize, quantizes
from freight.kernels.triton.sizes import cdiv, next_power_of_2
from freight.operands.experts import ExpertLayers
from freight.operands.packed import PackedExperts, as_tensor
from freight.operands.weight import Weight, Weights
from freight.parallel.ranks import ALONE, Ranks

SORTED = 1024  # slots that `sort_kernel` reads at a time


@dataclass(frozen=True)
class ExpertStack(PackedExperts):
    """One matrix of every expert.

    data     [num_experts, out_features, in_features]
    scale    `Weight.scale` of each expert, stacked along a first dimension, or None
    bias     [num_experts, out_features] in the dtype of the rows, or None
    first    the first expert's matrix, a view: it has the format, kind of scales and treatment of
             activations of all
    """

    data: Tensor
    scale: Tensor | None
    bias: Tensor | None
    first: Weight

    @property
    def whole_outputs(self) -> int:
        """Outputs of all matrices together, in the whole model."""
        return len(self.data) * self.first.whole_outputs


def pack(weights: Weights, bias: Tensor | None = None) -> ExpertStack:
    """Copy all weights into one tensor. bias: [num_experts, out_features]."""
    matrices = tuple(weights)
    check(matrices[0])
    assert Weight.alike(matrices)
    data = torch.stack([weight.data.view(torch.uint8) for weight in matrices]).view(
        matrices[0].data.dtype
    )
    scales = [weight.scale for weight in matrices if weight.scale is not None]
    scale = torch.stack(scales) if scales else None
    first = replace(matrices[0], data=data[0], scale=None if scale is None else scale[0])
    return ExpertStack(data, scale, None if bias is None else bias.contiguous(), first)


@triton.jit(do_not_specialize=["num_slots", "num_tiles"])
def sort_kernel(
    ids_ptr, slot_ptr, tile_ptr, num_slots, num_tiles, NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program: one expert. Writes its slots and its tiles.

    slot_ptr: [num_slots]: slots in ascending order, after those of lower experts; tile_ptr:
    [num_tiles, 3]: of each tile its expert, and the begin and the end of its part of slot_ptr. The
    last expert's program marks unused tiles with expert -1.
    """
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    count = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        count += tl.histogram(
            tl.load(ids_ptr + slot, mask=slot < num_slots, other=NUM_EXPERTS), BINS
        )
    size = tl.sum(tl.where(bins == expert, count, 0), 0)
    first = tl.sum(tl.where(bins < expert, count, 0), 0)
    tile = tl.sum(tl.where(bins < expert, (count + ROWS - 1) // ROWS, 0), 0)
    for begin in range(first, first + size, ROWS):
        tl.store(tile_ptr + tile * 3, expert)
        tl.store(tile_ptr + tile * 3 + 1, begin)
        tl.store(tile_ptr + tile * 3 + 2, tl.minimum(begin + ROWS, first + size))
        tile += 1
    if expert == NUM_EXPERTS - 1:
        for free in range(tile, num_tiles):
            tl.store(tile_ptr + free * 3, -1)
    place = first
    for start in range(0, num_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        mine = (tl.load(ids_ptr + slot, mask=slot < num_slots, other=NUM_EXPERTS) == expert).to(
            tl.int32
        )
        tl.store(slot_ptr + place + tl.cumsum(mine, 0) - 1, slot, mask=mine != 0)
        place += tl.sum(mine, 0)


@triton.jit
def experts_kernel(
    x_ptr, weight_ptr, x_scale_ptr, weight_scale_ptr, bias_ptr, out_ptr, slot_ptr, tile_ptr, num_outputs, x_stride,
    num_scales, SLOTS_OF_ROW: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, CHAINS: tl.constexpr, SWAPPED: tl.constexpr, X_FORMAT: tl.constexpr,
    WEIGHT_FORMAT: tl.constexpr, BLOCKS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A program: the slots of a tile by OUTPUTS outputs of its expert.

    out_ptr: [num_slots, num_outputs]. A row of x belongs to SLOTS_OF_ROW consecutive slots.
    num_scales: the scales of one expert's matrix.
    """
    tile = tile_ptr + tl.program_id(1) * 3
    expert = tl.load(tile).to(tl.int64)
    if expert < 0:
        return
    end = tl.load(tile + 2)
    place = tl.load(tile + 1) + tl.arange(0, ROWS)
    # Places after the last slot repeat it, and are not stored.
    slot = tl.load(slot_ptr + tl.minimum(place, end - 1))
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    matrix_ptr = weight_ptr + expert * num_outputs * SIZE
    if weight_scale_ptr is not None:
        weight_scale_ptr += expert * num_scales
    if bias_ptr is not None:
        bias_ptr += expert * num_outputs
    acc = product(
        x_ptr, matrix_ptr, x_scale_ptr, weight_scale_ptr, bias_ptr, slot // SLOTS_OF_ROW, output, num_outputs, x_stride,
        SIZE, ROWS, OUTPUTS, INPUTS, CHAINS, SWAPPED, X_FORMAT, WEIGHT_FORMAT, BLOCKS, DOT,
    )  # fmt: skip
    target = out_ptr + slot.to(tl.int64)[:, None] * num_outputs + output[None, :]
    live = (place < end)[:, None] & (output < num_outputs)[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def weigh_kernel(
    out_ptr,
    weight_ptr,
    base_ptr,
    total_ptr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """A program: BLOCK values of one row: base + the weighted sum of its slots, rounded once.

    Slots are added in order.
    """
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index < SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    if base_ptr is not None:
        total = tl.load(base_ptr + row * SIZE + index, mask=mask, other=0.0).to(tl.float32)
    for place in tl.static_range(TOP_K):
        slot = row * TOP_K + place
        out = tl.load(out_ptr + slot * SIZE + index, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(weight_ptr + slot) * out
    tl.store(total_ptr + row * SIZE + index, total.to(total_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Sorted:
    """Slots in the order of their experts, and tiles of `rows` slots, as `sort_kernel` writes them.

    slots: [num_slots] int32; tiles: [num_tiles, 3] int32
    """

    slots: Tensor
    tiles: Tensor
    rows: int


def sort_slots(ids: Tensor, num_experts: int, rows: int) -> Sorted:
    """Sort the slots of ids [num_rows, top_k] int32 by expert, in tiles of `rows`."""
    num_slots = ids.numel()
    # At most, each expert in use has one tile with a single slot, and the other tiles are full.
    used = min(num_experts, num_slots)
    num_tiles = used + (num_slots - used) // rows
    slots = ids.new_empty(num_slots)
    tiles = ids.new_empty(num_tiles, 3)
    sort_kernel[(num_experts,)](
        ids,
        slots,
        tiles,
        num_slots,
        num_tiles,
        NUM_EXPERTS=num_experts,
        # At least one bin more than experts, which counts the places after the last slot.
        BINS=next_power_of_2(num_experts + 1),
        BLOCK=SORTED,
        ROWS=rows,
        num_warps=4,
    )
    return Sorted(slots, tiles, rows)


def experts_tile(target: Target, stack: ExpertStack, dot: tl.dtype) -> Tile:
    """Choose the tile: 64 rows, for any number of rows.

    It costs nothing when there are only a few rows, because even with 64 rows reading the weights
    takes longer than multiplying.
    """
    blocks = stack.scale is not None and stack.scale.ndim == 3
    tile = matmul_tile(target, FEW_ROWS, stack.whole_outputs, blocks, dot)
    wide = stack.data.element_size() > 1 and tile.rows == FEW_ROWS
    return replace(tile, inputs=64) if wide else tile  # the same bytes of shared memory as with FP8


def multiply(
    target: Target,
    x: Tensor | Quantized,
    stack: ExpertStack,
    order: Sorted,
    tile: Tile,
    like: Tensor,
) -> Tensor:
    """Multiply each slot's row of x by its expert's matrix, [num_slots, out_features].

    x: [num_slots / n, in_features], plain or quantized for `stack.first`; each row is shared by n
    consecutive slots. The result has the dtype of `like`.
    """
    codes, x_scale = (x.codes, x.scale) if isinstance(x, Quantized) else (x, None)
    _, outputs, size = stack.data.shape
    num_slots = len(order.slots)
    out = like.new_empty(num_slots, outputs)
    experts_kernel[(cdiv(outputs, tile.outputs), len(order.tiles))](
        carrier(codes, target),
        carrier(stack.data, target),
        x_scale,
        stack.scale,
        stack.bias,
        out,
        order.slots,
        order.tiles,
        outputs,
        codes.stride(0),
        0 if stack.scale is None else stack.scale[0].numel(),
        SLOTS_OF_ROW=num_slots // len(codes),
        SIZE=size,
        X_FORMAT="" if x_scale is None else str(format_of(codes)),
        WEIGHT_FORMAT=str(format_of(stack.data)),
        BLOCKS=stack.scale is not None and stack.scale.ndim == 3,
        DOT=dot_type(target, codes, stack.first),
        **tile.constants,
    )
    return out


def weigh(out: Tensor, weights: Tensor, base: Tensor | None) -> Tensor:
    """Return base + the sum over a row's slots of weight * out, in float32, rounded once.

    out: [num_rows * top_k, size]; weights: float32 [num_rows, top_k]; base: [num_rows, size].
    """
    (rows, top_k) = weights.shape
    size = out.shape[1]
    total = out.new_empty(rows, size)
    block = min(1024, next_power_of_2(size))
    constants: dict[str, Any] = {"SIZE": size, "BLOCK": block, "TOP_K": top_k, "num_warps": 4}
    # Unfused: products are rounded before they are added, as in the reference.
    weigh_kernel[(rows, cdiv(size, block))](
        out, weights, base, total, **constants, enable_fp_fusion=False
    )
    return total


def experts(
    target: Target,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    layers: ExpertLayers,
    base: Tensor | None = None,
    adapters: Tensor | None = None,
    ranks: Ranks = ALONE,
) -> Tensor:
    """Compute `KernelSet.experts` in five launches, or six if x is quantized. Adapters add two
    launches to each product, and few of torch, none of which waits for the device.

    x: [rows, hidden_size], contiguous within a row. Several `ranks` gather the activated values of
    all slots before the second product, and the result after it.
    """
    gate_up = layers.gate_up
    down = layers.down
    assert isinstance(gate_up, ExpertStack)
    assert isinstance(down, ExpertStack)
    assert ids.is_contiguous()
    assert weights.is_contiguous()
    assert base is None or base.is_contiguous()
    rows = quantize(target, x, gate_up.first) if quantizes(gate_up.first) else x
    banks = None if adapters is None else layers.banks
    if base is not None and ranks.size > 1:
        base = base.chunk(ranks.size, 1)[ranks.rank].contiguous()  # of the outputs of this rank
    first, order = _sorted_product(target, rows, gate_up, ids, x)
    if banks is None and ranks.size == 1:
        hidden = elementwise.applied(target, first, layers.activation, down.first)
        out, _ = _sorted_product(target, hidden, down, ids, x, order)
        return weigh(out, weights, base)
    entries = None
    if banks is not None:
        assert adapters is not None
        entries = banks.entries(adapters[:, None], ids).flatten()  # by slot
        of_slots = x.repeat_interleave(ids.shape[1], 0)
        first = add_adapters(first, of_slots, banks.gate_up, entries)
    # adapters, and the scales of rows of several ranks, use the activations as they are
    activated = ranks.gather(as_tensor(elementwise.applied(target, first, layers.activation)))
    hidden = quantize(target, activated, down.first) if quantizes(down.first) else activated
    out, _ = _sorted_product(target, hidden, down, ids, x, order)
    if banks is not None:
        assert entries is not None
        out = add_adapters(out, activated, banks.down, entries)
    return ranks.gather(weigh(out, weights, base))


def _sorted_product(
    target: Target,
    rows: Tensor | Quantized,
    stack: ExpertStack,
    ids: Tensor,
    like: Tensor,
    order: Sorted | None = None,
) -> tuple[Tensor, Sorted]:
    """Return the `multiply` of each slot, and the order of slots: `order`, if its tiles have as many
    rows as those of this product.
    """
    codes = rows.codes if isinstance(rows, Quantized) else rows
    tile = experts_tile(target, stack, dot_type(target, codes, stack.first))
    if order is None or order.rows != tile.rows:
        order = sort_slots(ids, len(stack.data), tile.rows)
    return multiply(target, rows, stack, order, tile, like), order


@triton.jit(do_not_specialize=["num_rows"])
def heads_kernel(
    x_ptr, weight_ptr, out_ptr, num_rows, num_outputs, x_stride, head_stride, SIZE: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, CHAINS: tl.constexpr, SWAPPED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A program: ROWS rows of a head by OUTPUTS outputs.

    out_ptr: [num_rows, heads, num_outputs]
    """
    head = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    acc = product(
        x_ptr + head * head_stride, weight_ptr + head * num_outputs * SIZE, None, None, None,
        tl.minimum(row, num_rows - 1), output, num_outputs, x_stride, SIZE, ROWS, OUTPUTS, INPUTS, CHAINS, SWAPPED,
        "", "", False, DOT,
    )  # fmt: skip
    place = row.to(tl.int64) * tl.num_programs(2) + head
    target = out_ptr + place[:, None] * num_outputs + output[None, :]
    live = (row < num_rows)[:, None] & (output < num_outputs)[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=live)


def by_head(target: Target, x: Tensor, matrices: PackedExperts) -> Tensor:
    """Compute `KernelSet.by_head`."""
    assert isinstance(matrices, ExpertStack)
    rows = len(x)
    heads, outputs, size = matrices.data.shape
    assert x.shape == (rows, heads, size)
    assert x.stride(2) == 1 or size == 1
    assert x.dtype == matrices.data.dtype
    assert matrices.scale is None
    assert matrices.bias is None
    dot = dot_type(target, x, matrices.first)
    tile = matmul_tile(target, rows, matrices.whole_outputs, False, dot)
    if rows <= FEW_ROWS and dot != tl.float32:
        tile = replace(tile, inputs=tile.inputs // 2)  # the same bytes of shared memory as with FP8
    out = x.new_empty(rows, heads, outputs)
    heads_kernel[(cdiv(outputs, tile.outputs), cdiv(rows, tile.rows), heads)](
        x,
        matrices.data,
        out,
        rows,
        outputs,
        x.stride(0),
        x.stride(1),
        SIZE=size,
        DOT=dot,
        **tile.constants,
    )
    return out
