"""Gates of results, decays of states, gated norms, and norms of concatenated columns.

Computed in float32, rounded where the reference rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from freight.fp8.weights import BLOCK
from freight.kernels.triton.elementwise import weighted
from freight.kernels.triton.formats import Target
from freight.kernels.triton.rows import (
    WIDE,
    Quantized,
    allocate_output,
    quantize,
    quantizes,
    this_row,
    warps_for,
    write_row,
)
from freight.kernels.triton.sizes import cdiv, next_power_of_2
from freight.operands.activation import GateFunction
from freight.operands.packed import JoinedPart, PackedWeight
from freight.operands.recurrence import DecayParameters, GatedNorm


@triton.jit
def _factor(logit, FUNCTION: tl.constexpr):
    """Return function(logit), float32. FUNCTION: a `GateFunction`'s name."""
    if FUNCTION == "identity":
        return logit
    e = tl.exp(-tl.abs(logit))
    if FUNCTION == "sigmoid":
        return tl.where(logit < 0, e, 1.0) / (1.0 + e)
    # ln(1 + e) = 2 artanh(s), whose series has an error below 2 ** -28 after these terms.
    s = e / (2.0 + e)
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
    x_ptr,
    x_stride,
    weight_ptr,
    out_ptr,
    out_column,
    out_stride,
    eps,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program: GROUP columns of one row, normed where there is a weight."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * GROUP
    index = tl.arange(0, BLOCK)
    mask = index < GROUP
    stored = tl.load(x_ptr + row * x_stride + column + index, mask=mask, other=0.0)
    if weight_ptr is not None:
        x = stored.to(tl.float32)
        weight = tl.load(weight_ptr + index, mask=mask, other=0.0)
        stored = weighted(x * tl.rsqrt(tl.sum(x * x, 0) / GROUP + eps), weight, stored.dtype)
    tl.store(out_ptr + row * out_stride + out_column + column + index, stored, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def decays_kernel(
    a_ptr, a_stride, b_ptr, b_stride, a_log_ptr, dt_bias_ptr, least, most, bound, beta_ptr, decay_ptr, rows,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program: BLOCK values of all rows, heads, and K_DIM channels (1: one decay per head)."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < rows * (HEADS * K_DIM)
    row = (index // (HEADS * K_DIM)).to(tl.int64)
    column = index % (HEADS * K_DIM)
    head = column // K_DIM
    a = tl.load(a_ptr + row * a_stride + column, mask=mask, other=0.0).to(tl.float32)
    a += tl.load(dt_bias_ptr + column, mask=mask, other=0.0)
    rate = tl.exp(tl.load(a_log_ptr + head, mask=mask, other=0.0))
    dt = _factor(a, "softplus")
    dt = tl.maximum(dt, least, propagate_nan=tl.PropagateNan.ALL)
    dt = tl.minimum(dt, most, propagate_nan=tl.PropagateNan.ALL)
    log_decay = -rate * dt
    beta = dt
    if bound is not None:
        log_decay = bound * _factor(rate * a, "sigmoid")
    if b_ptr is not None:
        beta = _factor(
            tl.load(b_ptr + row * b_stride + head, mask=mask, other=0.0).to(tl.float32), "sigmoid"
        )
    tl.store(beta_ptr + row * HEADS + head, beta, mask=mask & (column % K_DIM == 0))
    tl.store(decay_ptr + index, log_decay, mask=mask)


@triton.jit
def _gated_norm(
    x, gate, weight, eps, GROUP: tl.constexpr, WHOLE: tl.constexpr, NORM_FIRST: tl.constexpr
):
    """Return the gated norm of x [groups, values], in x's type.

    Each group is normed separately, or with WHOLE all of x together.
    """
    factor = gate.to(tl.float32)
    factor = factor / (1.0 + tl.exp(-factor))
    values = x.to(tl.float32)
    if not NORM_FIRST:
        values *= factor
    squares = tl.sum(values * values, 1)
    if WHOLE:
        squares = tl.zeros(squares.shape, tl.float32) + tl.sum(squares, 0)
    normed = weighted(values * tl.rsqrt(squares / GROUP + eps)[:, None], weight, x.dtype)
    if NORM_FIRST:
        normed = (normed.to(tl.float32) * factor).to(x.dtype)
    return normed


@triton.jit
def gated_norm_row_kernel(
    x_ptr, x_stride, gate_ptr, gate_stride, weight_ptr, eps, out_ptr, scale_ptr, static_scale, SIZE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, NUM_SCALES: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, REPEATED: tl.constexpr, NORM_FIRST: tl.constexpr,
):  # fmt: skip
    """A program: one row, normed together or by 128. REPEATED: all groups have the same weight."""
    row, group, index, mask = this_row(SIZE, BLOCK_GROUPS)
    x = tl.load(x_ptr + row * x_stride + index, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + index, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + (index % GROUP if REPEATED else index), mask=mask, other=0.0)
    result = _gated_norm(x, gate, weight, eps, GROUP, GROUP == SIZE, NORM_FIRST)
    write_row(
        result,
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


@triton.jit
def gated_norm_kernel(
    x_ptr, x_stride, gate_ptr, gate_stride, weight_ptr, eps, out_ptr, SIZE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, REPEATED: tl.constexpr, NORM_FIRST: tl.constexpr,
):  # fmt: skip
    """A program: one group of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * GROUP
    index = tl.arange(0, BLOCK)[None, :]
    mask = index < GROUP
    x = tl.load(x_ptr + row * x_stride + column + index, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + column + index, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + (index if REPEATED else column + index), mask=mask, other=0.0)
    result = _gated_norm(x, gate, weight, eps, GROUP, False, NORM_FIRST)
    tl.store(out_ptr + row * SIZE + column + index, result, mask=mask)


def gate(x: Tensor, logits: Tensor, function: GateFunction) -> Tensor:
    """Compute `KernelSet.gate`.

    x: [rows, size]; logits: [rows, groups] or [1, groups]; both contiguous within a row
    """
    rows, size = x.shape
    assert x.stride(1) == 1 or size == 1
    assert logits.stride(1) == 1 or logits.shape[1] == 1
    assert len(logits) in (1, rows)
    out = x.new_empty(rows, size)
    block = min(1024, next_power_of_2(size))
    constants = {
        "SIZE": size,
        "GROUP": size // logits.shape[1],
        "BLOCK": block,
        "FUNCTION": str(function),
    }
    stride = logits.stride(0) if len(logits) == rows else 0
    gate_kernel[(rows, cdiv(size, block))](
        x, x.stride(0), logits, stride, out, **constants, num_warps=4
    )
    return out


def join(parts: Sequence[JoinedPart], eps: float = 0.0) -> Tensor:
    """Compute `KernelSet.join`, one launch for each part. Each x is contiguous within a row."""
    leading = parts[0][0].shape[:-1]
    width = sum(x.shape[-1] for x, _ in parts)
    rows = leading.numel()
    out = parts[0][0].new_empty(*leading, width)
    column = 0
    for heads, weight in parts:
        x = heads.flatten(0, -2)
        group = x.shape[1] if weight is None else len(weight)
        block = next_power_of_2(group)
        constants = {"GROUP": group, "BLOCK": block, "num_warps": warps_for(block)}
        pointers = (x, x.stride(0), weight, out, column, width, eps)
        part_kernel[(rows, x.shape[1] // group)](*pointers, **constants)
        column += x.shape[1]
    return out


def decays(a: Tensor, b: Tensor | None, parameters: DecayParameters) -> tuple[Tensor, Tensor]:
    """Compute `KernelSet.decays`. a, b: contiguous within a row."""
    assert a.stride(1) == 1
    assert b is None or b.stride(1) == 1
    a_log = parameters.a_log
    dt_bias = parameters.dt_bias
    bound = parameters.bound
    rows = len(a)
    heads = len(a_log)
    channels = len(dt_bias)
    assert b is not None or (channels == heads and bound is None)
    each = (heads, channels // heads) if channels != heads else (heads,)
    beta = a_log.new_empty(rows, heads)
    decay = a_log.new_empty(rows, *each)
    block = 256
    inputs = (
        a,
        a.stride(0),
        b,
        0 if b is None else b.stride(0),
        a_log,
        dt_bias,
        *map(float, parameters.limits),
    )
    decays_kernel[(cdiv(rows * channels, block),)](
        *inputs,
        None if bound is None else float(bound),
        beta,
        decay,
        rows,
        HEADS=heads,
        K_DIM=channels // heads,
        BLOCK=block,
        num_warps=4,
    )
    return beta, decay


def gated_norm(
    target: Target,
    x: Tensor,
    gate: Tensor,
    norm: GatedNorm,
    consumer: PackedWeight | None = None,
) -> Tensor | Quantized:
    """Compute `KernelSet.gated_norm`, quantized if `consumer` takes quantized rows.

    x, gate: contiguous within a row. If a row is normed together, or in groups of 128 as Freight
    quantizes, norm and quantization are one launch. The choice of the kernel does not depend on
    `consumer`.
    """
    assert x.stride(1) == gate.stride(1) == 1
    rows, size = x.shape
    group = norm.group
    inputs = (x, x.stride(0), gate, gate.stride(0), norm.weight, norm.eps)
    form = {"GROUP": group, "REPEATED": len(norm.weight) < size, "NORM_FIRST": norm.norm_first}
    if group in (BLOCK, size) and size <= WIDE:
        result, pointers, constants = allocate_output(target, x, size, consumer)
        gated_norm_row_kernel[(rows,)](*inputs, *pointers, **constants, **form)
        return result
    out = x.new_empty(rows, size)
    block = next_power_of_2(group)
    sizes: dict[str, Any] = {
        "SIZE": size,
        "BLOCK": block,
        "num_warps": warps_for(block),
    }
    gated_norm_kernel[(rows, size // group)](*inputs, out, **sizes, **form)
    return quantize(target, out, consumer) if quantizes(consumer) else out
