"""Paged attention: launches and their sizes. The kernels are in `attention.py`.

Grids depend on the shapes of the batch alone, never on the values of its lengths, so a step can be captured in a graph
and the host does not wait for the GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from freight.kernels.reference import Fp8Products
from freight.kernels.triton.attention import decode_kernel, merge_kernel, prefill_kernel
from freight.kernels.triton.formats import Target, carrier
from freight.kernels.triton.occupancy import programs_for, programs_per_unit
from freight.operands.batch import Sequences
from freight.operands.kv_pages import KVPages
from freight.operands.tiles import KEY_TILE

SPLIT = 512  # keys of one split in decoding
MERGE_TILE = 16


@dataclass(frozen=True)
class Tile:
    """Tile sizes of a program, and its numbers of warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


# `keys` divides reference.KEY_TILE: with a window, the blocks before the first such tile that it touches may be gone.
# Keys and values are found through the block table, so their loads are two deep, and Triton shares `stages` out between
# the two: 5 keeps two tiles of keys in flight, 7 three.


def prefill_tile(target: Target, block_dim: int, bytes_per_value: int, centered: bool) -> Tile:
    """`bytes_per_value` is that of the product's operands; `centered` is whether keys have a center."""
    if bytes_per_value == 4:
        return Tile(32, 32, 4, 1)
    if target.backend == "hip":
        return Tile(128, 64, 4, 1) if block_dim <= 128 else Tile(64, 32, 4, 1)
    if target.hopper_or_newer:
        return Tile(128, 64, 8, 5) if block_dim <= 128 else Tile(64, 32, 8, 5)
    return Tile(64, 32, 8 if centered else 4, 5) if block_dim <= 128 else Tile(64, 32, 8, 3)


def decode_tile(target: Target, block_dim: int, bytes_per_value: int, pairs: str) -> Tile:
    """`rows` is the least that the matrix units take; a KV head's group mostly has fewer. `pairs` is `Target.pairs`."""
    if bytes_per_value == 4:
        return Tile(16, 32, 4, 1)
    if target.backend == "hip":
        return Tile(16, 64 if block_dim <= 128 else 32, 4, 2)
    if pairs and block_dim <= 128 and target.hopper_or_newer:
        return Tile(16, 64, 4, 5)
    return Tile(16, 32, 4, 7 if block_dim <= 128 and target.hopper_or_newer else 5)


def dot_types(target: Target, q: torch.dtype, pages: KVPages, fp8: bool, decoding: bool) -> dict[str, tl.dtype]:
    """The operand types of Q·Kᵀ and P·V; uint8 stands for FP8 as it is stored."""
    products = target.fp8_products(pages.format, decoding) if fp8 else Fp8Products.NONE
    if torch.float32 in (q, pages.k.dtype):
        k_dot = v_dot = tl.float32
    elif pages.k.dtype is torch.bfloat16:
        k_dot = v_dot = tl.bfloat16
    else:
        k_dot, v_dot = tl.float16, tl.bfloat16 if pages.dynamic and not decoding else tl.float16
    if products is not Fp8Products.NONE:
        k_dot = tl.uint8
        if products is Fp8Products.BOTH and not pages.dynamic:
            v_dot = k_dot
    return {"K_DOT": k_dot, "V_DOT": v_dot}


def constants(q: Tensor, pages: KVPages, window: int | None, soft_cap: float | None) -> dict[str, Any]:
    """Compile-time constants that the attention kernels share, except the operand types."""
    num_kv_heads, k_dim = pages.k.shape[2:]
    v_dim = pages.v.shape[3]
    return {
        "GROUP": q.shape[1] // num_kv_heads,
        "HEADS": num_kv_heads,
        "K_DIM": k_dim,
        # matrix units sum over 16 values or more at a time, over 32 of FP8
        "K_BLOCK": max(32 if pages.format.is_fp8 else 16, triton.next_power_of_2(k_dim)),
        "V_DIM": v_dim,
        "V_BLOCK": max(32, triton.next_power_of_2(v_dim)),
        "HALF": 0 if pages.k_center is None else pages.k_center.cos.shape[1],
        "BLOCK_SIZE": pages.block_size,
        "FORMAT": str(pages.format) if pages.format.is_fp8 else "",
        "SCALES": int(pages.scale_kind),
        "WINDOWED": window is not None,
        "CENTERED": pages.k_center is not None,
        "CAPPED": soft_cap is not None,
    }


def center_arguments(q: Tensor, pages: KVPages, scale: float) -> tuple[Tensor | int | None, ...]:
    """Kernel arguments for a center: each row's factors, cosines, sines, pairs, and the number of pairs."""
    center = pages.k_center
    if center is None:
        return None, None, None, None, 0
    by_kv_head = q.float().unflatten(1, (pages.k.shape[2], -1)) * scale
    return center.coefficients(by_kv_head), center.cos, center.sin, center.pairs, center.pairs.shape[1]


def attention(
    target: Target,
    q: Tensor,
    pages: KVPages,
    sequences: Sequences,
    softmax_scale: float,
    window: int | None,
    soft_cap: float | None = None,
    fp8: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """`reference.attention`. q: [num_tokens, num_heads, k_dim], its last dimension contiguous.

    With `fp8`, the products that `Target.fp8_products` names multiply FP8.
    """
    assert q.stride(2) == 1
    assert math.prod(pages.k.shape[:3]) < 2**31  # vectors of a layer; offsets of their values have 64 bits
    assert sinks is None or (sinks.dtype is torch.float32 and sinks.shape == q.shape[1:2] and sinks.is_contiguous())
    out = torch.empty(*q.shape[:2], pages.v.shape[3], dtype=q.dtype, device=q.device)
    shared = constants(q, pages, window, soft_cap)
    k, v = carrier(pages.k, target), carrier(pages.v, target)
    scale = softmax_scale * math.log2(math.e) * (2 / soft_cap if soft_cap else 1)
    cap = (soft_cap or 0.0) * math.log2(math.e)
    lengths = (sequences.query_starts, sequences.context_lens)
    extras = (*center_arguments(q, pages, scale), cap)
    num_tokens, num_seqs = len(q), sequences.num_seqs
    if num_tokens > num_seqs:
        types = dot_types(target, q.dtype, pages, fp8, decoding=False)
        bytes_per_value = types["V_DOT"].primitive_bitwidth // 8
        tile = prefill_tile(target, max(shared["K_BLOCK"], shared["V_BLOCK"]), bytes_per_value, shared["CENTERED"])
        assert KEY_TILE % tile.keys == 0
        queries = max(1, tile.rows // shared["GROUP"])
        grid = (num_tokens // queries + num_seqs, shared["HEADS"])
        prefill_kernel[grid](
            *(q, out, k, v, pages.k_scale, pages.v_scale, *lengths, sequences.block_tables, num_seqs),
            *(sequences.block_tables.stride(0), q.stride(0), q.stride(1), scale, window or 0),
            *extras,
            sinks,
            **(shared | types),
            ROWS=max(tile.rows, triton.next_power_of_2(shared["GROUP"])),
            QUERIES=queries,
            KEYS=tile.keys,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    shared |= dot_types(target, q.dtype, pages, fp8, decoding=True)
    in_pairs = shared["V_DOT"] is not tl.uint8 and shared["V_DIM"] % 2 == 0
    shared["PAIRS"] = target.pairs(pages.format) if in_pairs else ""
    _decode(target, q, out, k, v, pages, sequences, scale, window, extras, sinks, shared)
    return out


def _decode(
    target: Target,
    q: Tensor,
    out: Tensor,
    k: Tensor,
    v: Tensor,
    pages: KVPages,
    sequences: Sequences,
    scale: float,
    window: int | None,
    extras: tuple[Tensor | int | float | None, ...],
    sinks: Tensor | None,
    shared: dict[str, Any],
) -> None:
    """Compute the rows of sequences that have one row in this step, into `out`."""
    bytes_per_value = shared["V_DOT"].primitive_bitwidth // 8
    tile = decode_tile(target, max(shared["K_BLOCK"], shared["V_BLOCK"]), bytes_per_value, shared["PAIRS"])
    assert KEY_TILE % tile.keys == SPLIT % tile.keys == 0
    heads, num_seqs = shared["HEADS"], sequences.num_seqs
    tables = sequences.block_tables
    max_splits = triton.cdiv(tables.shape[1] * pages.block_size, SPLIT)
    partial = q.new_empty(num_seqs, heads, max_splits, shared["GROUP"], shared["V_DIM"], dtype=torch.float32)
    stats = q.new_empty(*partial.shape[:-1], 2, dtype=torch.float32)
    arguments = (
        *(q, partial, stats, k, v, pages.k_scale, pages.v_scale, sequences.query_starts, sequences.context_lens),
        *(tables, tables.stride(0), max_splits, q.stride(0), q.stride(1), scale, window or 0),
        *extras,
    )
    rows = max(tile.rows, triton.next_power_of_2(shared["GROUP"]))
    sizes = {"ROWS": rows, "KEYS": tile.keys, "SPLIT": SPLIT, "num_warps": tile.warps, "num_stages": tile.stages}
    places = programs_per_unit(target, decode_kernel, arguments, shared | sizes) * target.units
    programs = programs_for(num_seqs * heads, places, max_splits)
    decode_kernel[(programs, heads, num_seqs)](*arguments, **shared, **sizes)
    kept = ("GROUP", "HEADS", "V_DIM", "V_BLOCK", "FORMAT", "SCALES", "WINDOWED", "V_DOT")
    merge_kernel[(q.shape[1], num_seqs)](
        *(partial, stats, out, pages.v_scale, sequences.query_starts, sequences.context_lens),
        *(max_splits, window or 0, sinks),
        **{name: shared[name] for name in kept},
        KEYS=tile.keys,
        SPLIT=SPLIT,
        TILE=MERGE_TILE,
        num_warps=1 if shared["V_DIM"] <= 64 else 4,
    )
