"""Gathers columns over ranks (csrc/ranks.cpp)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from freight.kernels.cpu.interface import FreightGather
from freight.kernels.cpu.library import Library
from freight.parallel.ranks import Transport


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
