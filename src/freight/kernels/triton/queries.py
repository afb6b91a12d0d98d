"""Paged attention: loading of queries as the product with a tile of keys (`walk.py`) takes them."""

from __future__ import annotations

import triton
import triton.language as tl

from freight.kernels.triton.formats import (
    STATIC,
    encode,
    finite_amax,
    power_of_two,
    scale_from_amax,
)


@triton.jit
def _query_part(
    q_ptr, place, live, k_scale_ptr, begin, dims, end, SCALES: tl.constexpr, K_DOT: tl.constexpr,
):  # fmt: skip
    """Load the channels `dims` [D] of q below `end`, and zeros elsewhere.

    They are multiplied by the static scales, which begin at `begin`.
    """
    q = tl.load(
        q_ptr + place[:, None] + dims[None, :],
        mask=live[:, None] & (dims < end)[None, :],
        other=0.0,
    )
    if SCALES == STATIC or K_DOT == tl.float16 or K_DOT == tl.uint8:
        q = q.to(tl.float32)
    if SCALES == STATIC:
        q *= tl.load(k_scale_ptr + begin + dims, mask=dims < end, other=0.0)[None, :]
    return q


@triton.jit
def _as_operand(q, factor, inverse, FORMAT: tl.constexpr, K_DOT: tl.constexpr, LIKE: tl.constexpr):
    """Divide q [M, D] by `factor` [M], and convert it to the operand type.

    A factor that is a power of two is divided by as a multiplication by its `inverse`.
    """
    if K_DOT == tl.float16:
        q *= inverse[:, None]
    if K_DOT == tl.uint8:
        q = encode(tl.div_rn(q, tl.broadcast_to(factor[:, None], q.shape)), LIKE, FORMAT)
    else:
        q = q.to(K_DOT)
    return q


@triton.jit
def load_queries(
    q_ptr, row, query_head, live, row_stride, head_stride, k_scale_ptr, head, K_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr,
    K_DOT: tl.constexpr, PAIRS: tl.constexpr, LIKE: tl.constexpr,
):  # fmt: skip
    """Load q in the operand type, as `walk.py` takes it, and the factor [M] of its scores.

    Without REST q is one tensor [M, D]. With REST it is a tensor of the first REST channels, then
    the others: one [M, D], or with PAIRS two of [M, D / 2], of the even and of the odd channels.
    """
    place = row.to(tl.int64) * row_stride + query_head * head_stride
    factor = tl.full(row.shape, 1.0, tl.float32)
    inverse = factor
    begin = head * K_DIM
    if REST == 0:
        all_dims = tl.arange(0, K_BLOCK)
        parts = (
            _query_part(q_ptr, place, live, k_scale_ptr, begin, all_dims, K_DIM, SCALES, K_DOT),
        )
    else:
        WIDTH: tl.constexpr = 2 if PAIRS != "" else 1
        first = tl.arange(0, REST_BLOCK)
        other = tl.arange(0, K_BLOCK // WIDTH) * WIDTH + REST
        parts = (_query_part(q_ptr, place, live, k_scale_ptr, begin, first, REST, SCALES, K_DOT),)
        for i in tl.static_range(WIDTH):
            part = _query_part(
                q_ptr, place, live, k_scale_ptr, begin, other + i, K_DIM, SCALES, K_DOT
            )
            parts += (part,)  # type: ignore[assignment]
    if K_DOT == tl.float16 or K_DOT == tl.uint8:
        amax = finite_amax(parts[0], 1)
        for i in tl.static_range(1, len(parts)):
            amax = tl.maximum(amax, finite_amax(parts[i], 1))
        if K_DOT == tl.float16:
            factor, inverse = power_of_two(amax)
        else:
            factor = scale_from_amax(amax, FORMAT)
    q = ()
    for i in tl.static_range(len(parts)):
        q += (_as_operand(parts[i], factor, inverse, FORMAT, K_DOT, LIKE),)  # type: ignore[assignment]
    return q, factor
