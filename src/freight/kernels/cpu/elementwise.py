"""Row-wise operations (csrc/elementwise.cpp): residual addition with RMSNorm, SiLU times up, each in one pass.

A row's bits depend on that row alone. They differ from the reference's by the order of a sum or the last bits of an
exponential, before the same roundings.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from freight.kernels.cpu.library import Library
from freight.operands.activation import GatedActivation

# FreightFormat in csrc/freight.h
_FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


def add_rms_norm(
    library: Library,
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    delta_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.add_rms_norm`. x, delta: [rows, size]; weight: [size]; one dtype."""
    assert weight.dtype == x.dtype
    assert weight.is_contiguous()
    assert delta_weight is None
    assert delta is None or (delta.shape == x.shape and delta.dtype == x.dtype)
    types = (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT, _LONG, _LONG, _FLOAT, _INT)
    x = x.contiguous()
    delta = None if delta is None else delta.contiguous()
    total, out = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    library.function("freight_add_rms_norm", *types)(
        *(x.data_ptr(), None if delta is None else delta.data_ptr(), weight.data_ptr()),
        *(total.data_ptr(), out.data_ptr(), _FORMATS[x.dtype], *x.shape, eps, torch.get_num_threads()),
    )
    return total, out


def gated(library: Library, gate_up: Tensor, activation: GatedActivation) -> Tensor:
    """`reference.gated`. gate_up: [rows, 2 * size]; returns [rows, size]."""
    assert activation is GatedActivation.SILU
    gate_up = gate_up.contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    library.function("freight_silu_mul", _POINTER, _POINTER, _INT, _LONG, _LONG, _INT)(
        gate_up.data_ptr(), out.data_ptr(), _FORMATS[gate_up.dtype], rows, size, torch.get_num_threads()
    )
    return out
