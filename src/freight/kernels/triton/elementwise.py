"""Row-wise operations: residual addition with RMSNorm, SiLU of the gate times up. float32 inside, rounded where the
reference rounds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_rms_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, sum_ptr, out_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program: one row. Without delta_ptr the sum is x, and not written."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    index = tl.arange(0, BLOCK)
    mask = index < SIZE
    stored = tl.load(x_ptr + row + index, mask=mask, other=0.0)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + row + index, mask=mask, other=0.0)
        stored = (stored.to(tl.float32) + delta.to(tl.float32)).to(stored.dtype)
        tl.store(sum_ptr + row + index, stored, mask=mask)
    x = stored.to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)).to(stored.dtype)
    weight = tl.load(weight_ptr + index, mask=mask, other=0.0)
    result = (weight.to(tl.float32) * normed.to(tl.float32)).to(stored.dtype)
    tl.store(out_ptr + row + index, result, mask=mask)


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


def warps_for(block: int) -> int:
    """So many that a thread has about 16 values."""
    return min(16, max(1, block // 512))


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`reference.add_rms_norm`. x, delta: [rows, size], contiguous."""
    assert x.is_contiguous()
    assert delta is None or delta.is_contiguous()
    rows, size = x.shape
    total = x if delta is None else torch.empty_like(x)
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    add_rms_norm_kernel[(rows,)](x, delta, weight, total, out, eps, SIZE=size, BLOCK=block, num_warps=warps_for(block))
    return total, out


def silu_mul(gate_up: Tensor) -> Tensor:
    """`reference.silu_mul`. gate_up: [rows, 2 * intermediate], contiguous."""
    assert gate_up.is_contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    block = min(1024, triton.next_power_of_2(size))
    silu_mul_kernel[(rows, triton.cdiv(size, block))](gate_up, out, SIZE=size, BLOCK=block, num_warps=4)
    return out
