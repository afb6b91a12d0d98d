"""Row-wise operations (csrc/elementwise.cpp): residual addition with RMSNorm, gated activations, each in one pass.

A row's bits depend on that row alone. They differ from the reference's by the order of a sum or the last bits of an
exponential, before the same roundings.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from freight.kernels.cpu.arguments import FORMATS, address, weight_format
from freight.kernels.cpu.library import Library
from freight.operands.activation import GatedActivation

# FreightActivation in csrc/freight.h
_ACTIVATIONS = {GatedActivation.SILU: 0, GatedActivation.GELU_TANH: 1}
_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _Norm(ctypes.Structure):
    """FreightNorm in csrc/freight.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "delta", "weight", "delta_weight", "sum", "out")),
        *((name, _LONG) for name in ("rows", "size")),
        *((name, _INT) for name in ("format", "weight_format", "delta_weight_format")),
        ("eps", ctypes.c_float),
        ("threads", _INT),
    )


@cache
def _add_rms_norm(library: Library) -> Callable[..., None]:
    return library.function("freight_add_rms_norm", ctypes.POINTER(_Norm))


def add_rms_norm(
    library: Library,
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    delta_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.add_rms_norm`. x, delta: [rows, size], one dtype; weight, delta_weight: [size], in it or float32."""
    assert delta is None or (delta.shape == x.shape and delta.dtype == x.dtype)
    x = x.contiguous()
    delta = None if delta is None else delta.contiguous()
    if delta is None or delta_weight is None:
        delta_weight, of_delta = None, 0
    else:
        of_delta = weight_format(delta_weight, x)
    total, out = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    _add_rms_norm(library)(
        _Norm(  # by position, which takes a third of the time
            *(x.data_ptr(), address(delta), address(weight), address(delta_weight), total.data_ptr(), out.data_ptr()),
            *(*x.shape, FORMATS[x.dtype], weight_format(weight, x), of_delta, eps, torch.get_num_threads()),
        )
    )
    return total, out


@cache
def _gated(library: Library) -> Callable[..., None]:
    return library.function("freight_gated", _POINTER, _INT, _POINTER, _INT, _LONG, _LONG, _INT)


def gated(library: Library, gate_up: Tensor, activation: GatedActivation) -> Tensor:
    """`reference.gated`. gate_up: [rows, 2 * size]; returns [rows, size]."""
    gate_up = gate_up.contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    _gated(library)(
        *(gate_up.data_ptr(), _ACTIVATIONS[activation], out.data_ptr()),
        *(FORMATS[gate_up.dtype], rows, size, torch.get_num_threads()),
    )
    return out
