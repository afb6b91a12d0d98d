"""Row-wise operations (csrc/elementwise.cpp): residual addition with RMSNorm, SiLU times up, each in one pass.

A row's bits depend on that row alone. They differ from the reference's by the order of a sum or the last bits of an
exponential, before the same roundings.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from freight.kernels.cpu.library import Library
from freight.kernels.kernel_set import AddNorm, SiluMul

# FreightFormat in csrc/freight.h
_FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


def make_add_rms_norm(library: Library) -> AddNorm:
    """`KernelSet.add_rms_norm` for this build."""
    types = (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT, _LONG, _LONG, _FLOAT, _INT)
    call = library.function("freight_add_rms_norm", *types)

    def add_rms_norm(
        x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, consumer: object = None
    ) -> tuple[Tensor, Tensor]:
        """x + delta and its norm. x, delta: [rows, size]; weight: [size]; one dtype."""
        assert weight.dtype == x.dtype
        assert weight.is_contiguous()
        assert delta is None or (delta.shape == x.shape and delta.dtype == x.dtype)
        x = x.contiguous()
        delta = None if delta is None else delta.contiguous()
        total, out = x if delta is None else torch.empty_like(x), torch.empty_like(x)
        call(
            *(x.data_ptr(), None if delta is None else delta.data_ptr(), weight.data_ptr()),
            *(total.data_ptr(), out.data_ptr(), _FORMATS[x.dtype], *x.shape, eps, torch.get_num_threads()),
        )
        return total, out

    return add_rms_norm


def make_silu_mul(library: Library) -> SiluMul:
    """`KernelSet.silu_mul` for this build."""
    call = library.function("freight_silu_mul", _POINTER, _POINTER, _INT, _LONG, _LONG, _INT)

    def silu_mul(gate_up: Tensor, consumer: object = None) -> Tensor:
        """gate_up: [rows, 2 * size]; returns [rows, size]."""
        gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
        threads = torch.get_num_threads()
        call(gate_up.data_ptr(), out.data_ptr(), _FORMATS[gate_up.dtype], rows, size, threads)
        return out

    return silu_mul
