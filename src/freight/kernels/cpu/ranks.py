"""Gathers columns over ranks (csrc/ranks.cpp), alone and around a product (csrc/linear.cpp)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from freight.kernels.cpu.arguments import address
from freight.kernels.cpu.interface import FORMATS, FreightGather, FreightSharedLinear
from freight.kernels.cpu.library import Library
from freight.kernels.cpu.linear import CpuWeight
from freight.operands.packed import PackedWeight
from freight.parallel.ranks import Transport

FEW = 8  # rows of a product, as in a decode step, whose copies cost too little to measure


def gather(library: Library, transport: Transport, x: Tensor, first: bool = False) -> Tensor:
    """Compute `KernelSet.gather`. x: [rows, columns].

    Raises RankError if another rank has ended, KernelError if it has left the step.
    """
    x = x.contiguous()
    rows, columns = x.shape
    out = library.empty((rows, transport.size * columns), x.dtype)
    part_bytes = columns * x.itemsize
    library.functions.freight_gather(
        FreightGather(
            ctypes.addressof(transport.described),
            x.data_ptr(),
            out.data_ptr(),
            rows,
            part_bytes,
            0 if first else -1,
            torch.get_num_threads(),
        )
    )
    return out


def shared_linear(
    library: Library,
    transport: Transport,
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    whole: bool,
) -> Tensor:
    """Compute `KernelSet.shared_linear`. bias: [out_features] in x's dtype.

    Raises as `gather` does.
    """
    assert isinstance(weight, CpuWeight)
    x = x.contiguous()
    rows, columns = x.shape
    assert columns * (1 if whole else transport.size) == weight.in_features
    assert bias is None or (bias.dtype == x.dtype and bias.shape == (weight.out_features,))
    out = library.empty((rows, transport.size * weight.out_features), x.dtype)
    library.functions.freight_shared_linear(
        FreightSharedLinear(
            ctypes.addressof(transport.described),
            weight.address,
            x.data_ptr(),
            address(bias),
            out.data_ptr(),
            rows,
            FORMATS[x.dtype],
            int(whole),
            torch.get_num_threads(),
        )
    )
    return out
