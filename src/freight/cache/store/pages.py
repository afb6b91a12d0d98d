"""The blocks of a pool as bytes: what a page holds, in an order that is the same whatever its
layout in memory.

The payload of a block is, layer by layer of its group, keys, values and measured scales, or the
parts of a state; in each of them token by token, the heads of a token adjacent. Pages that are a
part of others, as values that lie in keys, are there once. Of several ranks the heads are put
together, so a payload is the same for any number of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freight.cache.arena import twin
from freight.cache.pool import KVPool, PagedKV, PagedState
from freight.cache.store.mover import Record
from freight.operands.kv_pages import KVPages

Words = NDArray[np.uint8] | NDArray[np.int16] | NDArray[np.int32] | NDArray[np.int64]
# what numpy copies in place of dtypes that it does not have
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class OtherRanks:
    """The pages of the other ranks, whose memory is mapped here. The pool here lies in an arena, and
    theirs lie alike.

    memories    uint8, of each from rank 1 on
    num_heads   KV heads of the whole model, by layer
    heads       those that each rank has, from rank 0 on, by layer
    """

    memories: tuple[Tensor, ...]
    num_heads: Mapping[int, int]
    heads: Mapping[int, tuple[range, ...]]


class _Field(NamedTuple):
    """A part of a payload, of `shape`, [block_size, heads, …] or a state's. `arrays` have it,
    [num_blocks, …]: one all of it, or several the heads that stand beside each.
    """

    begin: int
    end: int
    shape: tuple[int, ...]
    arrays: tuple[tuple[Words, range], ...]


class GroupBytes:
    """The blocks of group `group` of `pool`, which lies in the memory of the host, and of `others`."""

    def __init__(self, pool: KVPool, group: int, others: OtherRanks | None = None) -> None:
        self._fields: list[_Field] = []
        self.payload_bytes = 0
        layout: list[tuple[str, tuple[int, ...], str]] = []
        for layer, name, tensor in _tensors(pool, group):
            shape: tuple[int, ...] = tuple(tensor.shape[1:])
            arrays: tuple[tuple[Words, range], ...] = ((_words(tensor), range(0)),)
            if others is not None:
                shape = (shape[0], others.num_heads[layer], *shape[2:])
                found = (tensor, *(twin(tensor, memory) for memory in others.memories))
                arrays = tuple(zip(map(_words, found), others.heads[layer], strict=True))
            begin = self.payload_bytes
            self.payload_bytes += int(np.prod(shape)) * tensor.itemsize
            self._fields.append(_Field(begin, self.payload_bytes, shape, arrays))
            layout.append((f"{layer}.{name}", shape, str(tensor.dtype)))
        self.layout = tuple(layout)  # what decides the meaning of a payload's bytes

    def read(self, block: int) -> bytes:
        payload = bytearray(self.payload_bytes)
        view = memoryview(payload)
        for begin, end, shape, arrays in self._fields:
            target = np.frombuffer(view[begin:end], arrays[0][0].dtype).reshape(shape)
            if len(arrays) == 1:
                np.copyto(target, arrays[0][0][block])
                continue
            for array, heads in arrays:
                np.copyto(target[:, heads.start : heads.stop], array[block])
        return bytes(payload)

    def write(self, blocks: Sequence[int], payloads: Record) -> None:
        index = np.asarray(blocks)
        for begin, end, shape, arrays in self._fields:
            values = payloads[:, begin:end].view(arrays[0][0].dtype)
            values = values.reshape(len(blocks), *shape)
            if len(arrays) == 1:
                arrays[0][0][index] = values
                continue
            for array, heads in arrays:
                array[index] = values[:, :, heads.start : heads.stop]


def _words(tensor: Tensor) -> Words:
    words: Words = tensor.view(_SAME_SIZE[tensor.itemsize]).numpy()
    return words


def _tensors(pool: KVPool, group: int) -> Iterator[tuple[int, str, Tensor]]:
    """Yield what the layers of a group keep, [num_blocks, …], with the layer's index and names."""
    for index in pool.spec.groups[group].layers:
        layer = pool.layers[index]
        parts: list[tuple[str, Tensor]] = []
        if isinstance(layer, PagedKV):
            parts = list(_of_pages(layer.pages))
        elif isinstance(layer, PagedState):
            parts = list(layer.states.parts.items())
        for name, tensor in parts:
            yield index, name, tensor


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
