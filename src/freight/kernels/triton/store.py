"""Quantize-and-store: keys and values into their pages in one pass, each read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from freight.fp8.values import KVPages
from freight.kernels.triton.formats import Target, carrier, encode, finite_amax, scale_from_amax


@triton.jit
def _store_one(
    values_ptr, page_ptr, scale_ptr, slots, rows, kept, head, row_stride, head_stride, HEADS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Store one head of a tile of rows of K or of V; returns how many NaNs that were."""
    dims = tl.arange(0, BLOCK_DIM)
    mask = kept[:, None] & (dims < DIM)[None, :]
    source = values_ptr + rows.to(tl.int64)[:, None] * row_stride + head * head_stride + dims[None, :]
    x = tl.load(source, mask=mask, other=0.0)
    place = slots * HEADS + head  # of the vector, among all vectors of the page
    like: tl.constexpr = page_ptr.dtype.element_ty
    if FORMAT == "":
        stored = x.to(like)
        x = x.to(tl.float32)
    else:
        x = x.to(tl.float32)
        quotient = x
        if SCALES == "token":
            scale = scale_from_amax(finite_amax(x, 1), FORMAT).to(tl.bfloat16)
            tl.store(scale_ptr + place, scale, mask=kept)
            quotient = tl.div_rn(x, tl.broadcast_to(scale.to(tl.float32)[:, None], x.shape))
        elif SCALES == "static":
            scale = tl.load(scale_ptr + head * DIM + dims, mask=dims < DIM, other=1.0)
            quotient = tl.div_rn(x, tl.broadcast_to(scale[None, :], x.shape))
        stored = encode(quotient, like, FORMAT)
    tl.store(page_ptr + place[:, None] * DIM + dims[None, :], stored, mask=mask)
    return tl.sum((x != x).to(tl.int32))


@triton.jit(do_not_specialize=["num_rows"])
def store_kernel(
    k_ptr, v_ptr, slots_ptr, k_page_ptr, v_page_ptr, k_scale_ptr, v_scale_ptr, nan_count_ptr, num_rows,
    k_row_stride, k_head_stride, v_row_stride, v_head_stride, HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """A program stores ROWS rows of one head. FORMAT '' is 16 or 32 bits; SCALES is '', 'static' or 'token'."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    slots = tl.load(slots_ptr + rows, mask=rows < num_rows, other=-1)
    kept = slots >= 0
    nans = _store_one(
        k_ptr, k_page_ptr, k_scale_ptr, slots, rows, kept, head, k_row_stride, k_head_stride, HEADS, DIM, BLOCK_DIM,
        FORMAT, SCALES,
    )  # fmt: skip
    nans += _store_one(
        v_ptr, v_page_ptr, v_scale_ptr, slots, rows, kept, head, v_row_stride, v_head_stride, HEADS, DIM, BLOCK_DIM,
        FORMAT, SCALES,
    )  # fmt: skip
    tl.atomic_add(nan_count_ptr, nans.to(tl.int64), mask=nans > 0, sem="relaxed")


FEW_ROWS = 512  # up to here a program stores one row, so that there are enough programs


def store_kv(target: Target, k: Tensor, v: Tensor, slots: Tensor, pages: KVPages) -> None:
    """`reference.store_kv`. k, v: [rows, num_kv_heads, head_dim], their last dimension contiguous."""
    num_rows, heads, dim = k.shape
    assert k.stride(2) == v.stride(2) == 1
    tile = 1 if num_rows <= FEW_ROWS else 16
    scales = "" if pages.k_scale is None else "token" if pages.dynamic else "static"
    store_kernel[(triton.cdiv(num_rows, tile), heads)](
        *(k, v, slots, carrier(pages.k, target), carrier(pages.v, target), pages.k_scale, pages.v_scale),
        *(pages.nan_count, num_rows, k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        HEADS=heads,
        DIM=dim,
        BLOCK_DIM=triton.next_power_of_2(dim),
        ROWS=tile,
        FORMAT=str(pages.format) if pages.format.is_fp8 else "",
        SCALES=scales,
        num_warps=1 if tile == 1 else 4,
    )
