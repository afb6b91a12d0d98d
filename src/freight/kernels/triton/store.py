"""Rotate-and-store: norm and rotate queries, store keys and values in their pages, in one launch.

Every value is read from memory once: rotary embedding reads a channel again for its partner, but
from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freight.kernels.triton.elementwise import weighted
from freight.kernels.triton.formats import (
    STATIC,
    TOKEN,
    Target,
    carrier,
    encode,
    finite_amax,
    overflow,
    places,
    scale_from_amax,
)
from freight.kernels.triton.rows import warps_for
from freight.kernels.triton.sizes import cdiv, next_power_of_2
from freight.operands.kv_pages import KVPages
from freight.operands.rotary import Rotary


@triton.jit
def _prepared(source, index, mask, root, norm_ptr, center_ptr):
    """Load channels `index` of the heads at `source`, normed and centered.

    The norm multiplies by `root` and by its weight; the center is subtracted.
    """
    x = tl.load(source + index[None, :], mask=mask, other=0.0)
    like: tl.constexpr = x.dtype
    if norm_ptr is not None:
        weight = tl.load(norm_ptr + index[None, :], mask=mask, other=0.0)
        x = weighted(x.to(tl.float32) * root, weight, like)
    if center_ptr is not None:
        x = (x.to(tl.float32) - tl.load(center_ptr + index[None, :], mask=mask, other=0.0)).to(like)
    return x


@triton.jit
def _angles(cos_ptr, sin_ptr, positions, mask, index, HALF: tl.constexpr):
    """Load the cosines of channels `index` at `positions`, and the sines.

    Sines have the sign with which they multiply the channel's partner.
    """
    angle = positions[:, None] * HALF + (index % HALF)[None, :]
    cos = tl.load(cos_ptr + angle, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=mask, other=0.0)
    # not -sin, which Triton computes as 0 - sin: the sign of a 0 would be lost
    return cos, tl.where((index < HALF)[None, :], -1.0, 1.0) * sin


@triton.jit
def _rotated(
    source, cos, sin, norm_ptr, eps, center_ptr, live, index, DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Load a head of each row, normed, centered and rotated: [ROWS, channels `index`].

    cos, sin: as `_angles` returns them. The first 2 * HALF channels are rotated; for each of them
    the channel that it is paired with is loaded, too.
    """
    mask = live[:, None] & (index < DIM)[None, :]
    root = None
    if norm_ptr is not None:
        vector = tl.load(source + index[None, :], mask=mask, other=0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(vector * vector, 1) / DIM + eps)[:, None]
    x = _prepared(source, index, mask, root, norm_ptr, center_ptr)
    if HALF > 0:
        rotated = (index < 2 * HALF)[None, :]
        mask &= rotated
        partner = tl.where(index < HALF, index + HALF, index - HALF)
        other = _prepared(source, partner, mask, root, norm_ptr, center_ptr).to(tl.float32)
        x = tl.where(rotated, (x.to(tl.float32) * cos + other * sin).to(x.dtype), x)
    return x


@triton.jit
def _encoded(x, scale, target, mask, like: tl.constexpr, FORMAT: tl.constexpr):
    """Store x / scale (x if scale is None) at `target`; return how many values are clipped."""
    LAST: tl.constexpr = overflow(FORMAT)
    quotient = x.to(tl.float32)
    if scale is not None:
        quotient = tl.div_rn(quotient, tl.broadcast_to(scale, x.shape))
    tl.store(target, encode(quotient, like, FORMAT), mask=mask)
    return tl.sum(((tl.abs(quotient) > LAST) & mask).to(tl.int32))


@triton.jit
def _store(
    x, page_ptr, scale_ptr, counters_ptr, slots, head, index, STRIDES: tl.constexpr, PART: tl.constexpr,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Store one head of a tile of rows, of K (PART 0) or of V (1); negative slots are skipped."""
    inside = index < DIM
    mask = (slots >= 0)[:, None] & inside[None, :]
    block = slots // BLOCK_SIZE
    token = slots % BLOCK_SIZE
    target = page_ptr + places(block, token, head, STRIDES, PART, 1)[:, None] + index[None, :]
    like: tl.constexpr = page_ptr.dtype.element_ty
    if FORMAT == "":
        tl.store(target, x.to(like), mask=mask)
    else:
        divisor = None
        if SCALES == TOKEN:
            scale = scale_from_amax(finite_amax(x.to(tl.float32), 1), FORMAT).to(tl.bfloat16)
            tl.store(
                scale_ptr + places(block, token, head, STRIDES, PART + 2, 1), scale, mask=slots >= 0
            )
            divisor = scale.to(tl.float32)[:, None]
        elif SCALES == STATIC:
            divisor = tl.load(scale_ptr + head * DIM + index, mask=inside, other=1.0)[None, :]
        clipped = _encoded(x, divisor, target, mask, like, FORMAT)
        tl.atomic_add(counters_ptr + 1, clipped.to(tl.int64), mask=clipped > 0, sem="relaxed")
    values = x.to(tl.float32)
    nans = tl.sum(((values != values) & mask).to(tl.int32))
    tl.atomic_add(counters_ptr, nans.to(tl.int64), mask=nans > 0, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def rotate_store_kernel(
    qkv_ptr, q_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, q_factor_ptr, q_norm_ptr, k_norm_ptr, eps, k_center_ptr,
    k_page_ptr, v_page_ptr, k_scale_ptr, v_scale_ptr, counters_ptr, num_rows, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, V_HEADS: tl.constexpr, STRIDES: tl.constexpr, K_DIM: tl.constexpr, K_BLOCK: tl.constexpr,
    V_DIM: tl.constexpr, V_BLOCK: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    TURNS: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """A program: ROWS rows of TURNS heads of q, k and v, one head after the other.

    FORMAT '' is 16 or 32 bits; SCALES is a `ScaleKind`. V_HEADS is KV_HEADS, or 0 if V lies inside
    K. STRIDES are `KVPages.strides`. K_BLOCK and V_BLOCK are K_DIM and V_DIM padded to powers of
    two; HALF is rotary_dim / 2.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < num_rows
    slots = tl.load(slots_ptr + rows, mask=live, other=-1)
    row_ptr = qkv_ptr + rows.to(tl.int64)[:, None] * ((HEADS + KV_HEADS) * K_DIM + V_HEADS * V_DIM)
    index = tl.arange(0, K_BLOCK)
    positions = tl.load(positions_ptr + rows, mask=live, other=0)
    first = tl.program_id(1) * TURNS
    cos = None
    sin = None
    if HALF > 0:  # loaded once: all heads have the same
        rotated = live[:, None] & (index < 2 * HALF)[None, :]
        cos, sin = _angles(cos_ptr, sin_ptr, positions, rotated, index, HALF)
    for head in range(first, tl.minimum(first + TURNS, HEADS + KV_HEADS + V_HEADS)):
        if head < HEADS + KV_HEADS:
            source = row_ptr + head * K_DIM
            if head < HEADS:
                x = _rotated(source, cos, sin, q_norm_ptr, eps, None, live, index, K_DIM, HALF)
                if q_factor_ptr is not None:
                    factor = tl.load(q_factor_ptr + positions, mask=live, other=1.0).to(x.dtype)
                    x = (x.to(tl.float32) * factor.to(tl.float32)[:, None]).to(x.dtype)
                target = (
                    q_ptr + (rows.to(tl.int64) * HEADS + head)[:, None] * K_DIM + index[None, :]
                )
                tl.store(target, x, mask=live[:, None] & (index < K_DIM)[None, :])
            else:
                kv_head = head - HEADS
                center = k_center_ptr
                if k_center_ptr is not None:
                    center += kv_head * K_DIM
                x = _rotated(source, cos, sin, k_norm_ptr, eps, center, live, index, K_DIM, HALF)
                _store(
                    x, k_page_ptr, k_scale_ptr, counters_ptr, slots, kv_head, index, STRIDES, 0, K_DIM,
                    BLOCK_SIZE, FORMAT, SCALES,
                )  # fmt: skip
        else:  # with other names than above: Triton allows a name only one shape in both branches
            v_head = head - HEADS - KV_HEADS
            channel = tl.arange(0, V_BLOCK)
            values = row_ptr + (HEADS + KV_HEADS) * K_DIM + v_head * V_DIM
            mask = live[:, None] & (channel < V_DIM)[None, :]
            value = tl.load(values + channel[None, :], mask=mask, other=0.0)
            _store(
                value, v_page_ptr, v_scale_ptr, counters_ptr, slots, v_head, channel, STRIDES, 1, V_DIM,
                BLOCK_SIZE, FORMAT, SCALES,
            )  # fmt: skip


TURNS = 4  # heads of a program over many rows, which loads its angles once for all of them
FEW_ROWS = 512  # up to here a program takes one row and one head, so that there are enough programs


def rotate_store(
    target: Target,
    qkv: Tensor,
    rotary: Rotary,
    positions: Tensor,
    slots: Tensor | None,
    pages: KVPages,
) -> Tensor:
    """Compute `KernelSet.rotate_store`. qkv: contiguous."""
    assert qkv.is_contiguous()
    rows, width = qkv.shape
    kv_heads, k_dim = pages.k.shape[2:]
    v_dim = pages.v.shape[3]
    if slots is None:
        slots = positions
        kv_heads = 0
    v_heads = 0 if pages.v_in_k else kv_heads
    num_heads = (width - kv_heads * k_dim - v_heads * v_dim) // k_dim
    q = torch.empty(rows, num_heads, k_dim, dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm = rotary.norms or (None, None)
    k_center = None if pages.k_center is None else pages.k_center.b
    k_block = next_power_of_2(k_dim)
    v_block = next_power_of_2(v_dim)
    block = max(k_block, v_block)
    # With few rows one row and one head; else 16 rows, or 8 of 512 channels, because 16 spill.
    tile = turns = 1
    if rows > FEW_ROWS:
        tile = 16 if block <= 256 else 8
        turns = TURNS
    rotate_store_kernel[(cdiv(rows, tile), cdiv(num_heads + kv_heads + v_heads, turns))](
        qkv,
        q,
        positions,
        slots,
        rotary.cos,
        rotary.sin,
        rotary.q_factor,
        q_norm,
        k_norm,
        rotary.eps,
        k_center,
        carrier(pages.k, target),
        carrier(pages.v, target),
        pages.k_scale,
        pages.v_scale,
        pages.counters,
        rows,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        V_HEADS=v_heads,
        STRIDES=pages.strides,
        K_DIM=k_dim,
        K_BLOCK=k_block,
        V_DIM=v_dim,
        V_BLOCK=v_block,
        HALF=rotary.rotary_dim // 2,
        BLOCK_SIZE=pages.block_size,
        ROWS=tile,
        TURNS=turns,
        FORMAT=str(pages.format) if pages.format.is_fp8 else "",
        SCALES=int(pages.scale_kind),
        num_warps=warps_for(tile * block * (2 if turns > 1 else 1)),  # angles take registers, too
    )
    return q
