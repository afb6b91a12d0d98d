"""Residual addition fused with RMSNorm, and gated activations (csrc/elementwise.cpp).

A row's bits depend on that row alone. Results are rounded where the reference rounds. Before
that, sums may have another order, and exponentials may differ in their last bits. `consumer` has no
effect (`CpuKernels`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from freight.kernels.cpu.arguments import address, weight_format
from freight.kernels.cpu.interface import FORMATS, GATED_ACTIVATIONS, FreightGated, FreightNorm
from freight.kernels.cpu.library import Library
from freight.operands.activation import GatedActivation
from freight.operands.packed import PackedWeight


def add_rms_norm(
    library: Library,
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    consumer: PackedWeight | None = None,
    delta_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `KernelSet.add_rms_norm`.

    x, delta: [rows, size], one dtype; weight, delta_weight: [size], in that dtype or float32.
    Without delta, `delta_weight` is ignored and the sum that is returned is x itself.
    """
    assert delta is None or (delta.shape == x.shape and delta.dtype == x.dtype)
    x = x.contiguous()
    if delta is None:
        delta_weight = None
    else:
        delta = delta.contiguous()
    delta_weight_format = 0  # not read without a weight
    if delta_weight is not None:
        delta_weight_format = weight_format(delta_weight, x)
    rows, size = x.shape
    total = x if delta is None else library.empty((rows, size), x.dtype)
    out = library.empty((rows, size), x.dtype)
    library.functions.freight_add_rms_norm(
        FreightNorm(  # positional arguments, because keywords take three times as long
            x.data_ptr(),
            address(delta),
            address(weight),
            address(delta_weight),
            total.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            FORMATS[x.dtype],
            weight_format(weight, x),
            delta_weight_format,
            eps,
            torch.get_num_threads(),
        )
    )
    return total, out


def gated(
    library: Library,
    gate_up: Tensor,
    activation: GatedActivation,
    consumer: PackedWeight | None = None,
) -> Tensor:
    """Compute `KernelSet.gated`, [rows, size]. gate_up: [rows, 2 * size]."""
    gate_up = gate_up.contiguous()
    rows = gate_up.shape[0]
    size = gate_up.shape[1] // 2
    out = library.empty((rows, size), gate_up.dtype)
    library.functions.freight_gated(
        FreightGated(
            gate_up.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            FORMATS[gate_up.dtype],
            GATED_ACTIVATIONS[activation.function],
            activation.limit,
            torch.get_num_threads(),
        )
    )
    return out
