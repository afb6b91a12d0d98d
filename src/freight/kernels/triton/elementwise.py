"""Row-wise operations: RMSNorm, SiLU of the gate times up, rotary embedding. float32 inside, one rounding after it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, eps, row_stride, head_stride, HEADS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program: one vector of SIZE values."""
    vector = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    mask = index < SIZE
    source = x_ptr + vector // HEADS * row_stride + vector % HEADS * head_stride
    stored = tl.load(source + index, mask=mask, other=0.0)
    x = stored.to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)).to(stored.dtype)
    weight = tl.load(weight_ptr + index, mask=mask, other=0.0)
    result = (weight.to(tl.float32) * normed.to(tl.float32)).to(stored.dtype)
    tl.store(out_ptr + vector * SIZE + index, result, mask=mask)


@triton.jit
def silu_mul_kernel(x_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program: BLOCK values of one row."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index < SIZE
    gate = tl.load(x_ptr + row * 2 * SIZE + index, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * 2 * SIZE + SIZE + index, mask=mask, other=0.0).to(tl.float32)
    value = gate.to(tl.float32)
    result = value / (1.0 + tl.exp(-value)) * up
    tl.store(out_ptr + row * SIZE + index, result.to(gate.dtype), mask=mask)


@triton.jit
def rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, row_stride, head_stride, HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """A program: BLOCK_HEADS heads of one row."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    index = tl.arange(0, BLOCK_HALF)
    inside = index < HALF
    mask = (heads < HEADS)[:, None] & inside[None, :]
    cos = tl.load(cos_ptr + row * HALF + index, mask=inside, other=0.0)[None, :]
    sin = tl.load(sin_ptr + row * HALF + index, mask=inside, other=0.0)[None, :]
    source = x_ptr + row * row_stride + heads[:, None] * head_stride + index[None, :]
    stored = tl.load(source, mask=mask, other=0.0)
    first = stored.to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    target = out_ptr + (row * HEADS + heads)[:, None] * (2 * HALF) + index[None, :]
    tl.store(target, (first * cos - second * sin).to(stored.dtype), mask=mask)
    tl.store(target + HALF, (second * cos + first * sin).to(stored.dtype), mask=mask)


def warps_for(block: int) -> int:
    """So many that a thread has about 16 values."""
    return min(16, max(1, block // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`reference.rms_norm`. x: [rows, size] or [rows, heads, size], its last dimension contiguous."""
    assert x.stride(-1) == 1
    heads, size = (1 if x.ndim == 2 else x.shape[1]), x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    rms_norm_kernel[(x.shape[0] * heads,)](
        *(x, weight, out, eps, x.stride(0), x.stride(-2)),
        HEADS=heads,
        SIZE=size,
        BLOCK=block,
        num_warps=warps_for(block),
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """`reference.silu_mul`. gate_up: [rows, 2 * intermediate], contiguous."""
    assert gate_up.is_contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    block = min(1024, triton.next_power_of_2(size))
    silu_mul_kernel[(rows, triton.cdiv(size, block))](gate_up, out, SIZE=size, BLOCK=block, num_warps=4)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`reference.rotate`. x: [rows, heads, head_dim], its last dimension contiguous; cos and sin contiguous."""
    assert x.stride(2) == 1
    rows, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_half = triton.next_power_of_2(dim // 2)
    block_heads = min(triton.next_power_of_2(heads), max(1, 2048 // block_half))
    rotate_kernel[(rows, triton.cdiv(heads, block_heads))](
        *(x, cos, sin, out, x.stride(0), x.stride(1)),
        HEADS=heads,
        BLOCK_HEADS=block_heads,
        HALF=dim // 2,
        BLOCK_HALF=block_half,
        num_warps=warps_for(block_heads * block_half),
    )
    return out
