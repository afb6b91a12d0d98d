"""Residual addition fused with RMSNorm or LayerNorm, and activations; FP8 out for FP8 consumers.

Computed in float32, rounded where the reference rounds.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from freight.kernels.triton.formats import Target
from freight.kernels.triton.rows import (
    WIDE,
    Quantized,
    allocate_output,
    quantize,
    quantizes,
    this_row,
    write_row,
)
from freight.kernels.triton.sizes import cdiv, next_power_of_2
from freight.operands.activation import Activation, AnyActivation, GatedActivation
from freight.operands.packed import PackedWeight


@triton.jit
def weighted(normed, weight, like: tl.constexpr):
    """Return normed (float32) * weight, in type `like`.

    A weight of type `like` multiplies the rounded `normed`; a float32 weight multiplies it as it
    is.
    """
    if weight.dtype == like:
        normed = normed.to(like).to(tl.float32)
    return (weight.to(tl.float32) * normed).to(like)


@triton.jit
def _rms_norm(stored, weight_ptr, eps, index, mask, SIZE: tl.constexpr):
    """Return the RMSNorm of a row, in its type."""
    x = stored.to(tl.float32)
    weight = tl.load(weight_ptr + index, mask=mask, other=0.0)
    return weighted(x * tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / SIZE + eps), weight, stored.dtype)


@triton.jit
def add_rms_norm_kernel(
    x_ptr, delta_ptr, delta_weight_ptr, weight_ptr, sum_ptr, eps, out_ptr, scale_ptr, static_scale, SIZE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, NUM_SCALES: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """A program: one row.

    Without delta_ptr the sum is x, and not written; with delta_weight_ptr delta is normed first.
    """
    row, group, index, mask = this_row(SIZE, BLOCK_GROUPS)
    stored = tl.load(x_ptr + row * SIZE + index, mask=mask, other=0.0)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + row * SIZE + index, mask=mask, other=0.0)
        if delta_weight_ptr is not None:
            delta = _rms_norm(delta, delta_weight_ptr, eps, index, mask, SIZE)
        stored = (stored.to(tl.float32) + delta.to(tl.float32)).to(stored.dtype)
        tl.store(sum_ptr + row * SIZE + index, stored, mask=mask)
    result = _rms_norm(stored, weight_ptr, eps, index, mask, SIZE)
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
def add_layer_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, bias_ptr, sum_ptr, eps, out_ptr, scale_ptr, static_scale, SIZE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, NUM_SCALES: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """A program: one row. Without delta_ptr the sum is x, and not written."""
    row, group, index, mask = this_row(SIZE, BLOCK_GROUPS)
    stored = tl.load(x_ptr + row * SIZE + index, mask=mask, other=0.0)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + row * SIZE + index, mask=mask, other=0.0)
        stored = (stored.to(tl.float32) + delta.to(tl.float32)).to(stored.dtype)
        tl.store(sum_ptr + row * SIZE + index, stored, mask=mask)
    x = stored.to(tl.float32)
    x = tl.where(mask, x - tl.sum(tl.sum(x, 1), 0) / SIZE, 0.0)
    normed = x * tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / SIZE + eps)
    weight = tl.load(weight_ptr + index, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + index, mask=mask, other=0.0).to(tl.float32)
    result = (normed * weight + bias).to(stored.dtype)
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
def _gelu(x):
    """Return x / 2 * (1 + erf(x / sqrt(2))) of float32.

    erfc(z) for z >= 0 is t * e ** (-z² + p(t)), t = 1 / (1 + z / 2), within 1.2e-7 of itself (Press
    et al., "Numerical Recipes", 6.2); half of it is the factor of x < 0 at z = -x / sqrt(2).
    """
    t = 1.0 / (1.0 + 0.353553390593 * tl.abs(x))
    p = -0.82215223 + t * 0.17087277
    p = -1.13520398 + t * (1.48851587 + t * p)
    p = -0.18628806 + t * (0.27886807 + t * p)
    p = 0.37409196 + t * (0.09678418 + t * p)
    p = -1.26551223 + t * (1.00002368 + t * p)
    tail = 0.5 * t * tl.exp(p - 0.5 * x * x)
    return x * tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def _gated(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    """Return activation(gate) * up in their type.

    ACTIVATION, LIMIT: function and limit of a `GatedActivation`.
    """
    value = gate.to(tl.float32)
    factor = up.to(tl.float32)
    exponent = value
    if ACTIVATION == "clamped_swiglu":  # 7 and 1.702 are those of gpt-oss
        value = tl.minimum(value, 7.0, propagate_nan=tl.PropagateNan.ALL)
        factor = tl.minimum(factor, 7.0, propagate_nan=tl.PropagateNan.ALL)
        factor = tl.maximum(factor, -7.0, propagate_nan=tl.PropagateNan.ALL) + 1.0
        exponent = 1.702 * value
    if ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 = 1 / (1 + e ** -2u)
        # 2 * sqrt(2 / pi) * (value + 0.044715 value ** 3)
        exponent = 1.5957691216057308 * (value + 0.044715 * value * value * value)
    if ACTIVATION == "geglu":
        value = _gelu(value)
    else:
        value = value / (1.0 + tl.exp(-exponent))
    if ACTIVATION == "clamped_silu":
        value = tl.minimum(value, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        factor = tl.minimum(factor, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        factor = tl.maximum(factor, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return (value * factor).to(gate.dtype)


@triton.jit
def _applied(
    x_ptr, row, index, mask, SIZE: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr
):
    """Return the activation of values `index` of a row, in their type.

    ACTIVATION: that of `_gated`, whose rows are gate, then up, or an `Activation`'s name.
    """
    if ACTIVATION == "gelu":
        x = tl.load(x_ptr + row * SIZE + index, mask=mask, other=0.0)
        result = _gelu(x.to(tl.float32)).to(x.dtype)
    elif ACTIVATION == "relu" or ACTIVATION == "relu_squared":
        x = tl.load(x_ptr + row * SIZE + index, mask=mask, other=0.0)
        positive = tl.maximum(x.to(tl.float32), 0.0, propagate_nan=tl.PropagateNan.ALL)
        result = (positive * positive if ACTIVATION == "relu_squared" else positive).to(x.dtype)
    else:
        gate = tl.load(x_ptr + row * 2 * SIZE + index, mask=mask, other=0.0)
        up = tl.load(x_ptr + row * 2 * SIZE + SIZE + index, mask=mask, other=0.0)
        result = _gated(gate, up, ACTIVATION, LIMIT)
    return result


@triton.jit
def activation_kernel(
    x_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """A program: BLOCK values of one row."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index < SIZE
    result = _applied(x_ptr, row, index, mask, SIZE, ACTIVATION, LIMIT)
    tl.store(out_ptr + row * SIZE + index, result, mask=mask)


@triton.jit
def activation_row_kernel(
    x_ptr, out_ptr, scale_ptr, static_scale, SIZE: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    NUM_SCALES: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr, ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """A program: one row."""
    row, group, index, mask = this_row(SIZE, BLOCK_GROUPS)
    result = _applied(x_ptr, row, index, mask, SIZE, ACTIVATION, LIMIT)
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


def add_rms_norm(
    target: Target,
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    consumer: PackedWeight | None = None,
    delta_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor | Quantized]:
    """Compute `KernelSet.add_rms_norm`; quantize the norm if `consumer` takes quantized rows.

    x, delta: [rows, size], contiguous
    """
    assert x.is_contiguous()
    assert delta is None or delta.is_contiguous()
    assert delta is not None or delta_weight is None
    rows, size = x.shape
    total = x if delta is None else torch.empty_like(x)
    out, pointers, constants = allocate_output(target, x, size, consumer)
    # Fused, a norm's last multiplication and the sum would be one, without the rounding in between.
    add_rms_norm_kernel[(rows,)](
        x, delta, delta_weight, weight, total, eps, *pointers, **constants,
        enable_fp_fusion=delta_weight is None,
    )  # fmt: skip
    return total, out


def add_layer_norm(
    target: Target,
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    consumer: PackedWeight | None = None,
) -> tuple[Tensor, Tensor | Quantized]:
    """Compute `KernelSet.add_layer_norm`; quantize the norm if `consumer` takes quantized rows.

    x, delta: [rows, size], contiguous
    """
    assert x.is_contiguous()
    assert delta is None or delta.is_contiguous()
    rows, size = x.shape
    total = x if delta is None else torch.empty_like(x)
    out, pointers, constants = allocate_output(target, x, size, consumer)
    add_layer_norm_kernel[(rows,)](x, delta, weight, bias, total, eps, *pointers, **constants)
    return total, out


def applied(
    target: Target, x: Tensor, activation: AnyActivation, consumer: PackedWeight | None = None
) -> Tensor | Quantized:
    """Compute `activated` or `gated`, by the kind of `activation`."""
    if isinstance(activation, Activation):
        return activated(target, x, activation, consumer)
    return gated(target, x, activation, consumer)


def activated(
    target: Target, x: Tensor, activation: Activation, consumer: PackedWeight | None = None
) -> Tensor | Quantized:
    """Compute `KernelSet.activated`, quantized if `consumer` takes quantized rows.

    x: [rows, size], contiguous
    """
    return _apply(target, x, x.shape[1], {"ACTIVATION": str(activation), "LIMIT": 0.0}, consumer)


def gated(
    target: Target,
    gate_up: Tensor,
    activation: GatedActivation,
    consumer: PackedWeight | None = None,
) -> Tensor | Quantized:
    """Compute `KernelSet.gated`, quantized if `consumer` takes quantized rows.

    gate_up: [rows, 2 * size], gate first, contiguous
    """
    named = {"ACTIVATION": str(activation.function), "LIMIT": activation.limit}
    return _apply(target, gate_up, gate_up.shape[1] // 2, named, consumer)


def _apply(
    target: Target, x: Tensor, size: int, named: dict[str, Any], consumer: PackedWeight | None
) -> Tensor | Quantized:
    """Apply the activation with the constants `named` to rows; the result is [rows, size]."""
    assert x.is_contiguous()
    rows = len(x)
    if quantizes(consumer) and size <= WIDE:
        result, pointers, constants = allocate_output(target, x, size, consumer)
        activation_row_kernel[(rows,)](x, *pointers, **constants, **named)
        return result
    out = x.new_empty(rows, size)
    block = min(1024, next_power_of_2(size))
    activation_kernel[(rows, cdiv(size, block))](
        x, out, SIZE=size, BLOCK=block, **named, num_warps=4
    )
    return quantize(target, out, consumer) if quantizes(consumer) else out
