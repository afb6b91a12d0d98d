"""Row-wise operations (csrc/elementwise.cpp): RMSNorm, SiLU times up, rotary embedding, each in one pass.

A row's bits depend on that row alone. `rotate` gives the reference's bits; the others differ from them by the order
of a sum or the last bits of an exponential, before the same roundings.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from freight.kernels.cpu.library import Library
from freight.kernels.cpu.pages import rows_of

# FreightFormat in csrc/freight.h
_FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


def make_rms_norm(library: Library) -> Callable[[Tensor, Tensor, float], Tensor]:
    """`KernelSet.rms_norm` for this build."""
    call = library.functions.freight_rms_norm
    call.argtypes = [_POINTER, _POINTER, _POINTER, _INT, _LONG, _LONG, _LONG, _LONG, _FLOAT, _INT]
    call.restype = None

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [rows, size] or [rows, heads, size]; weight: [size], in x's dtype."""
        assert weight.dtype == x.dtype
        assert weight.is_contiguous()
        x = x.contiguous() if x.ndim == 2 else rows_of(x)
        heads = x.shape[1] if x.ndim == 3 else 1
        out = torch.empty(x.shape, dtype=x.dtype)
        call(
            *(x.data_ptr(), weight.data_ptr(), out.data_ptr(), _FORMATS[x.dtype], x.shape[0], heads, x.shape[-1]),
            *(x.stride(0), eps, torch.get_num_threads()),
        )
        return out

    return rms_norm


def make_silu_mul(library: Library) -> Callable[[Tensor], Tensor]:
    """`KernelSet.silu_mul` for this build."""
    call = library.functions.freight_silu_mul
    call.argtypes = [_POINTER, _POINTER, _INT, _LONG, _LONG, _INT]
    call.restype = None

    def silu_mul(gate_up: Tensor) -> Tensor:
        """gate_up: [rows, 2 * size]; returns [rows, size]."""
        gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, size), dtype=gate_up.dtype)
        threads = torch.get_num_threads()
        call(gate_up.data_ptr(), out.data_ptr(), _FORMATS[gate_up.dtype], rows, size, threads)
        return out

    return silu_mul


def make_rotate(library: Library) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`KernelSet.rotate` for this build."""
    call = library.functions.freight_rotate
    call.argtypes = [_POINTER, _POINTER, _POINTER, _POINTER, _INT, _LONG, _LONG, _LONG, _LONG, _INT]
    call.restype = None

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [rows, heads, head_dim], its rows may lie apart; cos, sin: [rows, head_dim / 2] float32."""
        x = rows_of(x)
        rows, heads, dim = x.shape
        assert cos.shape == sin.shape == (rows, dim // 2)
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        call(
            *(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), _FORMATS[x.dtype], rows, heads, dim),
            *(x.stride(0), torch.get_num_threads()),
        )
        return out

    return rotate
