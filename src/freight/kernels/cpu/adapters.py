"""What LoRA adapters add to the rows of a product (csrc/adapters.cpp).

Results differ from the reference's in the order of sums in float32, before the same one rounding.
A row's bits depend on that row and its adapter alone. A recording reads the adapters of the rows
and the bank anew at every replay.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from freight.kernels.cpu.arguments import address, strided
from freight.kernels.cpu.interface import FORMATS, FreightAdapters
from freight.kernels.cpu.library import Library
from freight.operands.adapters import AdapterBank


@cache
def _in_memory(ends: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """Return `ends` as a C array that stays, because recordings keep its address."""
    return (ctypes.c_int64 * len(ends))(*ends)


def describe(bank: AdapterBank, dtype: torch.dtype) -> FreightAdapters:
    """Return the fields of a bank for rows of `dtype`; the others are zero."""
    num_slots, num_parts, max_rank, in_features = bank.a.shape
    out_features = bank.ends[-1]
    assert bank.b.shape == (num_slots, max_rank, out_features)
    assert bank.ranks.shape == bank.scalings.shape == (num_slots, num_parts)
    assert len(bank.ends) == num_parts
    assert dtype == bank.a.dtype == bank.b.dtype
    assert bank.ranks.dtype == torch.int32
    assert bank.scalings.dtype == torch.float32
    return FreightAdapters(
        a=address(bank.a),
        b=address(bank.b),
        ranks=address(bank.ranks),
        scalings=address(bank.scalings),
        ends=ctypes.addressof(_in_memory(bank.ends)),
        in_features=in_features,
        out_features=out_features,
        num_slots=num_slots,
        num_parts=num_parts,
        max_rank=max_rank,
        format=FORMATS[dtype],
    )


def add_adapters(
    library: Library, y: Tensor, x: Tensor, bank: AdapterBank, adapters: Tensor
) -> Tensor:
    """Compute `KernelSet.add_adapters` in place. x is contiguous within a row."""
    rows, in_features = x.shape
    assert bank.a.shape[3] == in_features
    assert y.shape == (rows, bank.ends[-1])
    assert y.dtype == x.dtype
    assert adapters.shape == (rows,)
    assert adapters.dtype == torch.int32
    arguments = describe(bank, x.dtype)
    arguments.x = strided(x)
    arguments.adapters = address(adapters)
    arguments.y = address(y)
    arguments.rows = rows
    arguments.x_stride = x.stride(0)
    arguments.threads = torch.get_num_threads()
    library.functions.freight_add_adapters(arguments)
    return y
