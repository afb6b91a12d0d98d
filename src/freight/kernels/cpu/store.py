"""Rotate and store (csrc/store.cpp): the steps between the projection of q, k and v and attention, in one pass.

Bit-identical to the reference, except that a norm of heads sums in the order of this build's `add_rms_norm`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from freight.fp8.cast import format_of
from freight.kernels.cpu.library import Library
from freight.kernels.cpu.pages import FORMATS, address, check_head_dim, scales_of
from freight.operands.kv_pages import KVPages
from freight.operands.rotary import Rotary


class _Arguments(ctypes.Structure):
    """FreightStore in csrc/attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "q", "k_pages", "v_pages", "k_scale", "v_scale")),
        *((name, ctypes.c_void_p) for name in ("positions", "slots", "cos", "sin", "q_norm", "k_norm")),
        *((name, ctypes.c_void_p) for name in ("k_center", "v_center", "counters")),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("type", "kv_format", "scales")),
        ("eps", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


def rotate_store(
    library: Library, qkv: Tensor, rotary: Rotary, positions: Tensor, slots: Tensor, pages: KVPages
) -> Tensor:
    """`reference.rotate_store`. qkv: contiguous.

    Raises KernelError for a head_dim above MAX_HEAD_DIM.
    """
    check_head_dim(pages)
    rows, width = qkv.shape
    num_kv_heads, head_dim = pages.k.shape[2:]
    all_heads = width // head_dim
    assert pages.v.shape[3] == rotary.rotary_dim == head_dim
    assert rotary.norms is None or all(weight.dtype == qkv.dtype for weight in rotary.norms)
    q = torch.empty((rows, all_heads - 2 * num_kv_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm = rotary.norms or (None, None)
    library.function("freight_rotate_store", ctypes.POINTER(_Arguments))(
        _Arguments(
            qkv=address(qkv),
            q=q.data_ptr(),
            k_pages=address(pages.k),
            v_pages=address(pages.v),
            k_scale=address(pages.k_scale),
            v_scale=address(pages.v_scale),
            positions=address(positions),
            slots=address(slots),
            cos=address(rotary.cos),
            sin=address(rotary.sin),
            q_norm=address(q_norm),
            k_norm=address(k_norm),
            k_center=address(pages.k_center.b) if pages.k_center else None,
            v_center=address(pages.v_center),
            counters=address(pages.counters),
            rows=rows,
            num_heads=q.shape[1],
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            type=FORMATS[format_of(qkv)],
            kv_format=FORMATS[pages.format],
            scales=scales_of(pages),
            eps=rotary.eps,
            threads=torch.get_num_threads(),
        )
    )
    return q
