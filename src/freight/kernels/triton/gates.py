"""Gates of results, and columns that are normed on their own and put side by side.

Computed in float32, rounded where the reference rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from freight.kernels.triton.elementwise import weighted
from freight.operands.activation import GateFunction


@triton.jit
def _factor(logit, FUNCTION: tl.constexpr):
    """The factor that a logit (float32) gives. FUNCTION: a `GateFunction`'s name."""
    if FUNCTION == "identity":
        return logit
    e = tl.exp(-tl.abs(logit))
    if FUNCTION == "sigmoid":
        return tl.where(logit < 0, e, 1.0) / (1.0 + e)
    s = e / (2.0 + e)  # ln(1 + e) = 2 artanh(s), whose series has an error below 2 ** -28 after these terms
    square = s * s
    total = 1.0 / 15.0
    for divisor in tl.static_range(13, 0, -2):
        total = total * square + 1.0 / divisor
    return tl.where(logit < 0, 0.0, logit) + 2.0 * s * total


@triton.jit
def gate_kernel(
    x_ptr, x_stride, logits_ptr, logits_stride, out_ptr, SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    FUNCTION: tl.constexpr,
):  # fmt: skip
    """A program: BLOCK values of one row."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index < SIZE
    x = tl.load(x_ptr + row * x_stride + index, mask=mask, other=0.0)
    logit = tl.load(logits_ptr + row * logits_stride + index // GROUP, mask=mask, other=0.0)
    result = x.to(tl.float32) * _factor(logit.to(tl.float32), FUNCTION)
    tl.store(out_ptr + row * SIZE + index, result.to(x.dtype), mask=mask)


@triton.jit
def part_kernel(
    x_ptr, x_stride, weight_ptr, out_ptr, out_column, out_stride, eps, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """A program: GROUP columns of one row, normed where there is a weight."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUP
    index = tl.arange(0, BLOCK)
    mask = index < GROUP
    stored = tl.load(x_ptr + row * x_stride + column + index, mask=mask, other=0.0)
    if weight_ptr is not None:
        x = stored.to(tl.float32)
        weight = tl.load(weight_ptr + index, mask=mask, other=0.0)
        stored = weighted(x * tl.rsqrt(tl.sum(x * x, 0) / GROUP + eps), weight, stored.dtype)
    tl.store(out_ptr + row * out_stride + out_column + column + index, stored, mask=mask)


def gate(x: Tensor, logits: Tensor, function: GateFunction) -> Tensor:
    """`reference_rows.gate`. x: [rows, size]; logits: [rows, groups] or [1, groups]; columns of both contiguous."""
    rows, size = x.shape
    assert x.stride(1) == 1 or size == 1
    assert logits.stride(1) == 1 or logits.shape[1] == 1
    assert len(logits) in (1, rows)
    out = x.new_empty(rows, size)
    block = min(1024, triton.next_power_of_2(size))
    constants = {"SIZE": size, "GROUP": size // logits.shape[1], "BLOCK": block, "FUNCTION": str(function)}
    stride = logits.stride(0) if len(logits) == rows else 0
    gate_kernel[(rows, triton.cdiv(size, block))](x, x.stride(0), logits, stride, out, **constants, num_warps=4)
    return out


def join(parts: Sequence[tuple[Tensor, Tensor | None]], eps: float = 0.0) -> Tensor:
    """`reference_rows.join`. Each x: [rows, size], its columns one after another in memory."""
    rows, width = len(parts[0][0]), sum(x.shape[1] for x, _ in parts)
    out = parts[0][0].new_empty(rows, width)
    column = 0
    for x, weight in parts:
        group = x.shape[1] if weight is None else len(weight)
        block = triton.next_power_of_2(group)
        constants = {"GROUP": group, "BLOCK": block, "num_warps": min(16, max(1, block // 512))}
        pointers = (x, x.stride(0), weight, out, column, width, eps)
        part_kernel[(rows, x.shape[1] // group)](*pointers, **constants)
        column += x.shape[1]
    return out
