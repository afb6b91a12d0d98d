"""Paged attention: the kernels. `paged.py` launches them.

A sequence that has one row in this step is *decoded*: its keys are cut into splits at
fixed positions, which are distributed over several programs, and `merge_kernel` merges the splits
in order. The merge also quantizes the rows, with the bits of `rows.quantize`, which is launched for
all rows if the step has prefill, too. A sequence that has more rows is a chunk of *prefill*: a
program takes a tile of its rows and walks the keys. Both walk tiles of keys at absolute positions
through `walk.py`, so within either kind a row's bits depend only on its own history.

K_DOT and V_DOT are the operand types of the two products; uint8 stands for FP8 as it is stored
(below).

FP8 is decoded in registers, between the load and the product. Static scales cost nothing there: the
K scale is in q and the V scale multiplies the output. A `token` scale is one multiplication per
score and one per probability. The constant subtracted from keys (`KVPages.k_center`) is added back
to the scores in float32, one pair of channels at a time. A soft cap comes last, compiled only with
CAPPED. A sink is the initial state of a row's softmax: of the walk in prefill, of the merge in
decoding. Products of FP8 values run in float16, in which every FP8 value is exact; q is divided by
a power of two per row beforehand, so that it is near 1, and the scores are multiplied by it in
float32. Probabilities times `token` scales need bfloat16's range in prefill; in decoding they are
divided by a power of two near the largest scale of the split so far (`unit`), which avoids the
conversion of every value to bfloat16.

With `--attention-compute fp8` products multiply E4M3 as it is stored, where Triton compiles that to
faster FP8 matrix instructions (`Target.fp8_products`; `aot.py` shows them). q is rounded to E4M3
with a scale per row. Probabilities, unless `token` scales multiply them, are rounded to E4M3 after
multiplication by a power of two, which the division by their sum cancels.

    sm_89, sm_120   both products, prefill and decode               mma.sync e4m3
    sm_90           Q·Kᵀ, prefill; P·V would need V transposed      wgmma e4m3
    sm_100          both products, prefill; decode as sm_90: none   tcgen05 kind::f8f6f4
    gfx942          both products, prefill and decode               v_mfma fp8_fp8
    gfx950          both products, prefill and decode               v_mfma f8f6f4, fp8_fp8

Prefill of latents counts as decode here, because its tiles have as few rows.

Online softmax (Milakov and Gimelshein 2018) over tiles as in FlashAttention-2 (Dao 2023), with
powers of 2. Shapes: M = ROWS rows of a tile, row m is query m // TAKEN of the tile and head m %
TAKEN of the program's share of the KV head's group; N = KEYS; D = K_BLOCK or V_BLOCK, k_dim (or a
part of it) or v_dim padded to a power of two.

Latents have one KV head for up to 128 heads, of which a program takes as many as its tile has rows.
Only the tiles for sm_90 were chosen by measurements; those of other GPUs by the registers, shared
memory and instructions that the compilers report (`tests/kernels/triton/latent_cases.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from freight.kernels.triton.formats import SMALLEST, STATIC
from freight.kernels.triton.queries import load_queries
from freight.kernels.triton.rows import quantize_written_row, write_head
from freight.kernels.triton.walk import initial, no_values, summed_values, walk


@triton.jit
def _finished(
    output, v_scale_ptr, head, dims, like: tl.constexpr, V_DIM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Multiply `output` by V's static scale, if any, and convert it to type `like`."""
    if SCALES == STATIC:
        output *= tl.load(v_scale_ptr + head * V_DIM + dims, mask=dims < V_DIM, other=0.0)
    return output.to(like)


@triton.jit
def sequence_of(starts_ptr, tile, num_seqs, QUERIES: tl.constexpr):
    """Find the sequence that a tile of QUERIES rows belongs to, by binary search.

    Sequence i's tiles begin at starts[i] // QUERIES + i.
    """
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


@triton.jit
def _split_size(
    length, window, SPLIT: tl.constexpr, LONG_SPLIT: tl.constexpr, LONG: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Return how many keys a split has, in a sequence that sees `length` keys, or `window` of them.

    Short ones need many splits to keep the memory busy. Where more than LONG keys are seen there
    are enough of LONG_SPLIT, which leave less to merge.
    """
    seen = tl.minimum(length, window) if WINDOWED else length
    return tl.where(seen > LONG, LONG_SPLIT, SPLIT)


@triton.jit
def _member(m, GROUP: tl.constexpr, TAKEN: tl.constexpr):
    """Return the number of head `m` of this program within its KV head's GROUP, and its validity.

    It is valid if it is one of the program's TAKEN heads. Programs that take other heads of the
    same KV head are adjacent on axis 0, so that they read the same keys at the same time.
    """
    SHARES: tl.constexpr = (GROUP + TAKEN - 1) // TAKEN
    member = m
    in_group = m < TAKEN
    if SHARES > 1:
        member += tl.program_id(0) % SHARES * TAKEN
        in_group &= member < GROUP
    return member, in_group


@triton.jit(do_not_specialize=["num_seqs", "table_stride", "window", "num_pairs", "cap"])
def prefill_kernel(
    q_ptr, out_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, starts_ptr, lengths_ptr, tables_ptr, num_seqs,
    table_stride, q_row_stride, q_head_stride, softmax_scale, window, center_ptr, cos_ptr, sin_ptr,
    pairs_ptr, num_pairs, cap, sinks_ptr, GROUP: tl.constexpr, TAKEN: tl.constexpr, HEADS: tl.constexpr,
    STRIDES: tl.constexpr, K_DIM: tl.constexpr, K_BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    INSIDE: tl.constexpr, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr,
    WINDOWED: tl.constexpr, K_DOT: tl.constexpr, V_DOT: tl.constexpr, CENTERED: tl.constexpr, CAPPED: tl.constexpr,
    K_PAIRS: tl.constexpr, PAIRS: tl.constexpr, BOTH_WAYS: tl.constexpr,
):  # fmt: skip
    """A program: one tile of QUERIES rows of a sequence and TAKEN heads of one KV head.

    softmax_scale includes log2(e).
    """
    SHARES: tl.constexpr = (GROUP + TAKEN - 1) // TAKEN
    # In reverse: a sequence's last rows see the most keys, so they are scheduled first.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // SHARES
    head = tl.program_id(1)
    seq = sequence_of(starts_ptr, tile, num_seqs, QUERIES)
    begin = tl.load(starts_ptr + seq)
    end = tl.load(starts_ptr + seq + 1)
    first_row = begin + (tile - begin // QUERIES - seq) * QUERIES
    if first_row >= end or end - begin == 1:
        return
    length = tl.load(lengths_ptr + seq)
    m = tl.arange(0, ROWS)
    row = first_row + m // TAKEN
    member, live = _member(m % TAKEN, GROUP, TAKEN)
    live &= (m < QUERIES * TAKEN) & (row < end)
    position = length - end + row
    first = length - end + first_row  # position of the first row
    last = tl.minimum(first + QUERIES, length)  # the end of the keys that the last row sees
    if BOTH_WAYS:
        last = tl.minimum(first + QUERIES - 1 + window, length) if WINDOWED else length
    q, factor = load_queries(
        q_ptr, row, head * GROUP + member, live, q_row_stride, q_head_stride, k_scale_ptr, head, K_DIM, K_BLOCK, REST,
        REST_BLOCK, FORMAT, SCALES, K_DOT, K_PAIRS, k_ptr.dtype.element_ty,
    )  # fmt: skip
    factor *= softmax_scale
    center_place = ((row.to(tl.int64) * HEADS + head) * GROUP + member) * num_pairs * 2
    acc = no_values(ROWS, V_BLOCK, PAIRS)
    best, total = initial(sinks_ptr, head * GROUP + member, live, V_DOT, FORMAT)
    unit = tl.full((), SMALLEST, tl.float32)
    table_ptr = tables_ptr + seq.to(tl.int64) * table_stride
    if WINDOWED:
        edge = tl.maximum(first - window + 1, 0) // KEYS * KEYS
    elif BOTH_WAYS:
        edge = length // KEYS * KEYS
    else:
        edge = (first + 1) // KEYS * KEYS
    acc, best, total, unit = walk(
        acc, best, total, unit, q, factor, position, 0, edge, last, length, window, k_ptr, v_ptr, k_scale_ptr,
        v_scale_ptr, table_ptr, head, center_ptr, center_place, live, cos_ptr, sin_ptr, pairs_ptr, num_pairs, cap,
        STRIDES, K_DIM, K_BLOCK, REST, REST_BLOCK, INSIDE, V_DIM, V_BLOCK, HALF, BLOCK_SIZE, KEYS, FORMAT, SCALES,
        WINDOWED, not WINDOWED, K_DOT, V_DOT, CENTERED, CAPPED, K_PAIRS, PAIRS, None, BOTH_WAYS,
    )  # fmt: skip
    dims = tl.arange(0, V_BLOCK)
    output = _finished(
        summed_values(acc, unit, SCALES, V_DOT, PAIRS) / total[:, None],
        v_scale_ptr,
        head,
        dims[None, :],
        out_ptr.dtype.element_ty,
        V_DIM,
        SCALES,
    )
    place = (row.to(tl.int64) * HEADS + head) * GROUP + member
    mask = live[:, None] & (dims < V_DIM)[None, :]
    tl.store(out_ptr + place[:, None] * V_DIM + dims[None, :], output, mask=mask)


@triton.jit(do_not_specialize=["table_stride", "max_splits", "window", "num_pairs", "cap"])
def decode_kernel(
    q_ptr, partial_ptr, stats_ptr, arrived_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, starts_ptr, lengths_ptr,
    tables_ptr, table_stride, max_splits, q_row_stride, q_head_stride, softmax_scale, window, center_ptr, cos_ptr,
    sin_ptr, pairs_ptr, num_pairs, cap, GROUP: tl.constexpr, TAKEN: tl.constexpr, HEADS: tl.constexpr,
    STRIDES: tl.constexpr, K_DIM: tl.constexpr, K_BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    INSIDE: tl.constexpr, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, LONG_SPLIT: tl.constexpr, LONG: tl.constexpr,
    FORMAT: tl.constexpr, SCALES: tl.constexpr,
    WINDOWED: tl.constexpr, K_DOT: tl.constexpr, V_DOT: tl.constexpr, CENTERED: tl.constexpr, CAPPED: tl.constexpr,
    K_PAIRS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A program: TAKEN heads of a KV head, and every n-th split of a sequence, of n programs.

    Writes acc to partial [num_seqs, HEADS, max_splits, GROUP, V_DIM] and (best, total) to stats
    [num_seqs, HEADS, max_splits, GROUP, 2]. Sets arrived [num_seqs] to 0 for `merge_kernel`.
    """
    SHARES: tl.constexpr = (GROUP + TAKEN - 1) // TAKEN
    head = tl.program_id(1)
    seq = tl.program_id(2)
    row = tl.load(starts_ptr + seq)
    length = tl.load(lengths_ptr + seq)
    if tl.load(starts_ptr + seq + 1) - row != 1:
        return
    tl.store(arrived_ptr + seq, 0, mask=(head == 0) & (tl.program_id(0) == 0))
    m = tl.arange(0, ROWS)
    dims = tl.arange(0, V_BLOCK)
    member, live = _member(m, GROUP, TAKEN)
    rows = tl.full((ROWS,), 0, tl.int32) + row
    q, factor = load_queries(
        q_ptr, rows, head * GROUP + member, live, q_row_stride, q_head_stride, k_scale_ptr, head, K_DIM, K_BLOCK, REST,
        REST_BLOCK, FORMAT, SCALES, K_DOT, K_PAIRS, k_ptr.dtype.element_ty,
    )  # fmt: skip
    factor *= softmax_scale
    center_place = ((rows.to(tl.int64) * HEADS + head) * GROUP + member) * num_pairs * 2
    position = tl.full((ROWS,), 0, tl.int32) + length - 1
    table_ptr = tables_ptr + seq.to(tl.int64) * table_stride
    first = tl.maximum(length - window, 0) // KEYS * KEYS if WINDOWED else 0
    program = tl.program_id(0) // SHARES
    programs = tl.num_programs(0) // SHARES
    size = _split_size(length, window, SPLIT, LONG_SPLIT, LONG, WINDOWED)
    for split in range(first // size + program, tl.cdiv(length, size), programs):
        begin = tl.maximum(split * size, first)
        end = tl.minimum(split * size + size, length)
        acc = no_values(ROWS, V_BLOCK, PAIRS)
        best = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        unit = tl.full((), SMALLEST, tl.float32)
        acc, best, total, unit = walk(
            acc, best, total, unit, q, factor, position, begin, end // KEYS * KEYS, end, length, window, k_ptr, v_ptr,
            k_scale_ptr, v_scale_ptr, table_ptr, head, center_ptr, center_place, live, cos_ptr, sin_ptr, pairs_ptr,
            num_pairs, cap, STRIDES, K_DIM, K_BLOCK, REST, REST_BLOCK, INSIDE, V_DIM, V_BLOCK, HALF, BLOCK_SIZE, KEYS,
            FORMAT, SCALES, WINDOWED, True, K_DOT, V_DOT, CENTERED, CAPPED, K_PAIRS, PAIRS, 1, False,
        )  # fmt: skip
        values = summed_values(acc, unit, SCALES, V_DOT, PAIRS)
        place = ((seq.to(tl.int64) * HEADS + head) * max_splits + split) * GROUP + member
        mask = live[:, None] & (dims < V_DIM)[None, :]
        tl.store(partial_ptr + place[:, None] * V_DIM + dims[None, :], values, mask=mask)
        tl.store(stats_ptr + place * 2, best, mask=live)
        tl.store(stats_ptr + place * 2 + 1, total, mask=live)


@triton.jit(do_not_specialize=["max_splits", "window"])
def merge_kernel(
    partial_ptr, stats_ptr, arrived_ptr, out_ptr, codes_ptr, scale_ptr, static_scale, v_scale_ptr, starts_ptr,
    lengths_ptr, max_splits, window, sinks_ptr, GROUP: tl.constexpr, HEADS: tl.constexpr, V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, LONG_SPLIT: tl.constexpr, LONG: tl.constexpr,
    TILE: tl.constexpr, FORMAT: tl.constexpr,
    SCALES: tl.constexpr, WINDOWED: tl.constexpr, V_DOT: tl.constexpr, OUT_FORMAT: tl.constexpr,
    OUT_SCALES: tl.constexpr, NUM_SCALES: tl.constexpr, ALONE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one sequence and head, in tiles of TILE splits at fixed places, in order.

    With OUT_SCALES, which is SCALES of `write_row`, the result is also quantized, to codes and
    scale. With ALONE, the scales of a head do not depend on other heads, and each program quantizes
    its head. Otherwise the program that writes the last head of a row quantizes the row, CHUNK
    groups of 128 at a time.
    """
    QUERY_HEADS: tl.constexpr = HEADS * GROUP
    SIZE: tl.constexpr = QUERY_HEADS * V_DIM
    query_head = tl.program_id(0)
    seq = tl.program_id(1)
    row = tl.load(starts_ptr + seq)
    length = tl.load(lengths_ptr + seq)
    if tl.load(starts_ptr + seq + 1) - row != 1 or length == 0:
        return
    size = _split_size(length, window, SPLIT, LONG_SPLIT, LONG, WINDOWED)
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0) // KEYS * KEYS // size
    num_splits = tl.cdiv(length, size)
    dims = tl.arange(0, V_BLOCK)
    one_row = tl.zeros((1,), tl.int32)
    best, total = initial(sinks_ptr, query_head + one_row, one_row == 0, V_DOT, FORMAT)
    acc = tl.zeros((V_BLOCK,), tl.float32)
    base = (
        seq.to(tl.int64) * HEADS + query_head // GROUP
    ) * max_splits * GROUP + query_head % GROUP
    for start in range(first // TILE * TILE, num_splits, TILE):
        split = start + tl.arange(0, TILE)
        in_range = (split >= first) & (split < num_splits)
        place = base + split * GROUP
        split_best = tl.load(stats_ptr + place * 2, mask=in_range, other=float("-inf"))
        split_total = tl.load(stats_ptr + place * 2 + 1, mask=in_range, other=0.0)
        mask = in_range[:, None] & (dims < V_DIM)[None, :]
        part = tl.load(partial_ptr + place[:, None] * V_DIM + dims[None, :], mask=mask, other=0.0)
        new_best = tl.maximum(best, tl.max(split_best, 0))
        weight = tl.exp2(split_best - new_best)
        decay = tl.exp2(best - new_best)
        total = total * decay + tl.sum(weight * split_total, 0)
        acc = acc * decay + tl.sum(weight[:, None] * part, 0)
        best = new_best
    output = _finished(
        acc / total, v_scale_ptr, query_head // GROUP, dims, out_ptr.dtype.element_ty, V_DIM, SCALES
    )
    row = row.to(tl.int64)
    tl.store(out_ptr + (row * QUERY_HEADS + query_head) * V_DIM + dims, output, mask=dims < V_DIM)
    if ALONE:
        write_head(
            output, codes_ptr, scale_ptr, static_scale, row, query_head, dims, QUERY_HEADS, V_DIM, V_BLOCK, NUM_SCALES,
            OUT_FORMAT, OUT_SCALES,
        )  # fmt: skip
    elif OUT_SCALES != "":
        # All threads of the program must have stored the head before it is counted as written.
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + seq, 1, sem="acq_rel", scope="gpu") == QUERY_HEADS - 1:
            quantize_written_row(
                out_ptr + row * SIZE, codes_ptr, scale_ptr, static_scale, row, SIZE, NUM_SCALES, OUT_FORMAT, OUT_SCALES,
                CHUNK,
            )  # fmt: skip
