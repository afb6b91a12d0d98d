"""Paged attention: the kernels. `paged.py` launches them.

A sequence that has one row in this step is *decoded*: its keys are cut into splits of `SPLIT` at fixed positions,
several programs take turns over the splits, and `merge_kernel` merges the splits in order. One that has more is a
chunk of *prefill*: a program takes a tile of its rows and walks the keys. Both walk tiles of keys at absolute
positions through `_walk`, so within either kind a row's bits depend on nothing but its own history.

K_DOT and V_DOT are the types that the two products multiply; uint8 stands for FP8 as it is stored (below).

FP8 is decoded in registers, between the load and the product. Static scales cost nothing there: the K scale is in q
and the V scale multiplies the output. A `token` scale is one multiplication per score and one per probability.
The constant subtracted from keys (`KVPages.k_center`) is added back to the scores in float32, one pair of channels at a
time. Last comes a soft cap, compiled only with CAPPED. A sink is where the softmax of a row starts: in prefill its own,
in decoding that of the merge.
Products of FP8 values run in float16, in which every FP8 value is exact; q is divided by a power of two per row
beforehand, so that it is near 1, and the scores are multiplied by it in float32. Probabilities times `token` scales
need bfloat16's range.

With `--attention-compute fp8` products multiply E4M3 as it is stored, where Triton compiles that to
faster FP8 matrix instructions (`Target.fp8_products`; `aot.py` shows them). q is rounded to E4M3 with a scale per row.
Probabilities, unless `token` scales multiply them, are rounded to E4M3 after multiplication by a power of two, which
the division by their sum cancels.

    sm_89, sm_120   both products, prefill and decode               mma.sync e4m3
    sm_90           Q·Kᵀ, prefill; P·V would need V transposed      wgmma e4m3
    sm_100          both products, prefill; decode as sm_90: none   tcgen05 kind::f8f6f4
    gfx942          both products, prefill and decode               v_mfma fp8_fp8

Online softmax (Milakov and Gimelshein 2018) over tiles as in FlashAttention-2 (Dao 2023), with powers of 2.
Shapes: M = ROWS rows of a tile, row m is query m // GROUP of the tile and head m % GROUP of the KV head's group;
N = KEYS; D = K_BLOCK or V_BLOCK, k_dim or v_dim padded to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freight.kernels.triton import formats
from freight.kernels.triton.formats import STATIC, TOKEN, decode, encode, encode_bits, finite_amax, scale_from_amax


@triton.jit
def _load_queries(
    q_ptr, row, query_head, live, row_stride, head_stride, k_scale_ptr, head, K_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr, K_DOT: tl.constexpr,
    LIKE: tl.constexpr,
):  # fmt: skip
    """q [M, D] in the operand type, and the factor [M] that each row's scores must be multiplied with."""
    dims = tl.arange(0, K_BLOCK)
    mask = live[:, None] & (dims < K_DIM)[None, :]
    place = row.to(tl.int64) * row_stride + query_head * head_stride
    q = tl.load(q_ptr + place[:, None] + dims[None, :], mask=mask, other=0.0)
    factor = tl.full(row.shape, 1.0, tl.float32)
    if SCALES == STATIC or K_DOT == tl.float16 or K_DOT == tl.uint8:
        q = q.to(tl.float32)
    if SCALES == STATIC:
        q *= tl.load(k_scale_ptr + head * K_DIM + dims, mask=dims < K_DIM, other=0.0)[None, :]
    if K_DOT == tl.float16:
        # the power of two at or below the row's amax, from its exponent bits; its inverse is exact as well
        exponent = finite_amax(q, 1).to(tl.int32, bitcast=True) & 0x7F800000
        exponent = tl.minimum(tl.maximum(exponent, 1 << 23), 253 << 23)
        factor = exponent.to(tl.float32, bitcast=True)
        q *= ((254 << 23) - exponent).to(tl.float32, bitcast=True)[:, None]
    if K_DOT == tl.uint8:
        factor = scale_from_amax(finite_amax(q, 1), FORMAT)
        q = encode(tl.div_rn(q, tl.broadcast_to(factor[:, None], q.shape)), LIKE, FORMAT)
    else:
        q = q.to(K_DOT)
    return q, factor


@triton.jit
def _fp8_product(a, b, FORMAT: tl.constexpr):
    """a @ b of FP8 values as they are stored. Bytes, which occur in the interpreter only, are decoded."""
    if a.dtype == tl.uint8:
        product = tl.dot(decode(a, FORMAT), decode(b, FORMAT))
    else:
        product = tl.dot(a, b)
    return product


@triton.jit
def _scores(q, k, FORMAT: tl.constexpr, K_DOT: tl.constexpr):
    """q [M, D] @ k [D, N], k as it was loaded; float32."""
    if K_DOT == tl.uint8:
        scores = _fp8_product(q, k, FORMAT)
    else:
        scores = tl.dot(q, decode(k, FORMAT).to(K_DOT), input_precision="ieee")
    return scores


@triton.jit
def _add_values(acc, decay, probability, v, FORMAT: tl.constexpr, V_DOT: tl.constexpr):
    """acc [M, D] * decay [M] + probability [M, N] @ v [N, D], v as it was loaded; float32.

    In FP8 each tile is summed separately, because some GPUs sum such products with less than float32 precision.
    """
    if V_DOT == tl.uint8:
        if v.dtype == tl.uint8:
            p = encode_bits(probability, FORMAT)
        else:
            p = probability.to(v.dtype)
        acc = acc * decay[:, None] + _fp8_product(p, v, FORMAT)
    else:
        p = probability.to(V_DOT)
        acc = tl.dot(p, decode(v, FORMAT).to(V_DOT), acc * decay[:, None], input_precision="ieee")
    return acc


@triton.jit
def _start(sinks_ptr, query_head, live, V_DOT: tl.constexpr, FORMAT: tl.constexpr):
    """(best [M], total [M]) of rows that have seen no key: their heads' sinks in base 2, or nothing."""
    best = tl.full(query_head.shape, float("-inf"), tl.float32)
    total = tl.zeros(query_head.shape, tl.float32)
    if sinks_ptr is not None:
        best = tl.load(sinks_ptr + query_head, mask=live, other=0.0) * 1.44269504088896341
        total += 1.0 if V_DOT != tl.uint8 else 128.0 if FORMAT == "fp8_e4m3fnuz" else 256.0  # as in `_walk`
    return best, total


@triton.jit
def _hide(scores, key, position, window, WINDOWED: tl.constexpr):
    """Scores [M, N], -infinity where the row at `position` [M] does not see `key` [N]."""
    seen = key[None, :] <= position[:, None]
    if WINDOWED:
        seen &= key[None, :] > position[:, None] - window
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _add_center(
    scores, center_ptr, place, live, cos_ptr, sin_ptr, pairs_ptr, num_pairs, head, key, HALF: tl.constexpr,
):  # fmt: skip
    """scores [M, N] plus that of the keys' center. `place` [M] has each row's first factor, `key` [N] positions.

    Layouts: angles [positions / 64, rotary_dim / 2, 64]; pairs [HEADS, num_pairs]; factors of cosines, then of sines.
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
    """Scores times 2 log2(e) / soft cap -> soft-capped, in base 2. `cap` is the soft cap times log2(e)."""
    power = tl.exp2(tl.minimum(scores, 64.0, propagate_nan=tl.PropagateNan.ALL))  # tanh is 1 long before
    return cap - 2.0 * cap / (1.0 + power)  # tanh(x) = 1 - 2 / (1 + e ** 2x)


@triton.jit
def _walk(
    acc, best, total, q, factor, position, begin, end, length, window, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
    table_ptr, head, center_ptr, center_place, live, cos_ptr, sin_ptr, pairs_ptr, num_pairs, cap, HEADS: tl.constexpr,
    K_DIM: tl.constexpr, K_BLOCK: tl.constexpr, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr, WINDOWED: tl.constexpr,
    MASKED: tl.constexpr, K_DOT: tl.constexpr, V_DOT: tl.constexpr, CENTERED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Add the keys of [begin, end), begin on a tile's edge, to (acc [M, D], best [M], total [M]).

    Without MASKED every row sees every key of these tiles, and `end` is on an edge, too.
    """
    k_dims = tl.arange(0, K_BLOCK)
    v_dims = tl.arange(0, V_BLOCK)
    inside = (v_dims < V_DIM)[None, :]
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        stored = key < length
        if MASKED:
            block = tl.load(table_ptr + key // BLOCK_SIZE, mask=stored, other=0)
        else:
            block = tl.load(table_ptr + key // BLOCK_SIZE)
        place = (block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * HEADS + head  # of the vector, among all
        source = place[None, :] * K_DIM + k_dims[:, None]
        if K_DIM == K_BLOCK:
            k = tl.load(k_ptr + source)
        else:
            k = tl.load(k_ptr + source, mask=(k_dims < K_DIM)[:, None], other=0.0)
        scores = _scores(q, k, FORMAT, K_DOT) * factor[:, None]
        if SCALES == TOKEN:
            scores *= formats.token_scale(k_scale_ptr, place, stored, MASKED)[None, :]
        if CENTERED:
            scores = _add_center(
                scores, center_ptr, center_place, live, cos_ptr, sin_ptr, pairs_ptr, num_pairs, head, key, HALF,
            )  # fmt: skip
        if CAPPED:
            scores = _soften(scores, cap)
        if MASKED:
            scores = _hide(scores, key, position, window, WINDOWED)
        new_best = tl.maximum(best, tl.max(scores, 1))
        reference = new_best
        if WINDOWED:  # a row may have seen no key yet
            reference = tl.where(new_best == float("-inf"), 0.0, new_best)
        if V_DOT == tl.uint8:  # times the largest power of two that FORMAT holds, and so is `total`
            probability = tl.exp2(scores - (reference - (7.0 if FORMAT == "fp8_e4m3fnuz" else 8.0))[:, None])
        else:
            probability = tl.exp2(scores - reference[:, None])
        decay = tl.exp2(best - reference)
        total = total * decay + tl.sum(probability, 1)
        source = place[:, None] * V_DIM + v_dims[None, :]
        if MASKED:  # a slot that was never written may hold a NaN
            v = tl.load(v_ptr + source, mask=stored[:, None] & inside, other=0.0)
        elif V_DIM == V_BLOCK:
            v = tl.load(v_ptr + source)
        else:
            v = tl.load(v_ptr + source, mask=inside, other=0.0)
        if SCALES == TOKEN:
            probability *= formats.token_scale(v_scale_ptr, place, stored, MASKED)[None, :]
        acc = _add_values(acc, decay, probability, v, FORMAT, V_DOT)
        best = new_best
    return acc, best, total


@triton.jit
def _finished(
    output, v_scale_ptr, head, dims, like: tl.constexpr, V_DIM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """`output` times V's static scale, in type `like`."""
    if SCALES == STATIC:
        output *= tl.load(v_scale_ptr + head * V_DIM + dims, mask=dims < V_DIM, other=0.0)
    return output.to(like)


@triton.jit
def _sequence_of(starts_ptr, tile, num_seqs, QUERIES: tl.constexpr):
    """The sequence that a tile of QUERIES rows belongs to; sequence i's tiles begin at starts[i] // QUERIES + i."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(starts_ptr + middle) // QUERIES + middle
        if first <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["num_seqs", "table_stride", "window", "num_pairs", "cap"])
def prefill_kernel(
    q_ptr, out_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, starts_ptr, lengths_ptr, tables_ptr, num_seqs,
    table_stride, q_row_stride, q_head_stride, softmax_scale, window, center_ptr, cos_ptr, sin_ptr,
    pairs_ptr, num_pairs, cap, sinks_ptr, GROUP: tl.constexpr, HEADS: tl.constexpr, K_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr,
    SCALES: tl.constexpr, WINDOWED: tl.constexpr, K_DOT: tl.constexpr, V_DOT: tl.constexpr, CENTERED: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """A program: one tile of QUERIES rows of a sequence and all heads of one KV head. softmax_scale holds log2(e)."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows of a sequence see most keys: they go first
    head = tl.program_id(1)
    seq = _sequence_of(starts_ptr, tile, num_seqs, QUERIES)
    begin = tl.load(starts_ptr + seq)
    end = tl.load(starts_ptr + seq + 1)
    first_row = begin + (tile - begin // QUERIES - seq) * QUERIES
    if first_row >= end or end - begin == 1:
        return
    length = tl.load(lengths_ptr + seq)
    m = tl.arange(0, ROWS)
    row = first_row + m // GROUP
    live = (m < QUERIES * GROUP) & (row < end)
    position = length - end + row
    first = length - end + first_row  # position of the first row
    last = tl.minimum(first + QUERIES, length)  # keys that the last row sees
    q, factor = _load_queries(
        q_ptr, row, head * GROUP + m % GROUP, live, q_row_stride, q_head_stride, k_scale_ptr, head, K_DIM, K_BLOCK,
        FORMAT, SCALES, K_DOT, k_ptr.dtype.element_ty,
    )  # fmt: skip
    factor *= softmax_scale
    center_place = ((row.to(tl.int64) * HEADS + head) * GROUP + m % GROUP) * num_pairs * 2
    acc = tl.zeros((ROWS, V_BLOCK), tl.float32)
    best, total = _start(sinks_ptr, head * GROUP + m % GROUP, live, V_DOT, FORMAT)
    table_ptr = tables_ptr + seq.to(tl.int64) * table_stride
    if WINDOWED:
        edge = tl.maximum(first - window + 1, 0) // KEYS * KEYS
    else:
        edge = (first + 1) // KEYS * KEYS
        acc, best, total = _walk(
            acc, best, total, q, factor, position, 0, edge, length, window, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
            table_ptr, head, center_ptr, center_place, live, cos_ptr, sin_ptr, pairs_ptr, num_pairs, cap, HEADS, K_DIM,
            K_BLOCK, V_DIM, V_BLOCK, HALF, BLOCK_SIZE, KEYS, FORMAT, SCALES, WINDOWED, False, K_DOT, V_DOT, CENTERED,
            CAPPED,
        )  # fmt: skip
    acc, best, total = _walk(
        acc, best, total, q, factor, position, edge, last, length, window, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
        table_ptr, head, center_ptr, center_place, live, cos_ptr, sin_ptr, pairs_ptr, num_pairs, cap, HEADS, K_DIM,
        K_BLOCK, V_DIM, V_BLOCK, HALF, BLOCK_SIZE, KEYS, FORMAT, SCALES, WINDOWED, True, K_DOT, V_DOT, CENTERED, CAPPED,
    )  # fmt: skip
    dims = tl.arange(0, V_BLOCK)
    output = _finished(acc / total[:, None], v_scale_ptr, head, dims[None, :], out_ptr.dtype.element_ty, V_DIM, SCALES)
    place = (row.to(tl.int64) * HEADS + head) * GROUP + m % GROUP
    mask = live[:, None] & (dims < V_DIM)[None, :]
    tl.store(out_ptr + place[:, None] * V_DIM + dims[None, :], output, mask=mask)


@triton.jit(do_not_specialize=["table_stride", "max_splits", "window", "num_pairs", "cap"])
def decode_kernel(
    q_ptr, partial_ptr, stats_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, starts_ptr, lengths_ptr, tables_ptr,
    table_stride, max_splits, q_row_stride, q_head_stride, softmax_scale, window, center_ptr, cos_ptr, sin_ptr,
    pairs_ptr, num_pairs, cap, GROUP: tl.constexpr, HEADS: tl.constexpr, K_DIM: tl.constexpr, K_BLOCK: tl.constexpr,
    V_DIM: tl.constexpr, V_BLOCK: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, FORMAT: tl.constexpr,
    SCALES: tl.constexpr, WINDOWED: tl.constexpr, K_DOT: tl.constexpr, V_DOT: tl.constexpr, CENTERED: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """A program: every num_programs(0)-th split of one sequence and KV head.

    Writes acc to partial [num_seqs, HEADS, max_splits, GROUP, V_DIM] and (best, total) to stats [the same, 2].
    """
    head = tl.program_id(1)
    seq = tl.program_id(2)
    row = tl.load(starts_ptr + seq)
    length = tl.load(lengths_ptr + seq)
    if tl.load(starts_ptr + seq + 1) - row != 1:
        return
    m = tl.arange(0, ROWS)
    dims = tl.arange(0, V_BLOCK)
    live = m < GROUP
    rows = tl.full((ROWS,), 0, tl.int32) + row
    q, factor = _load_queries(
        q_ptr, rows, head * GROUP + m, live, q_row_stride, q_head_stride, k_scale_ptr, head, K_DIM, K_BLOCK, FORMAT,
        SCALES, K_DOT, k_ptr.dtype.element_ty,
    )  # fmt: skip
    factor *= softmax_scale
    center_place = ((rows.to(tl.int64) * HEADS + head) * GROUP + m) * num_pairs * 2
    position = tl.full((ROWS,), 0, tl.int32) + length - 1
    table_ptr = tables_ptr + seq.to(tl.int64) * table_stride
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0) // KEYS * KEYS
    for split in range(first // SPLIT + tl.program_id(0), tl.cdiv(length, SPLIT), tl.num_programs(0)):
        begin = tl.maximum(split * SPLIT, first)
        end = tl.minimum(split * SPLIT + SPLIT, length)
        acc = tl.zeros((ROWS, V_BLOCK), tl.float32)
        best = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc, best, total = _walk(
            acc, best, total, q, factor, position, begin, end, length, window, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
            table_ptr, head, center_ptr, center_place, live, cos_ptr, sin_ptr, pairs_ptr, num_pairs, cap, HEADS, K_DIM,
            K_BLOCK, V_DIM, V_BLOCK, HALF, BLOCK_SIZE, KEYS, FORMAT, SCALES, WINDOWED, True, K_DOT, V_DOT, CENTERED,
            CAPPED,
        )  # fmt: skip
        place = ((seq.to(tl.int64) * HEADS + head) * max_splits + split) * GROUP + m
        mask = live[:, None] & (dims < V_DIM)[None, :]
        tl.store(partial_ptr + place[:, None] * V_DIM + dims[None, :], acc, mask=mask)
        tl.store(stats_ptr + place * 2, best, mask=live)
        tl.store(stats_ptr + place * 2 + 1, total, mask=live)


@triton.jit(do_not_specialize=["max_splits", "window"])
def merge_kernel(
    partial_ptr, stats_ptr, out_ptr, v_scale_ptr, starts_ptr, lengths_ptr, max_splits, window, sinks_ptr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr, KEYS: tl.constexpr,
    SPLIT: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr, WINDOWED: tl.constexpr,
    V_DOT: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one sequence and head, in tiles of TILE splits at fixed places, in order."""
    query_head = tl.program_id(0)
    seq = tl.program_id(1)
    row = tl.load(starts_ptr + seq)
    length = tl.load(lengths_ptr + seq)
    if tl.load(starts_ptr + seq + 1) - row != 1 or length == 0:
        return
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0) // KEYS * KEYS // SPLIT
    num_splits = tl.cdiv(length, SPLIT)
    dims = tl.arange(0, V_BLOCK)
    one = tl.zeros((1,), tl.int32)
    best, total = _start(sinks_ptr, query_head + one, one == 0, V_DOT, FORMAT)
    acc = tl.zeros((V_BLOCK,), tl.float32)
    base = (seq.to(tl.int64) * HEADS + query_head // GROUP) * max_splits * GROUP + query_head % GROUP
    for start in range(first // TILE * TILE, num_splits, TILE):
        split = start + tl.arange(0, TILE)
        taken = (split >= first) & (split < num_splits)
        place = base + split * GROUP
        split_best = tl.load(stats_ptr + place * 2, mask=taken, other=float("-inf"))
        split_total = tl.load(stats_ptr + place * 2 + 1, mask=taken, other=0.0)
        mask = taken[:, None] & (dims < V_DIM)[None, :]
        part = tl.load(partial_ptr + place[:, None] * V_DIM + dims[None, :], mask=mask, other=0.0)
        new_best = tl.maximum(best, tl.max(split_best, 0))
        weight = tl.exp2(split_best - new_best)
        decay = tl.exp2(best - new_best)
        total = total * decay + tl.sum(weight * split_total, 0)
        acc = acc * decay + tl.sum(weight[:, None] * part, 0)
        best = new_best
    output = _finished(acc / total, v_scale_ptr, query_head // GROUP, dims, out_ptr.dtype.element_ty, V_DIM, SCALES)
    target = out_ptr + (row.to(tl.int64) * HEADS * GROUP + query_head) * V_DIM + dims
    tl.store(target, output, mask=dims < V_DIM)
