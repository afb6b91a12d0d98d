"""Quantize and store (csrc/store.cpp): K and V of a step into their slots, in one pass, in the reference's bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from freight.fp8.quantize import format_of
from freight.fp8.values import KVPages
from freight.kernels.cpu.library import Library
from freight.kernels.cpu.pages import FORMATS, address, rows_of, scales_of


class _Arguments(ctypes.Structure):
    """FreightStore in csrc/attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k", "v", "k_pages", "v_pages", "k_scale", "v_scale")),
        *((name, ctypes.c_void_p) for name in ("slots", "nan_count")),
        *((name, ctypes.c_int64) for name in ("rows", "k_stride", "v_stride")),
        *((name, ctypes.c_int32) for name in ("num_kv_heads", "head_dim", "type", "kv_format", "scales", "threads")),
    )


def make_store_kv(library: Library) -> Callable[[Tensor, Tensor, Tensor, KVPages], None]:
    """`KernelSet.store_kv` for this build."""
    call = library.functions.freight_store
    call.argtypes = [ctypes.POINTER(_Arguments)]
    call.restype = None

    def store_kv(k: Tensor, v: Tensor, slots: Tensor, pages: KVPages) -> None:
        """Quantize k and v, [rows, num_kv_heads, head_dim], into the pages' slots; slot -1 stores nothing."""
        k, v = rows_of(k), rows_of(v)
        rows, num_kv_heads, head_dim = k.shape
        assert (num_kv_heads, head_dim) == pages.k.shape[2:]
        assert k.dtype == v.dtype
        call(
            _Arguments(
                k=k.data_ptr(),
                v=v.data_ptr(),
                k_pages=address(pages.k),
                v_pages=address(pages.v),
                k_scale=address(pages.k_scale),
                v_scale=address(pages.v_scale),
                slots=address(slots),
                nan_count=address(pages.nan_count),
                rows=rows,
                k_stride=k.stride(0),
                v_stride=v.stride(0),
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                type=FORMATS[format_of(k)],
                kv_format=FORMATS[pages.format],
                scales=scales_of(pages),
                threads=torch.get_num_threads(),
            )
        )

    return store_kv
