"""Rotate and store (csrc/store.cpp): all steps between the qkv projection and attention, fused.

Bit-identical to the reference, except that the norms of heads sum in the order of this build's
`add_rms_norm`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freight.kernels.cpu.arguments import (
    address,
    check_head_dim,
    pages_of,
    rotated_of,
    weight_format,
)
from freight.kernels.cpu.interface import FORMATS, FreightStore
from freight.kernels.cpu.library import Library
from freight.operands.kv_pages import KVPages
from freight.operands.rotary import Rotary


def rotate_store(
    library: Library,
    qkv: Tensor,
    rotary: Rotary,
    positions: Tensor,
    slots: Tensor | None,
    pages: KVPages,
) -> Tensor:
    """Compute `KernelSet.rotate_store`. qkv: contiguous.

    Raises KernelError for a head_dim above MAX_HEAD_DIM.
    """
    check_head_dim(pages)
    rows, width = qkv.shape
    num_kv_heads = pages.k.shape[2]
    k_dim = pages.k_dim
    v_dim = pages.v.shape[3]
    if slots is None:
        num_kv_heads = 0
    num_v_heads = 0 if pages.v_in_k else num_kv_heads
    num_heads = (width - num_kv_heads * k_dim - num_v_heads * v_dim) // k_dim
    assert width == (num_heads + num_kv_heads) * k_dim + num_v_heads * v_dim
    assert rotary.rotary_dim <= k_dim
    q = library.empty((rows, num_heads, k_dim), qkv.dtype)
    q_norm, k_norm = rotary.norms or (None, None)
    library.functions.freight_rotate_store(
        FreightStore(
            qkv=address(qkv),
            q=q.data_ptr(),
            k=pages_of(pages.k, pages.k_scale),
            v=pages_of(pages.v, pages.v_scale),
            rotated=rotated_of(pages),
            positions=address(positions),
            slots=address(positions if slots is None else slots),
            cos=address(rotary.cos),
            sin=address(rotary.sin),
            q_factor=address(rotary.q_factor),
            q_norm=address(q_norm),
            k_norm=address(k_norm),
            k_center=address(pages.k_center.b) if pages.k_center else None,
            counters=address(pages.counters),
            row_counters=None if slots is None else address(pages.counters_of_rows(rows)),
            rows=rows,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            num_v_heads=num_v_heads,
            k_dim=k_dim,
            v_dim=v_dim,
            block_size=pages.block_size,
            rotary_dim=rotary.rotary_dim,
            type=FORMATS[qkv.dtype],
            kv_format=FORMATS[pages.k.dtype],
            scales=int(pages.scale_kind),
            q_norm_type=0 if q_norm is None else weight_format(q_norm, q),
            k_norm_type=0 if k_norm is None else weight_format(k_norm, q),
            eps=rotary.eps,
            threads=torch.get_num_threads(),
        )
    )
    return q
