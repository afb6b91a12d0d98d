"""Paged attention: the walk over tiles of keys that the kernels of prefill and of decoding share.

It adds one tile of keys and values after another to a running softmax: scales, a center of keys,
soft caps, masks and sinks are compile-time branches. `queries.py` loads the queries. `attention.py`
explains the operand types of the products, and defines the names of shapes.

FP8 values are read in pairs in decoding: no current GPU transposes bytes as it loads them from
shared memory, so that loads of single bytes were most of the instructions. Two neighbouring dims
are one 16-bit element, a few instructions decode both, and even and odd dims are summed by separate
products, interleaved once at the end of a split.

Keys of a latent, and of other wide heads whose size is not a power of two, are two products: 512 +
64 channels instead of 576 padded to 1024. The 512 of a latent are also its values, and are loaded
once for both products. They are loaded like values and transposed for the scores, so that Triton
reads both operands from one tile in shared memory while it loads the next tile.

A center of keys is a loop over pairs of channels inside the loop over tiles, in which Triton then
keeps no loads in flight. With two matrix products per tile instead it could, but these have not
been shown to fit the registers of every target and to keep the precision of float32 there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freight.kernels.triton import formats
from freight.kernels.triton.formats import (
    TOKEN,
    decode,
    decode_pairs,
    encode_bits,
    finite_amax,
    power_of_two,
)


@triton.jit
def _fp8_product(a, b, FORMAT: tl.constexpr):
    """Return a @ b of FP8 values as they are stored.

    Bytes, which occur only in the interpreter, are decoded first.
    """
    if a.dtype == tl.uint8:
        product = tl.dot(decode(a, FORMAT), decode(b, FORMAT))
    else:
        product = tl.dot(a, b)
    return product


@triton.jit
def _scores(q, k, FORMAT: tl.constexpr, K_DOT: tl.constexpr):
    """Return q [M, D] @ k [D, N] in float32; k is as it was loaded."""
    if K_DOT == tl.uint8:
        scores = _fp8_product(q, k, FORMAT)
    else:
        scores = tl.dot(q, decode(k, FORMAT).to(K_DOT), input_precision="ieee")
    return scores


@triton.jit
def no_values(ROWS: tl.constexpr, V_BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    """Return zeros as the initial sums of `walk`.

    They are one tensor [M, D], or with PAIRS two of [M, D / 2], of the even and of the odd dims.
    """
    if PAIRS != "":
        acc = (
            tl.zeros((ROWS, V_BLOCK // 2), tl.float32),
            tl.zeros((ROWS, V_BLOCK // 2), tl.float32),
        )
    else:
        acc = (tl.zeros((ROWS, V_BLOCK), tl.float32),)  # type: ignore[assignment]
    return acc


@triton.jit
def summed_values(acc, unit, SCALES: tl.constexpr, V_DOT: tl.constexpr, PAIRS: tl.constexpr):
    """Return the sums of `walk`, [M, D] float32, with dims in order and `unit` multiplied in."""
    values = acc[0]
    if PAIRS != "":
        values = tl.interleave(acc[0], acc[1])
    if SCALES == TOKEN and V_DOT == tl.float16:
        values *= unit
    return values


@triton.jit
def _add_values(
    acc, decay, probability, v, FORMAT: tl.constexpr, V_DOT: tl.constexpr, PAIRS: tl.constexpr, LIKE: tl.constexpr,
):  # fmt: skip
    """Return acc (`no_values`) * decay [M] + probability [M, N] @ v in float32.

    v is as `_load_values` loaded it. In FP8 each tile is summed separately, because some GPUs sum
    such products with less than float32 precision.
    """
    if V_DOT == tl.uint8:
        if v.dtype == tl.uint8:
            p = encode_bits(probability, FORMAT)
        else:
            p = probability.to(v.dtype)
        acc = (acc[0] * decay[:, None] + _fp8_product(p, v, FORMAT),)
    elif PAIRS != "":
        p = probability.to(V_DOT)
        even, odd = decode_pairs(v, LIKE, FORMAT, PAIRS)
        even = tl.dot(p, even.to(V_DOT), acc[0] * decay[:, None], input_precision="ieee")
        odd = tl.dot(p, odd.to(V_DOT), acc[1] * decay[:, None], input_precision="ieee")
        acc = (even, odd)
    else:
        p = probability.to(V_DOT)
        acc = (
            tl.dot(p, decode(v, FORMAT).to(V_DOT), acc[0] * decay[:, None], input_precision="ieee"),
        )
    return acc


@triton.jit
def initial(sinks_ptr, query_head, live, V_DOT: tl.constexpr, FORMAT: tl.constexpr):
    """Return (best [M], total [M]) of rows that have seen no key: from sinks, or empty.

    A sink counts as a score, in base 2.
    """
    best = tl.full(query_head.shape, float("-inf"), tl.float32)
    total = tl.zeros(query_head.shape, tl.float32)
    if sinks_ptr is not None:
        best = tl.load(sinks_ptr + query_head, mask=live, other=0.0) * 1.44269504088896341
        # With FP8 values, probabilities and `total` have a factor 2 ** 7 or 2 ** 8, as in `_walk`.
        total += 1.0 if V_DOT != tl.uint8 else 128.0 if FORMAT == "fp8_e4m3fnuz" else 256.0
    return best, total


@triton.jit
def _hide(
    scores, key, position, stored, window, MASKED: tl.constexpr, WINDOWED: tl.constexpr, BOTH_WAYS: tl.constexpr,
):  # fmt: skip
    """Set scores [M, N] to -infinity where the row at `position` [M] does not see `key` [N].

    Without MASKED only the window hides some: every key is `stored` [N], and without BOTH_WAYS no
    row is before any.
    """
    if MASKED and BOTH_WAYS:
        seen = tl.broadcast_to(stored[None, :], scores.shape)
        if WINDOWED:
            seen &= key[None, :] > position[:, None] - window
            seen &= key[None, :] < position[:, None] + window
    elif MASKED:
        seen = key[None, :] <= position[:, None]
        if WINDOWED:
            seen &= key[None, :] > position[:, None] - window
    else:
        seen = key[None, :] > position[:, None] - window
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _add_center(
    scores, center_ptr, place, live, cos_ptr, sin_ptr, pairs_ptr, num_pairs, head, key, HALF: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the keys' center to scores [M, N].

    `place` [M] is the offset of each row's first factor, `key` [N] the positions of keys. Layouts:
    angles [positions / 64, rotary_dim / 2, 64]; pairs [HEADS, num_pairs]; factors of cosines, then
    of sines.
    """
    angle = key // 64 * (HALF * 64) + key % 64
    for i in range(num_pairs):
        pair = tl.load(pairs_ptr + head * num_pairs + i)
        of_cos = tl.load(center_ptr + place + i, mask=live, other=0.0)
        of_sin = tl.load(center_ptr + place + num_pairs + i, mask=live, other=0.0)
        scores += of_cos[:, None] * tl.load(cos_ptr + angle + pair * 64)[None, :]
        scores += of_sin[:, None] * tl.load(sin_ptr + angle + pair * 64)[None, :]
    return scores


@triton.jit
def _soften(scores, cap):
    """Soft-cap scores that are multiplied by 2 log2(e) / soft cap; the result is in base 2.

    `cap` is the soft cap times log2(e).
    """
    # At 64 tanh has long been 1; the bound keeps the power finite.
    power = tl.exp2(tl.minimum(scores, 64.0, propagate_nan=tl.PropagateNan.ALL))
    return cap - 2.0 * cap / (1.0 + power)  # tanh(x) = 1 - 2 / (1 + e ** 2x)


@triton.jit
def _blocks(table_ptr, key, stored, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Look up the block that holds each `key` [N]."""
    if MASKED:
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=stored, other=0)
    else:
        block = tl.load(table_ptr + key // BLOCK_SIZE)
    return block


@triton.jit
def _load_values(
    v_ptr, place, stored, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr, MASKED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Load V [N, D] as it is stored, from `place` [N] on.

    With PAIRS the result is int16 [N, D / 2], two neighbouring dims in each.
    """
    WIDTH: tl.constexpr = 2 if PAIRS != "" else 1
    dims = tl.arange(0, V_BLOCK // WIDTH)
    inside = (dims < V_DIM // WIDTH)[None, :]
    source = place[:, None] + dims[None, :]
    if PAIRS != "":
        source = v_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + source
    else:
        source = v_ptr + source
    if MASKED:  # a slot that was never written may hold a NaN
        v = tl.load(source, mask=stored[:, None] & inside, other=0.0)
    elif V_DIM == V_BLOCK:
        v = tl.load(source)
    else:
        v = tl.load(source, mask=inside, other=0.0)
    return v


@triton.jit
def _load_others(
    k_ptr, place, stored, REST: tl.constexpr, K_BLOCK: tl.constexpr, MASKED: tl.constexpr, INSIDE: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Load the K_BLOCK channels of K after the first REST, as `_load_values` loads values.

    INSIDE: they are also the values. Only in the layout of values can they be used as both, and be
    loaded while another tile is computed.
    """
    WIDTH: tl.constexpr = 2 if PAIRS != "" else 1
    source = place[:, None] + (tl.arange(0, K_BLOCK // WIDTH) + REST // WIDTH)[None, :]
    if PAIRS != "":
        source = k_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + source
    else:
        source = k_ptr + source
    if MASKED and INSIDE:  # a slot that was never written may hold a NaN
        k = tl.load(source, mask=stored[:, None], other=0.0)
    else:
        k = tl.load(source)
    return k


@triton.jit
def _key_scores(
    q, k_ptr, block, token, stored, head, STRIDES: tl.constexpr, K_DIM: tl.constexpr, K_BLOCK: tl.constexpr,
    REST: tl.constexpr, REST_BLOCK: tl.constexpr, INSIDE: tl.constexpr, FORMAT: tl.constexpr, MASKED: tl.constexpr,
    K_DOT: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Return q (of `load_queries`) @ K [D, N] in float32, and the last loaded part of K.

    PAIRS is K_PAIRS of `walk`.
    """
    CHANNELS: tl.constexpr = K_DIM if REST == 0 else REST
    BLOCK: tl.constexpr = K_BLOCK if REST == 0 else REST_BLOCK
    dims = tl.arange(0, BLOCK)
    source = formats.places(block, token, head, STRIDES, 0, 1)[None, :] + dims[:, None]
    if CHANNELS == BLOCK:
        k = tl.load(k_ptr + source)
    else:
        k = tl.load(k_ptr + source, mask=(dims < CHANNELS)[:, None], other=0.0)
    if REST == 0:
        scores = _scores(q[0], k, FORMAT, K_DOT)
    else:  # both loads come before the first product; with one after it, float32 spills
        place = formats.places(block, token, head, STRIDES, 0, 2 if PAIRS != "" else 1)
        first = k
        k = _load_others(k_ptr, place, stored, REST, K_BLOCK, MASKED, INSIDE, PAIRS)
        scores = _scores(q[0], first, FORMAT, K_DOT)
        if PAIRS != "":
            even, odd = decode_pairs(tl.trans(k), k_ptr.dtype.element_ty, FORMAT, PAIRS)
            scores = tl.dot(q[1], even.to(K_DOT), scores, input_precision="ieee")
            scores = tl.dot(q[2], odd.to(K_DOT), scores, input_precision="ieee")
        elif K_DOT == tl.uint8:
            scores += _fp8_product(q[1], tl.trans(k), FORMAT)
        else:
            scores = tl.dot(
                q[1], decode(tl.trans(k), FORMAT).to(K_DOT), scores, input_precision="ieee"
            )
    return scores, k


@triton.jit
def _values(
    k, v_ptr, block, token, stored, head, STRIDES: tl.constexpr, INSIDE: tl.constexpr, V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr, MASKED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Load V by `_load_values`; with INSIDE it is `k`, which `_key_scores` loaded."""
    if INSIDE:
        v = k
    else:
        place = formats.places(block, token, head, STRIDES, 1, 2 if PAIRS != "" else 1)
        v = _load_values(v_ptr, place, stored, V_DIM, V_BLOCK, MASKED, PAIRS)
    return v


@triton.jit
def _walk(
    acc, best, total, unit, q, factor, position, begin, end, length, window, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
    table_ptr, head, center_ptr, center_place, live, cos_ptr, sin_ptr, pairs_ptr, num_pairs, cap,
    STRIDES: tl.constexpr, K_DIM: tl.constexpr, K_BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    INSIDE: tl.constexpr, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
    K_DOT: tl.constexpr, V_DOT: tl.constexpr, CENTERED: tl.constexpr, CAPPED: tl.constexpr, K_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr, STAGES: tl.constexpr, BOTH_WAYS: tl.constexpr,
):  # fmt: skip
    """Add the keys of [begin, end), where `begin` is a multiple of KEYS: see `walk`.

    Without MASKED every key of these tiles is stored, no row is before any that it may not see, and
    `end` is a multiple of KEYS, too.
    """
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        key = start + tl.arange(0, KEYS)
        stored = key < length
        block = _blocks(table_ptr, key, stored, BLOCK_SIZE, MASKED)
        scores, k = _key_scores(
            q, k_ptr, block, key % BLOCK_SIZE, stored, head, STRIDES, K_DIM, K_BLOCK, REST, REST_BLOCK, INSIDE, FORMAT,
            MASKED, K_DOT, K_PAIRS,
        )  # fmt: skip
        scores *= factor[:, None]
        if SCALES == TOKEN:
            place = formats.places(block, key % BLOCK_SIZE, head, STRIDES, 2, 1)
            scores *= formats.token_scale(k_scale_ptr, place, stored, MASKED)[None, :]
        if CENTERED:
            scores = _add_center(
                scores, center_ptr, center_place, live, cos_ptr, sin_ptr, pairs_ptr, num_pairs, head, key, HALF,
            )  # fmt: skip
        if CAPPED:
            scores = _soften(scores, cap)
        if MASKED or WINDOWED:
            scores = _hide(scores, key, position, stored, window, MASKED, WINDOWED, BOTH_WAYS)
        new_best = tl.maximum(best, tl.max(scores, 1))
        reference = new_best
        if WINDOWED:  # a row may have seen no key yet
            reference = tl.where(new_best == float("-inf"), 0.0, new_best)
        if V_DOT == tl.uint8:  # probabilities and `total` times FORMAT's largest power of two
            probability = tl.exp2(
                scores - (reference - (7.0 if FORMAT == "fp8_e4m3fnuz" else 8.0))[:, None]
            )
        else:
            probability = tl.exp2(scores - reference[:, None])
        decay = tl.exp2(best - reference)
        total = total * decay + tl.sum(probability, 1)
        v = _values(
            k, v_ptr, block, key % BLOCK_SIZE, stored, head, STRIDES, INSIDE, V_DIM, V_BLOCK, MASKED, PAIRS
        )  # fmt: skip
        if SCALES == TOKEN:
            place = formats.places(block, key % BLOCK_SIZE, head, STRIDES, 3, 1)
            scale = formats.token_scale(v_scale_ptr, place, stored, MASKED)
            if V_DOT == tl.float16:
                old = unit
                unit, inverse = power_of_two(tl.maximum(unit, finite_amax(scale, 0)))
                scale *= inverse
                decay *= old * inverse
            probability *= scale[None, :]
        acc = _add_values(acc, decay, probability, v, FORMAT, V_DOT, PAIRS, v_ptr.dtype.element_ty)
        best = new_best
    return acc, best, total, unit


@triton.jit
def walk(
    acc, best, total, unit, q, factor, position, begin, edge, end, length, window, k_ptr, v_ptr, k_scale_ptr,
    v_scale_ptr, table_ptr, head, center_ptr, center_place, live, cos_ptr, sin_ptr, pairs_ptr, num_pairs, cap,
    STRIDES: tl.constexpr, K_DIM: tl.constexpr, K_BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    INSIDE: tl.constexpr, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr, WINDOWED: tl.constexpr, SEEN: tl.constexpr,
    K_DOT: tl.constexpr, V_DOT: tl.constexpr, CENTERED: tl.constexpr, CAPPED: tl.constexpr, K_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr, STAGES: tl.constexpr, BOTH_WAYS: tl.constexpr,
):  # fmt: skip
    """Add the keys of [begin, end) to acc (`no_values`), best [M], total [M] and unit.

    `begin` and `edge` are multiples of KEYS. Keys before `edge` are stored, and no row is before
    any of them, or with BOTH_WAYS may be, so they need no masks; without SEEN there are none, and
    `begin` is not read. STAGES
    are the pipeline stages of the tiles from `edge` on. STRIDES are `KVPages.strides`. With REST,
    channels of keys are two products: the first REST, padded to REST_BLOCK, and the K_BLOCK others,
    in pairs with K_PAIRS. INSIDE: the latter are also the values, and are loaded once for both.
    """
    if SEEN:
        acc, best, total, unit = _walk(
            acc, best, total, unit, q, factor, position, begin, edge, length, window, k_ptr, v_ptr, k_scale_ptr,
            v_scale_ptr, table_ptr, head, center_ptr, center_place, live, cos_ptr, sin_ptr, pairs_ptr, num_pairs, cap,
            STRIDES, K_DIM, K_BLOCK, REST, REST_BLOCK, INSIDE, V_DIM, V_BLOCK, HALF, BLOCK_SIZE, KEYS, FORMAT, SCALES,
            WINDOWED, False, K_DOT, V_DOT, CENTERED, CAPPED, K_PAIRS, PAIRS, None, BOTH_WAYS,
        )  # fmt: skip
    return _walk(
        acc, best, total, unit, q, factor, position, edge, end, length, window, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
        table_ptr, head, center_ptr, center_place, live, cos_ptr, sin_ptr, pairs_ptr, num_pairs, cap, STRIDES, K_DIM,
        K_BLOCK, REST, REST_BLOCK, INSIDE, V_DIM, V_BLOCK, HALF, BLOCK_SIZE, KEYS, FORMAT, SCALES, WINDOWED, True,
        K_DOT, V_DOT, CENTERED, CAPPED, K_PAIRS, PAIRS, STAGES, BOTH_WAYS,
    )  # fmt: skip
