"""The blocks of a pool as bytes: what a page holds, in an order that is the same whatever its
layout in memory.

The payload of a block is, layer by layer of its group, keys, values and measured scales, or the
parts of a state; in each of them token by token, the heads of a token adjacent. Pages that are a
part of others, as values that lie in keys, are there once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freight.cache.pool import KVPool, PagedKV, PagedState
from freight.cache.store.mover import Record
from freight.operands.kv_pages import KVPages

Words = NDArray[np.uint8] | NDArray[np.int16] | NDArray[np.int32] | NDArray[np.int64]
# what numpy copies in place of dtypes that it does not have
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class GroupBytes:
    """The blocks of group `group` of `pool`, which lies in the memory of the host."""

    def __init__(self, pool: KVPool, group: int) -> None:
        named = list(_tensors(pool, group))
        self._arrays: list[Words] = [
            tensor.view(_SAME_SIZE[tensor.itemsize]).numpy() for _, tensor in named
        ]
        self._ends: list[tuple[int, int]] = []
        size = 0
        for array in self._arrays:
            width = int(np.prod(array.shape[1:])) * array.itemsize
            self._ends.append((size, size + width))
            size += width
        self.payload_bytes = size
        # what decides the meaning of a payload's bytes
        self.layout = tuple((name, tuple(one.shape[1:]), str(one.dtype)) for name, one in named)

    def read(self, block: int) -> bytes:
        payload = bytearray(self.payload_bytes)
        view = memoryview(payload)
        for array, (begin, end) in zip(self._arrays, self._ends, strict=True):
            target = np.frombuffer(view[begin:end], array.dtype).reshape(array.shape[1:])
            np.copyto(target, array[block])
        return bytes(payload)

    def write(self, blocks: Sequence[int], payloads: Record) -> None:
        index = np.asarray(blocks)
        for array, (begin, end) in zip(self._arrays, self._ends, strict=True):
            values = payloads[:, begin:end].view(array.dtype)
            array[index] = values.reshape(len(blocks), *array.shape[1:])


def _tensors(pool: KVPool, group: int) -> Iterator[tuple[str, Tensor]]:
    """Yield what the layers of a group keep, [num_blocks, …], with names."""
    for index in pool.spec.groups[group].layers:
        layer = pool.layers[index]
        parts: list[tuple[str, Tensor]] = []
        if isinstance(layer, PagedKV):
            parts = list(_of_pages(layer.pages))
        elif isinstance(layer, PagedState):
            parts = list(layer.states.parts.items())
        for name, tensor in parts:
            yield f"{index}.{name}", tensor


def _of_pages(pages: KVPages) -> Iterator[tuple[str, Tensor]]:
    yield "k", pages.k
    if not pages.v_in_k:
        yield "v", pages.v
    if pages.dynamic and pages.k_scale is not None and pages.v_scale is not None:
        yield "k_scale", pages.k_scale
        if not pages.v_in_k:
            yield "v_scale", pages.v_scale
    if pages.rotated is not None:
        yield "rotated", pages.rotated
