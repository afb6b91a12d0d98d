"""Arguments about the pages of the cache that attention and store pass to the C functions (csrc/attention.h)."""

from __future__ import annotations

from torch import Tensor

from freight.errors import KernelError
from freight.fp8.formats import Format
from freight.operands.kv_pages import KVPages

# FreightFormat in csrc/freight.h
FORMATS = {
    Format.FLOAT32: 0,
    Format.FLOAT16: 1,
    Format.BFLOAT16: 2,
    Format.E4M3FN: 3,
    Format.E5M2: 4,
    Format.E4M3FNUZ: 5,
}
MAX_HEAD_DIM = 1024  # kMaxHeadDim in csrc/attention_tile.h


def scales_of(pages: KVPages) -> int:
    """FreightKvScales: none, static or per token."""
    if pages.k_scale is None:
        return 0
    return 2 if pages.dynamic else 1


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
