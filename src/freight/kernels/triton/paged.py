"""Paged attention: launches and their sizes. The kernels are in `attention.py`.

Grids depend only on the shapes of the batch, never on the values of its lengths, so a step can be
captured in a graph and the host does not wait for the GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from freight.fp8.weights import BLOCK
from freight.kernels.reference import Fp8Products
from freight.kernels.triton.attention import decode_kernel, merge_kernel, prefill_kernel
from freight.kernels.triton.formats import Target, carrier
from freight.kernels.triton.occupancy import programs_for, programs_per_unit
from freight.kernels.triton.rows import Quantized, allocate_output, quantize, quantizes
from freight.kernels.triton.sizes import cdiv, next_power_of_2
from freight.operands.attention import AttentionCall
from freight.operands.batch import Sequences
from freight.operands.kv_pages import KVPages
from freight.operands.packed import PackedWeight
from freight.operands.tiles import KEY_TILE

WHOLE = 128  # channels up to which a head of k is one product (`rest_of`)
SPLIT = 512  # keys of one split in decoding
LONG = 32768  # keys beyond which a sequence has splits of LONG_SPLIT
LONG_SPLIT = 2048  # measured on an H100, 1 x 128 k: 0.86 of the time that splits of 512 take
MERGE_TILE = 16  # splits that `merge_kernel` merges at a time
MERGE_WARPS = 4
# Groups of 128 that the merge quantizes at a time: 32 values a thread. It must not be MERGE_TILE:
# if the quantized tile had the shape of the merged tile, Triton would give both one layout, and the
# sums of the merge would have another order than without quantization.
MERGE_CHUNK = 32


@dataclass(frozen=True)
class Tile:
    """Tile sizes of a program, and its numbers of warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


# `keys` divides tiles.KEY_TILE: with a window, the blocks before the first such tile that the
# window touches may be freed. Keys and values are found through the block table, so their loads are
# two deep, and Triton divides `stages` between the two: 5 keeps two tiles of keys in flight, 7
# three.


def prefill_tile(
    target: Target, block_dim: int, bytes_per_value: int, centered: bool, stored: int = 1
) -> Tile:
    """Choose the tile of prefill.

    block_dim         channels of a head, padded
    bytes_per_value   of the operands of the product
    centered          True if keys have a center
    stored            bytes of a value in the pages
    """
    if bytes_per_value == 4:
        if block_dim <= 128:
            return Tile(32, 32, 4, 1)
        return Tile(16, 16, _warps(target, block_dim), 1)
    if block_dim > 512:  # latents
        if target.arch == 90:  # measured on an H100: 32 rows take 1.3 and 2.9 times as long
            return Tile(64, 32, 8, 3) if stored == 1 else Tile(64, 64, 8, 3)
        if target.backend == "cuda":
            return Tile(32, 32, 8, 3 if target.small else 5)
        if bytes_per_value > 1:
            return Tile(32, 16, 4, 1)
        return Tile(16 if target.arch == "gfx950" else 32, 32, 4, 1)
    if block_dim > 256:
        # 64 rows of sums spill everywhere; on gfx950 so do 32 keys, but FP8 products need them.
        if target.backend == "hip":
            return Tile(32, 16 if target.arch == "gfx950" and bytes_per_value > 1 else 32, 4, 1)
        return Tile(32, 32, 8, 3)
    if target.backend == "hip":
        return Tile(128, 64, 4, 1) if block_dim <= 128 else Tile(64, 32, 4, 1)
    if target.hopper_or_newer:
        return _hopper_prefill_tile(target, block_dim, centered, stored)
    if block_dim <= 128:
        return Tile(64, 32, 8 if centered else 4, 5)
    return Tile(32 if centered else 64, 32, 8, 3)


def _hopper_prefill_tile(target: Target, block_dim: int, centered: bool, stored: int) -> Tile:
    """Choose the tile of prefill in 8 or 16 bits, of heads of up to 256 channels."""
    if block_dim > 128:
        return Tile(64, 32, 8, 5)
    if centered or target.arch != 90:
        return Tile(128, 64, 8, 5)
    # Measured on an H100 with Triton 3.6: 8 warps take 1.05 to 1.3 times as long as 4, although
    # registers spill. With 5 stages of keys in 16 bits one program fits, and takes twice as long.
    return Tile(128, 64, 4, 5 if stored == 1 else 3)


def _warps(target: Target, block_dim: int) -> int:
    """Return the number of warps of a program of 16 rows, which keeps their sums in registers."""
    return 8 if target.small and block_dim > 256 else 4


def decode_tile(
    target: Target, block_dim: int, bytes_per_value: int, group: int = 1, stored: int = 1
) -> Tile:
    """Choose the tile of decoding.

    Its `rows` are the fewest that the matrix units take; the group of a KV head mostly has fewer
    heads. Latents have one KV head, whose `group` is all heads: programs of 32 rows read its keys
    half as often as programs of 16. The other arguments are those of `prefill_tile`.
    """
    if bytes_per_value == 4:
        return Tile(16, 32 if block_dim <= 128 else 16, 4, 1)
    if block_dim > 512 and target.backend == "cuda":
        return _latent_decode_tile(target, group, stored)
    if block_dim > 256:
        # 32 keys spill on sm_80 and gfx942, but FP8 products sum over at least 32.
        stages = 5 if target.hopper_or_newer else 3
        if target.backend == "hip":
            stages = 2
        return Tile(16, 32 if bytes_per_value == 1 else 16, _warps(target, block_dim), stages)
    if target.backend == "hip":
        return Tile(16, 64 if block_dim <= 128 else 32, 4, 2)
    if block_dim > 128 or not target.hopper_or_newer:
        return Tile(16, 32, 4, 5)
    if target.arch == 90 and group <= 16:
        # Measured on an H100 with Triton 3.6: over 64 x 2 k tokens 4 warps take 1.07 times as long
        # with static scales, and 1.26 times with a scale per token.
        return Tile(16, 64, 2, 5)
    return Tile(16, 64, 4, 5) if stored == 1 else Tile(16, 32, 4, 7)


def _latent_decode_tile(target: Target, group: int, stored: int) -> Tile:
    """Choose the tile of decoding over latents on NVIDIA GPUs, in 8 or 16 bits."""
    if target.small:
        return Tile(16, 32, 8, 3)
    if group <= 16:
        return Tile(16, 32, 4, 5)
    if target.arch != 90:
        return Tile(32, 32, 8, 5)
    # Measured on an H100: 8 warps of 32 rows take 1.6 and 2.0 times as long.
    return Tile(32, 32, 4, 5) if stored == 1 else Tile(64, 64, 8, 3)


UNPAIRED = {"K_PAIRS": "", "PAIRS": ""}


def pairs_of(target: Target, pages: KVPages, made: dict[str, Any]) -> dict[str, str]:
    """Return the constants by which keys and values are read in pairs (`Target.pairs`).

    FP8 products do not take pairs. Keys that are one part are not transposed, and need no pairs.
    `made`: the other constants.
    """
    if made["K_DOT"] == tl.uint8 or made["V_DOT"] == tl.uint8:
        return UNPAIRED
    k_strides, v_strides, _, _ = pages.strides
    k_even = _even(pages.k, k_strides)
    v_even = _even(pages.v, v_strides)
    pairs = target.pairs(pages.format)
    return {"K_PAIRS": pairs if made["REST"] and k_even else "", "PAIRS": pairs if v_even else ""}


def _even(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Return whether channels can be read in pairs: their number, strides and address are even."""
    return all(size % 2 == 0 for size in (tensor.shape[3], strides[-1], tensor.data_ptr()))


def dot_types(
    target: Target, q: torch.dtype, pages: KVPages, fp8: bool, decoding: bool
) -> dict[str, tl.dtype]:
    """Return the operand types of Q·Kᵀ and P·V; uint8 stands for FP8 as it is stored."""
    few_rows = decoding or pages.k.shape[3] > 512  # latents: `prefill_tile` has few rows for them
    products = target.fp8_products(pages.format, few_rows) if fp8 else Fp8Products.NONE
    if torch.float32 in (q, pages.k.dtype):
        k_dot = v_dot = tl.float32
    elif pages.k.dtype is torch.bfloat16:
        k_dot = v_dot = tl.bfloat16
    else:
        k_dot = tl.float16
        v_dot = tl.bfloat16 if pages.dynamic and not decoding else tl.float16
    if products is not Fp8Products.NONE:
        k_dot = tl.uint8
        if products is Fp8Products.BOTH and not pages.dynamic:
            v_dot = k_dot
    return {"K_DOT": k_dot, "V_DOT": v_dot}


def rest_of(k_dim: int) -> int:
    """Return how many of the first channels of keys are a separate product; 0: none.

    The other channels are a power of two; those of a latent are its values. A head of 128 channels
    or fewer is one product, padded to a power of two.
    """
    return 0 if k_dim <= WHOLE else k_dim - (1 << k_dim.bit_length() - 1)


def heads_taken(group: int, rows: int, block_dim: int, one_row: bool) -> int:
    """Return how many of the `group` heads of a KV head a program takes.

    It takes all of them if the sums are small. With heads of more than 256 channels, sums of more
    than `rows` rows do not fit in registers: then the fewest programs share the heads, or up to
    twice as many if that leaves fewer rows of a tile unused.

    rows      rows of the program's tile
    one_row   True if each program has one row of a sequence (decoding)
    """
    if block_dim <= 256:
        return group
    least = -(-group // rows)
    if one_row:
        return -(-group // least)

    def filled(count: int) -> float:
        heads = -(-group // count)
        return round(group / (-(-group // heads) * heads) * (rows // heads * heads) / rows, 2)

    count = max(range(least, 2 * least + 1), key=lambda count: (filled(count), -count))
    return -(-group // count)


def constants(
    q: Tensor, pages: KVPages, window: int | None, soft_cap: float | None
) -> dict[str, Any]:
    """Return the compile-time constants that the attention kernels share, except operand types."""
    num_kv_heads, k_dim = pages.k.shape[2:]
    v_dim = pages.v.shape[3]
    # Matrix units sum over at least this many values at a time.
    least = 32 if pages.format.is_fp8 else 16
    rest = rest_of(k_dim)
    at_the_end = (
        pages.v_in_k and pages.v.storage_offset() - pages.k.storage_offset() == k_dim - v_dim
    )
    return {
        "GROUP": q.shape[1] // num_kv_heads,
        "HEADS": num_kv_heads,
        "STRIDES": pages.strides,
        "K_DIM": k_dim,
        "K_BLOCK": max(least, next_power_of_2(k_dim - rest)),
        "REST": rest,
        "REST_BLOCK": max(least, next_power_of_2(rest)) if rest else 0,
        "INSIDE": at_the_end and rest == k_dim - v_dim > 0,
        "V_DIM": v_dim,
        "V_BLOCK": max(32, next_power_of_2(v_dim)),
        "HALF": 0 if pages.k_center is None else pages.k_center.cos.shape[1],
        "BLOCK_SIZE": pages.block_size,
        "FORMAT": str(pages.format) if pages.format.is_fp8 else "",
        "SCALES": int(pages.scale_kind),
        "WINDOWED": window is not None,
        "CENTERED": pages.k_center is not None,
        "CAPPED": soft_cap is not None,
    }


def center_arguments(q: Tensor, pages: KVPages, scale: float) -> tuple[Tensor | int | None, ...]:
    """Return the kernel arguments for a center of keys.

    They are each row's factors, cosines, sines, pairs, and the number of pairs; without a center
    None and 0.
    """
    center = pages.k_center
    if center is None:
        return None, None, None, None, 0
    by_kv_head = q.float().unflatten(1, (pages.k.shape[2], -1)) * scale
    return (
        center.coefficients(by_kv_head),
        center.cos,
        center.sin,
        center.pairs,
        center.pairs.shape[1],
    )


@dataclass(frozen=True)
class _Work:
    """Arguments that the launches of one call share.

    out        [num_tokens, num_heads, v_dim] in q's dtype
    k, v       the pages as kernels take them (`carrier`)
    scale      factor of the scores, including log2(e); with a soft cap also 2 / soft_cap
    extras     the arguments for a center, and the cap
    constants  the result of `constants`
    group      query heads of a KV head in the whole model (`AttentionCall`)
    """

    target: Target
    q: Tensor
    out: Tensor
    k: Tensor
    v: Tensor
    pages: KVPages
    sequences: Sequences
    scale: float
    window: int | None
    both_ways: bool
    extras: tuple[Tensor | int | float | None, ...]
    sinks: Tensor | None
    fp8: bool
    constants: dict[str, Any]
    group: int

    def dot_types(self, decoding: bool) -> dict[str, tl.dtype]:
        """Return the operand types of this call."""
        return dot_types(self.target, self.q.dtype, self.pages, self.fp8, decoding)


def attention(
    target: Target,
    q: Tensor,
    pages: KVPages,
    sequences: Sequences,
    call: AttentionCall,
    fp8: bool = False,
    consumer: PackedWeight | None = None,
) -> Tensor | Quantized:
    """Compute `KernelSet.attention`, quantized if `consumer` takes quantized rows.

    q: [num_tokens, num_heads, k_dim], the last dimension contiguous. With `fp8`, the products that
    `Target.fp8_products` selects multiply FP8. Whether a call that is not causal has whole sequences
    is not checked: it would wait for the GPU. A sequence of one row is decoded: it sees one key.
    """
    window = call.window
    soft_cap = call.soft_cap
    sinks = call.sinks
    assert q.stride(2) == 1
    assert sinks is None or (
        sinks.dtype is torch.float32 and sinks.shape == q.shape[1:2] and sinks.is_contiguous()
    )
    scale = call.softmax_scale * math.log2(math.e) * (2 / soft_cap if soft_cap else 1)
    work = _Work(
        target=target,
        q=q,
        out=torch.empty(*q.shape[:2], pages.v.shape[3], dtype=q.dtype, device=q.device),
        k=carrier(pages.k, target),
        v=carrier(pages.v, target),
        pages=pages,
        sequences=sequences,
        scale=scale,
        window=window,
        both_ways=not call.causal,
        extras=(*center_arguments(q, pages, scale), (soft_cap or 0.0) * math.log2(math.e)),
        sinks=sinks,
        fp8=fp8,
        constants=constants(q, pages, window, soft_cap),
        group=call.group or q.shape[1] // pages.k.shape[2],
    )
    mixed = len(q) > sequences.num_seqs
    if mixed:
        _prefill(work)
    # The same kernel in all steps, mixed or not, so that a row's bits do not depend on the others.
    merged = _decode(work, consumer) if sequences.some_decode else None
    if not quantizes(consumer):
        return work.out
    if mixed or merged is None:
        return quantize(target, work.out.flatten(1), consumer)
    return merged


def _prefill(work: _Work) -> None:
    """Compute the rows of sequences that have more than one row in this step, into `out`."""
    q = work.q
    pages = work.pages
    sequences = work.sequences
    shared = work.constants | work.dot_types(decoding=False)
    bytes_per_value = shared["V_DOT"].primitive_bitwidth // 8
    block_dim = max(shared["K_BLOCK"] + shared["REST_BLOCK"], shared["V_BLOCK"])
    # Matrix units take keys and values of few channels as they are stored, without pairs.
    shared |= (
        pairs_of(work.target, pages, shared) if shared["REST"] and block_dim > 256 else UNPAIRED
    )
    tile = prefill_tile(
        work.target, block_dim, bytes_per_value, shared["CENTERED"], pages.k.element_size()
    )
    assert KEY_TILE % tile.keys == 0
    most = heads_taken(work.group, tile.rows, block_dim, one_row=False)
    taken = min(most, shared["GROUP"])
    queries = max(1, tile.rows // taken)
    grid = (
        (len(q) // queries + sequences.num_seqs) * cdiv(shared["GROUP"], taken),
        shared["HEADS"],
    )
    prefill_kernel[grid](
        q,
        work.out,
        work.k,
        work.v,
        pages.k_scale,
        pages.v_scale,
        sequences.query_starts,
        sequences.context_lens,
        sequences.block_tables,
        sequences.num_seqs,
        sequences.block_tables.stride(0),
        q.stride(0),
        q.stride(1),
        work.scale,
        work.window or 0,
        *work.extras,
        work.sinks,
        **shared,
        BOTH_WAYS=work.both_ways,
        TAKEN=taken,
        ROWS=max(tile.rows, next_power_of_2(most)),
        QUERIES=queries,
        KEYS=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _decode(work: _Work, consumer: PackedWeight | None) -> Quantized | None:
    """Compute the rows of sequences that have one row in this step, into `out`.

    Returns them quantized if the merge does that (`_merged_output`). A separate launch merges the
    splits, even if there is only one: in a graph, block tables are as wide as the longest sequence
    allowed, and if that is not longer than a split, a step takes little time anyway.
    """
    target = work.target
    q = work.q
    pages = work.pages
    sequences = work.sequences
    shared = work.constants | work.dot_types(decoding=True)
    block_dim = max(shared["K_BLOCK"] + shared["REST_BLOCK"], shared["V_BLOCK"])
    shared |= pairs_of(target, pages, shared)
    bytes_per_value = shared["V_DOT"].primitive_bitwidth // 8
    tile = decode_tile(target, block_dim, bytes_per_value, work.group, pages.k.element_size())
    most = heads_taken(work.group, tile.rows, block_dim, one_row=True)
    shared["TAKEN"] = min(most, shared["GROUP"])
    assert KEY_TILE % tile.keys == SPLIT % tile.keys == LONG_SPLIT % tile.keys == 0
    heads = shared["HEADS"]
    num_seqs = sequences.num_seqs
    tables = sequences.block_tables
    max_splits = most_splits(tables.shape[1] * pages.block_size, work.window)
    splits = {"SPLIT": SPLIT, "LONG_SPLIT": LONG_SPLIT, "LONG": LONG}
    partial = q.new_empty(
        num_seqs, heads, max_splits, shared["GROUP"], shared["V_DIM"], dtype=torch.float32
    )
    stats = q.new_empty(*partial.shape[:-1], 2, dtype=torch.float32)
    arrived = q.new_empty(num_seqs, dtype=torch.int32)
    lengths = (sequences.query_starts, sequences.context_lens)
    arguments = (
        q,
        partial,
        stats,
        arrived,
        work.k,
        work.v,
        pages.k_scale,
        pages.v_scale,
        *lengths,
        tables,
        tables.stride(0),
        max_splits,
        q.stride(0),
        q.stride(1),
        work.scale,
        work.window or 0,
        *work.extras,
    )
    rows = max(tile.rows, next_power_of_2(most))  # of one rank, whatever their number
    sizes = {
        "ROWS": rows,
        "KEYS": tile.keys,
        **splits,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    places = programs_per_unit(target, decode_kernel, arguments, shared | sizes) * target.units
    shares = cdiv(shared["GROUP"], shared["TAKEN"])
    programs = programs_for(num_seqs * heads * shares, places, max_splits)
    decode_kernel[(programs * shares, heads, num_seqs)](*arguments, **shared, **sizes)
    result, written, form = _merged_output(work, consumer)
    passed = ("GROUP", "HEADS", "V_DIM", "V_BLOCK", "FORMAT", "SCALES", "WINDOWED", "V_DOT")
    merge_kernel[(q.shape[1], num_seqs)](
        partial,
        stats,
        arrived,
        work.out,
        *written,
        pages.v_scale,
        *lengths,
        max_splits,
        work.window or 0,
        work.sinks,
        **{name: shared[name] for name in passed},
        **form,
        KEYS=tile.keys,
        **splits,
        TILE=MERGE_TILE,
        num_warps=MERGE_WARPS,
    )
    return result


def most_splits(longest: int, window: int | None) -> int:
    """Return the number of splits of a sequence of up to `longest` keys (`attention._split_size`).

    They are counted from the sequence's beginning, also those before a window. A window of up to
    LONG keys has short splits in a sequence of any length.
    """
    short = longest if window is not None and window <= LONG else min(longest, LONG)
    return max(cdiv(short, SPLIT), cdiv(longest, LONG_SPLIT))


def _merged_output(
    work: _Work, consumer: PackedWeight | None
) -> tuple[Quantized | None, tuple[Any, ...], dict[str, Any]]:
    """Allocate what the merge quantizes `out` to for `consumer`, or None if it does not quantize.

    Also returns the merge's arguments and constants for that. On AMD GPUs it does not quantize
    where a program would read what others wrote: Triton's barrier does not wait there until the
    writes of all waves have arrived, before one of them counts the program.
    """
    result, pointers, of_row = allocate_output(work.target, work.out, work.out[0].numel(), consumer)
    scales = of_row["SCALES"]
    v_dim = work.out.shape[2]
    alone = scales == "static" or (scales == "group" and v_dim % BLOCK == 0)
    if isinstance(result, Tensor) or (work.target.backend == "hip" and not alone):
        return (
            None,
            (None, None, 1.0),
            {"OUT_FORMAT": "", "OUT_SCALES": "", "NUM_SCALES": 0, "ALONE": False, "CHUNK": 0},
        )
    form = {
        "OUT_FORMAT": of_row["FORMAT"],
        "OUT_SCALES": scales,
        "NUM_SCALES": of_row["NUM_SCALES"],
        "ALONE": alone,
    }
    return result, pointers, form | {"CHUNK": MERGE_CHUNK}
