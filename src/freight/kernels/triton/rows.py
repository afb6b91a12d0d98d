"""Output rows as their consumer takes them: unchanged, or quantized to FP8 in the same kernel.

Quantization needs the amax of the full row, so one program writes a row. Attention merges each head
of a row in a separate program, which quantizes the head if that needs no other head's values;
otherwise the last program of a row quantizes the row. The fusion saves a launch and a pass over the
activations before a matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from freight.fp8.cast import format_of, torch_dtype
from freight.fp8.formats import Format
from freight.fp8.weights import BLOCK
from freight.kernels.triton.formats import Target, carrier, encode, finite_amax, scale_from_amax
from freight.kernels.triton.sizes import cdiv, next_power_of_2
from freight.operands.packed import PackedWeight, QuantizedRows
from freight.operands.weight import Activations, Weight


@dataclass(frozen=True)
class Quantized(QuantizedRows):
    """Rows in FP8: codes [rows, size], and float32 scales [rows, 1], or [rows, groups of 128] for
    block scales.

    `dtype` is that of the values before quantization, and of the results of products with them.
    """

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype


@triton.jit
def this_row(SIZE: tl.constexpr, BLOCK_GROUPS: tl.constexpr):
    """Return a program's row, its groups of 128, the indices of their values, and their mask."""
    group = tl.arange(0, BLOCK_GROUPS)
    index = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    return tl.program_id(0).to(tl.int64), group, index, index < SIZE


@triton.jit
def write_row(
    x, out_ptr, scale_ptr, static_scale, row, group, index, mask, SIZE: tl.constexpr, NUM_SCALES: tl.constexpr,
    FORMAT: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Write a row x [groups, 128] of the compute type.

    SCALES: '' (not quantized), 'row', 'group' or 'static'.
    """
    target = out_ptr + row * SIZE + index
    if SCALES == "":
        tl.store(target, x, mask=mask)
    else:
        x = x.to(tl.float32)
        if SCALES == "group":
            scale = scale_from_amax(finite_amax(x, 1), FORMAT)
            divisor = tl.broadcast_to(scale[:, None], x.shape)
            tl.store(scale_ptr + row * NUM_SCALES + group, scale, mask=group < NUM_SCALES)
        else:
            if SCALES == "row":
                scale = tl.max(scale_from_amax(finite_amax(x, 1), FORMAT), 0)
            else:
                scale = static_scale
            divisor = tl.zeros(x.shape, tl.float32) + scale
            filled = tl.zeros(group.shape, tl.float32) + scale
            tl.store(scale_ptr + row * NUM_SCALES + group, filled, mask=group < NUM_SCALES)
        tl.store(target, encode(tl.div_rn(x, divisor), out_ptr.dtype.element_ty, FORMAT), mask=mask)


@triton.jit
def write_head(
    x, out_ptr, scale_ptr, static_scale, row, head, dims, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    NUM_SCALES: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Write one head x [BLOCK] of a row of HEADS heads of DIM values, with the bits of `write_row`.

    SCALES: 'static', or 'group' if DIM is a multiple of 128; the row's groups are then those of
    HEADS rows of DIM values.
    """
    place = row * HEADS + head
    if SCALES == "static":
        target = out_ptr + place * DIM + dims
        code = encode(
            tl.div_rn(x.to(tl.float32), tl.zeros(x.shape, tl.float32) + static_scale),
            out_ptr.dtype.element_ty, FORMAT,
        )  # fmt: skip
        tl.store(target, code, mask=dims < DIM)
        if head == 0:
            for group in range(NUM_SCALES):
                tl.store(scale_ptr + row * NUM_SCALES + group, static_scale)
    else:
        group = tl.arange(0, BLOCK // 128)
        index = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        x = tl.reshape(x, index.shape)
        write_row(
            x,
            out_ptr,
            scale_ptr,
            static_scale,
            place,
            group,
            index,
            index < DIM,
            DIM,
            DIM // 128,
            FORMAT,
            SCALES,
        )


@triton.jit
def quantize_written_row(
    x_ptr, out_ptr, scale_ptr, static_scale, row, SIZE: tl.constexpr, NUM_SCALES: tl.constexpr, FORMAT: tl.constexpr,
    SCALES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Quantize the row at x_ptr with the bits of `write_row`, CHUNK groups of 128 at a time.

    With SCALES 'row' the row is read twice.
    """
    group = tl.arange(0, CHUNK)
    index = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    scale = static_scale
    if SCALES == "row":
        amax = tl.zeros((CHUNK,), tl.float32)
        for start in range(0, SIZE, CHUNK * 128):
            x = tl.load(x_ptr + start + index, mask=start + index < SIZE, other=0.0)
            amax = tl.maximum(amax, finite_amax(x.to(tl.float32), 1))
        scale = scale_from_amax(tl.max(amax, 0), FORMAT)
    WITH: tl.constexpr = "static" if SCALES == "row" else SCALES
    for start in range(0, SIZE, CHUNK * 128):
        mask = start + index < SIZE
        x = tl.load(x_ptr + start + index, mask=mask, other=0.0)
        write_row(
            x,
            out_ptr,
            scale_ptr,
            scale,
            row,
            start // 128 + group,
            start + index,
            mask,
            SIZE,
            NUM_SCALES,
            FORMAT,
            WITH,
        )


@triton.jit
def quantize_kernel(
    x_ptr, row_stride, out_ptr, scale_ptr, static_scale, SIZE: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    NUM_SCALES: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """A program: one row, in registers if it has at most BLOCK_GROUPS groups, else in chunks."""
    row, group, index, mask = this_row(SIZE, BLOCK_GROUPS)
    x_ptr += row * row_stride
    if SIZE <= BLOCK_GROUPS * 128:
        x = tl.load(x_ptr + index, mask=mask, other=0.0)
        write_row(
            x,
            out_ptr,
            scale_ptr,
            static_scale,
            row,
            group,
            index,
            mask,
            SIZE,
            NUM_SCALES,
            FORMAT,
            SCALES,
        )
    else:
        quantize_written_row(
            x_ptr,
            out_ptr,
            scale_ptr,
            static_scale,
            row,
            SIZE,
            NUM_SCALES,
            FORMAT,
            SCALES,
            BLOCK_GROUPS,
        )


WIDE = 32768  # values of the longest row that fits in the registers of one program
WIDE_GROUPS = 64  # groups of 128 of a longer row that are quantized at a time


def warps_for(block: int) -> int:
    """Return the number of warps with which a thread has about 16 of `block` values."""
    return min(16, max(1, block // 512))


def quantizes(consumer: PackedWeight | None) -> TypeGuard[Weight]:
    """Say whether `consumer` takes quantized rows."""
    return (
        isinstance(consumer, Weight)
        and consumer.scale is not None
        and consumer.activations is not Activations.PLAIN
    )


def allocate_output(
    target: Target, like: Tensor, size: int, consumer: PackedWeight | None
) -> tuple[Tensor | Quantized, tuple[Any, ...], dict[str, Any]]:
    """Allocate output for `consumer`, quantized if it takes quantized rows.

    The output has the rows and the dtype of `like`, and `size` columns. Also returns the arguments
    of `write_row`, (out_ptr, scale_ptr, static_scale), and its constants with `num_warps`.
    """
    rows = len(like)
    device = like.device
    groups = cdiv(size, BLOCK)
    block_groups = next_power_of_2(groups)
    constants: dict[str, Any] = {
        "SIZE": size,
        "BLOCK_GROUPS": block_groups,
        "num_warps": warps_for(block_groups * BLOCK),
    }
    if not quantizes(consumer):
        out = torch.empty(rows, size, dtype=like.dtype, device=device)
        return out, (out, None, 1.0), constants | {"NUM_SCALES": 0, "FORMAT": "", "SCALES": ""}
    assert consumer.scale is not None
    stored = format_of(consumer.data)
    format = stored if stored.is_e4m3 else Format.E4M3FN
    blocks = consumer.scale.ndim == 2
    static = consumer.activations is Activations.STATIC
    num_scales = groups if blocks else 1
    codes = torch.empty(rows, size, dtype=torch_dtype(format), device=device)
    scale = torch.empty(rows, num_scales, dtype=torch.float32, device=device)
    constants |= {"NUM_SCALES": num_scales, "FORMAT": str(format)}
    if static:
        constants["SCALES"] = "static"
    else:
        constants["SCALES"] = "group" if blocks else "row"
    pointers = (carrier(codes, target), scale, consumer.input_scale or 1.0)
    return Quantized(codes, scale, like.dtype), pointers, constants


def quantize(target: Target, x: Tensor, weight: Weight) -> Quantized:
    """Quantize x [rows, in_features], contiguous within a row, by the weight's `activations`."""
    assert quantizes(weight)
    result, pointers, constants = allocate_output(target, x, x.shape[1], weight)
    assert isinstance(result, Quantized)
    if x.shape[1] > WIDE:
        constants |= {"BLOCK_GROUPS": WIDE_GROUPS, "num_warps": warps_for(WIDE_GROUPS * BLOCK)}
    quantize_kernel[(len(x),)](x, x.stride(0), *pointers, **constants)
    return result
