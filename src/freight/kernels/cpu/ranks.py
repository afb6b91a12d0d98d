"""Gathers columns over the ranks of one machine (csrc/ranks.cpp)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from freight.kernels.cpu.interface import FreightGather
from freight.kernels.cpu.library import Library
from freight.parallel.shared import SharedMemory


def gather(library: Library, memory: SharedMemory, x: Tensor, first: bool = False) -> Tensor:
    """Compute `KernelSet.gather` over shared memory. x: [rows, columns].

    Raises RankError if another rank has ended, KernelError if it has left the step.
    """
    x = x.contiguous()
    rows, columns = x.shape
    out = library.empty((rows, memory.size * columns), x.dtype)
    part_bytes = columns * x.itemsize
    library.functions.freight_gather(
        FreightGather(
            ctypes.addressof(memory.described),
            x.data_ptr(),
            out.data_ptr(),
            rows,
            part_bytes,
            0 if first else -1,
            torch.get_num_threads(),
        )
    )
    return out
