"""Checks of the arguments of the C functions, and their addresses, shared by several calls."""

from __future__ import annotations

import torch
from torch import Tensor

from freight.errors import KernelError
from freight.kernels.cpu.interface import FORMATS, MAX_HEAD_DIM, FreightPages
from freight.operands.kv_pages import KVPages


def weight_format(weight: Tensor, x: Tensor) -> int:
    """Return the code of the format of a norm's weight: x's dtype or float32.

    weight: [size]; x: [..., size]
    """
    assert weight.dtype in (x.dtype, torch.float32)
    assert weight.shape == x.shape[-1:]
    return FORMATS[weight.dtype]


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a contiguous tensor, or None without a tensor."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def strided(rows: Tensor) -> int:
    """Return the address of rows that are `rows.stride(0)` values apart.

    They may be columns of a larger tensor; within a row, values are contiguous.
    """
    assert rows.ndim == 2
    assert rows.stride(1) == 1 or rows.shape[1] == 1
    return rows.data_ptr()


def pages_of(page: Tensor, scale: Tensor | None) -> FreightPages:
    """Describe K, V or the rotated channels of `KVPages` and their scales, by strides in bytes."""
    assert page.stride(3) == 1
    fields = FreightPages(data=page.data_ptr())
    fields.block, fields.token, fields.head = [step * page.itemsize for step in page.stride()[:3]]
    if scale is None:
        return fields
    if scale.ndim == 2:  # static
        fields.scale = address(scale)
        return fields
    fields.scale = scale.data_ptr()
    assert scale.ndim == 3 or scale.stride(3) == 1
    steps = [step * scale.itemsize for step in scale.stride()[:3]]
    fields.scale_block, fields.scale_token, fields.scale_head = steps
    return fields


def rotated_of(pages: KVPages) -> FreightPages:
    """Describe the channels of keys that `group` scales store separately, in bfloat16."""
    return FreightPages() if pages.rotated is None else pages_of(pages.rotated, None)


def check_head_dim(pages: KVPages) -> None:
    """Raise KernelError for pages with a head_dim above MAX_HEAD_DIM."""
    head_dim = max(pages.k_dim, pages.v.shape[3])
    if head_dim > MAX_HEAD_DIM:
        raise KernelError(
            f"the CPU kernels support a head_dim of at most {MAX_HEAD_DIM}, not {head_dim}; use --kernels reference"
        )
