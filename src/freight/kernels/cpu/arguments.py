"""What several calls pass to the C functions: codes of formats, addresses, and the limits they have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from freight.errors import KernelError
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.operands.kv_pages import KVPages

# FreightFormat in csrc/freight.h, by dtype
FORMATS = {
    torch_dtype(Format.FLOAT32): 0,
    torch_dtype(Format.FLOAT16): 1,
    torch_dtype(Format.BFLOAT16): 2,
    torch_dtype(Format.E4M3FN): 3,
    torch_dtype(Format.E5M2): 4,
    torch_dtype(Format.E4M3FNUZ): 5,
    torch_dtype(Format.INT8): 6,
}
MAX_HEAD_DIM = 1024  # kMaxHeadDim in csrc/attention_tile.h


def weight_format(weight: Tensor, x: Tensor) -> int:
    """The code of a norm's weight, [size] in the dtype of x, [..., size], or float32."""
    assert weight.dtype in (x.dtype, torch.float32)
    assert weight.shape == x.shape[-1:]
    return FORMATS[weight.dtype]


def address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def check_head_dim(pages: KVPages) -> None:
    """Raises KernelError for pages with a head_dim above MAX_HEAD_DIM."""
    head_dim = max(pages.k.shape[3], pages.v.shape[3])
    if head_dim > MAX_HEAD_DIM:
        raise KernelError(
            f"the CPU kernels support a head_dim of at most {MAX_HEAD_DIM}, not {head_dim}; use --kernels reference"
        )
