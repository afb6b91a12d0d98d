"""Rotate-and-store: queries normed and rotated, keys and values into their pages; one launch, every value read once.

A head is worked on as its two halves, whose values rotary embedding pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freight.kernels.triton.formats import Target, carrier, encode, finite_amax, scale_from_amax
from freight.kernels.triton.rows import warps_for
from freight.operands.kv_pages import KVPages
from freight.operands.rotary import Rotary


@triton.jit
def _weighted(x, scale, weight_ptr, index, inside):
    """x * scale, then times the weight; rounded to x's type after each."""
    normed = (x.to(tl.float32) * scale).to(x.dtype)
    weight = tl.load(weight_ptr + index, mask=inside, other=0.0)
    return (weight.to(tl.float32)[None, :] * normed.to(tl.float32)).to(x.dtype)


@triton.jit
def _normed(first, second, weight_ptr, eps, index, inside, HALF: tl.constexpr):
    """RMSNorm of each row (first, second)."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
    return (
        _weighted(first, scale, weight_ptr, index, inside),
        _weighted(second, scale, weight_ptr + HALF, index, inside),
    )


@triton.jit
def _centered(x, center_ptr, index, inside):
    center = tl.load(center_ptr + index, mask=inside, other=0.0)
    return (x.to(tl.float32) - center[None, :]).to(x.dtype)


@triton.jit
def _rotated(first, second, cos, sin):
    a, b = first.to(tl.float32), second.to(tl.float32)
    return (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)


@triton.jit
def _encoded(x, scale, target, mask, like: tl.constexpr, FORMAT: tl.constexpr):
    """Store x / scale (x if scale is None) at `target`; returns how many values are clipped."""
    LAST: tl.constexpr = 61440.0 if FORMAT == "fp8_e5m2" else (248.0 if FORMAT == "fp8_e4m3fnuz" else 464.0)
    quotient = x.to(tl.float32)
    if scale is not None:
        quotient = tl.div_rn(quotient, tl.broadcast_to(scale, x.shape))
    tl.store(target, encode(quotient, like, FORMAT), mask=mask)
    return tl.sum(((tl.abs(quotient) > LAST) & mask).to(tl.int32))


@triton.jit
def _store(
    first, second, page_ptr, scale_ptr, counters_ptr, slots, head, index, mask, HEADS: tl.constexpr,
    HALF: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Store one head of a tile of rows of K or of V; `mask` leaves out slots that are negative."""
    place = slots * HEADS + head  # of the vector, among all vectors of the page
    target = page_ptr + place[:, None] * (2 * HALF) + index[None, :]
    like: tl.constexpr = page_ptr.dtype.element_ty
    if FORMAT == "":
        tl.store(target, first.to(like), mask=mask)
        tl.store(target + HALF, second.to(like), mask=mask)
    else:
        low = None
        high = None
        if SCALES == "token":
            amax = tl.maximum(finite_amax(first.to(tl.float32), 1), finite_amax(second.to(tl.float32), 1))
            scale = scale_from_amax(amax, FORMAT).to(tl.bfloat16)
            tl.store(scale_ptr + place, scale, mask=slots >= 0)
            low = scale.to(tl.float32)[:, None]
            high = low
        elif SCALES == "static":
            low = tl.load(scale_ptr + head * (2 * HALF) + index, mask=index < HALF, other=1.0)[None, :]
            high = tl.load(scale_ptr + head * (2 * HALF) + HALF + index, mask=index < HALF, other=1.0)[None, :]
        beyond = _encoded(first, low, target, mask, like, FORMAT)
        beyond += _encoded(second, high, target + HALF, mask, like, FORMAT)
        tl.atomic_add(counters_ptr + 1, beyond.to(tl.int64), mask=beyond > 0, sem="relaxed")
    a, b = first.to(tl.float32), second.to(tl.float32)
    nans = tl.sum((((a != a) & mask).to(tl.int32)) + ((b != b) & mask).to(tl.int32))
    tl.atomic_add(counters_ptr, nans.to(tl.int64), mask=nans > 0, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def rotate_store_kernel(
    qkv_ptr, q_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps, k_center_ptr,
    v_center_ptr, k_page_ptr, v_page_ptr, k_scale_ptr, v_scale_ptr, counters_ptr, num_rows, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, ROWS: tl.constexpr, FORMAT: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """A program: ROWS rows of one head of q, of k or of v. FORMAT '' is 16 or 32 bits; SCALES '', 'static', 'token'."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    index = tl.arange(0, BLOCK_HALF)
    inside = index < HALF
    live = rows < num_rows
    slots = tl.load(slots_ptr + rows, mask=live, other=-1)
    kept = (slots >= 0)[:, None] & inside[None, :]
    mask = live[:, None] & inside[None, :]
    source = qkv_ptr + (rows.to(tl.int64) * (HEADS + 2 * KV_HEADS) + head)[:, None] * (2 * HALF) + index[None, :]
    first = tl.load(source, mask=mask, other=0.0)
    second = tl.load(source + HALF, mask=mask, other=0.0)
    if head < HEADS + KV_HEADS:
        turn = tl.load(positions_ptr + rows, mask=live, other=0)[:, None] * HALF + index[None, :]
        cos = tl.load(cos_ptr + turn, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + turn, mask=mask, other=0.0)
        if head < HEADS:
            if q_norm_ptr is not None:
                first, second = _normed(first, second, q_norm_ptr, eps, index, inside, HALF)
            first, second = _rotated(first, second, cos, sin)
            target = q_ptr + (rows.to(tl.int64) * HEADS + head)[:, None] * (2 * HALF) + index[None, :]
            tl.store(target, first, mask=mask)
            tl.store(target + HALF, second, mask=mask)
        else:
            if k_norm_ptr is not None:
                first, second = _normed(first, second, k_norm_ptr, eps, index, inside, HALF)
            if k_center_ptr is not None:
                center_ptr = k_center_ptr + (head - HEADS) * (2 * HALF)
                first = _centered(first, center_ptr, index, inside)
                second = _centered(second, center_ptr + HALF, index, inside)
            first, second = _rotated(first, second, cos, sin)
            _store(
                first, second, k_page_ptr, k_scale_ptr, counters_ptr, slots, head - HEADS, index, kept, KV_HEADS, HALF,
                FORMAT, SCALES,
            )  # fmt: skip
    else:
        value_head = head - HEADS - KV_HEADS
        if v_center_ptr is not None:
            center_ptr = v_center_ptr + value_head * (2 * HALF)
            first = _centered(first, center_ptr, index, inside)
            second = _centered(second, center_ptr + HALF, index, inside)
        _store(
            first, second, v_page_ptr, v_scale_ptr, counters_ptr, slots, value_head, index, kept, KV_HEADS, HALF,
            FORMAT, SCALES,
        )  # fmt: skip


FEW_ROWS = 512  # up to here a program takes one row, so that there are enough programs


def rotate_store(
    target: Target, qkv: Tensor, rotary: Rotary, positions: Tensor, slots: Tensor, pages: KVPages
) -> Tensor:
    """`reference.rotate_store`. qkv: contiguous."""
    assert qkv.is_contiguous()
    rows, width = qkv.shape
    kv_heads, dim = pages.k.shape[2:]
    all_heads = width // dim
    assert pages.v.shape[3] == rotary.rotary_dim == dim
    q = torch.empty(rows, all_heads - 2 * kv_heads, dim, dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm = rotary.norms or (None, None)
    k_center = None if pages.k_center is None else pages.k_center.b
    tile = 1 if rows <= FEW_ROWS else 16
    block_half = triton.next_power_of_2(dim // 2)
    rotate_store_kernel[(triton.cdiv(rows, tile), all_heads)](
        *(qkv, q, positions, slots, rotary.cos, rotary.sin, q_norm, k_norm, rotary.eps, k_center, pages.v_center),
        *(carrier(pages.k, target), carrier(pages.v, target), pages.k_scale, pages.v_scale, pages.counters, rows),
        HEADS=q.shape[1],
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        BLOCK_HALF=block_half,
        ROWS=tile,
        FORMAT=str(pages.format) if pages.format.is_fp8 else "",
        SCALES="" if pages.k_scale is None else "token" if pages.dynamic else "static",
        num_warps=warps_for(2 * tile * block_half),
    )
    return q
