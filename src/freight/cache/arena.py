"""Arena: the tensors of a pool in one run of bytes, where another process can find them."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from freight.cache.spec import KVCacheSpec

_ALIGNED = 64  # bytes, as torch aligns what it allocates
_MOST_TENSORS = 16  # of a layer


class Arena:
    """Allocates tensors one after another in `memory`, uint8 [bytes].

    Pools of one spec that are allocated in the same order lie alike, so `twin` finds a tensor of one
    in the memory of another.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._end = 0

    @staticmethod
    def bytes_for(spec: KVCacheSpec, num_blocks: tuple[int, ...]) -> int:
        """Return bytes that a pool fits into. The system commits those alone that are written."""
        return spec.bytes_of(num_blocks) + len(spec.layers) * _MOST_TENSORS * _ALIGNED

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of this shape, with unspecified content."""
        begin = -(-self._end // _ALIGNED) * _ALIGNED
        self._end = begin + math.prod(shape) * dtype.itemsize
        assert self._end <= len(self.memory), (self._end, len(self.memory))
        return self.memory[begin : self._end].view(dtype).view(shape)


def mapped(file: int, num_bytes: int) -> Tensor:
    """Return the first bytes of a file, uint8 [num_bytes], as memory that is shared with all who map
    it. The descriptor may be closed then.
    """
    return torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)


def twin(tensor: Tensor, memory: Tensor) -> Tensor:
    """Return the tensor that lies in `memory` as `tensor` lies in its arena."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
