"""Attention over the pages of the cache (csrc/attention.cpp); K and V are decoded in registers.

A row's bits depend only on the keys that it sees: not on the other rows, the chunk, the threads, or
the blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freight.kernels.cpu.arguments import address, check_head_dim, pages_of, rotated_of
from freight.kernels.cpu.interface import FORMATS, FreightAttention
from freight.kernels.cpu.library import Library
from freight.operands.attention import AttentionCall
from freight.operands.batch import Sequences
from freight.operands.kv_pages import KVPages
from freight.operands.packed import PackedWeight


def attention(
    library: Library,
    q: Tensor,
    pages: KVPages,
    sequences: Sequences,
    call: AttentionCall,
    consumer: PackedWeight | None = None,
) -> Tensor:
    """Compute `KernelSet.attention`, [num_tokens, num_heads, v_dim] in q's dtype.

    q: [num_tokens, num_heads, k_dim]. Over quantized and bfloat16 pages, bfloat16 queries use
    bfloat16 dot products in the avx512 build, and matrix tiles in the amx build. Raises KernelError
    for a head_dim above MAX_HEAD_DIM and for a context shorter than its queries, CapacityError if
    working memory cannot be allocated.
    """
    check_head_dim(pages)
    assert call.causal or sequences.are_whole, "later keys of a sequence are not stored yet"
    q = q.contiguous()
    num_tokens, num_heads, k_dim = q.shape
    num_kv_heads, v_dim = pages.v.shape[2:]
    sinks = call.sinks
    assert sinks is None or (sinks.dtype is torch.float32 and sinks.shape == (num_heads,))
    out = library.empty((num_tokens, num_heads, v_dim), q.dtype)
    center = pages.k_center
    library.functions.freight_attention(
        FreightAttention(
            q=q.data_ptr(),
            out=out.data_ptr(),
            k=pages_of(pages.k, pages.k_scale),
            v=pages_of(pages.v, pages.v_scale),
            rotated=rotated_of(pages),
            query_starts=address(sequences.query_starts),
            context_lens=address(sequences.context_lens),
            block_tables=address(sequences.block_tables),
            center_pairs=address(center.pairs) if center else None,
            center_parts=address(center.parts) if center else None,
            center_cos=address(center.cos) if center else None,
            center_sin=address(center.sin) if center else None,
            sinks=address(sinks),
            q_stride=q.stride(0),
            q_type=FORMATS[q.dtype],
            kv_format=FORMATS[pages.k.dtype],
            scales=int(pages.scale_kind),
            num_seqs=sequences.num_seqs,
            max_blocks=sequences.block_tables.shape[1],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            k_dim=k_dim,
            v_dim=v_dim,
            block_size=pages.block_size,
            window=call.window or 0,
            both_ways=int(not call.causal),
            center_size=center.pairs.shape[1] if center else 0,
            rotary_dim=2 * center.cos.shape[1] if center else 0,
            softmax_scale=call.softmax_scale,
            soft_cap=call.soft_cap or 0.0,
            threads=torch.get_num_threads(),
        )
    )
    return out
