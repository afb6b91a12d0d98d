"""The blocks of a pool as bytes: what a page holds, in an order that is the same whatever its
layout in memory.

The payload of a block is, layer by layer of its group, keys, values, measured scales and the keys
of an indexer, or the parts of a state; in each of them token by token, the heads of a token adjacent. Pages that are a
part of others, as values that lie in keys, are there once. What several ranks divide is put
together, so a payload is the same for any number of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freight.cache.arena import twin
from freight.cache.pool import KVPool, PagedKV, PagedState
from freight.cache.store.mover import Record
from freight.model.mixers.dividing import CacheShare, Piece
from freight.operands.kv_pages import KVPages

Words = NDArray[np.uint8] | NDArray[np.int16] | NDArray[np.int32] | NDArray[np.int64]
_Index: TypeAlias = "tuple[Piece | slice[None, None, None], ...]"
# what numpy copies in place of dtypes that it does not have
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class OtherRanks:
    """The pages and states of the other ranks, whose memory is mapped here. The pool here lies in an
    arena, and theirs lie alike.

    memories    uint8, of each from rank 1 on
    shares      what each rank has of a layer's part, from rank 0 on, by layer and name
    """

    memories: tuple[Tensor, ...]
    shares: Mapping[int, Mapping[str, tuple[CacheShare, ...]]]


class _Piece(NamedTuple):
    """What `words`, [num_blocks, …], have of a field: those at `own` of a block are at `whole` of
    the field.
    """

    words: Words
    own: _Index = ()
    whole: _Index = ()


class _Field(NamedTuple):
    """A part of a payload, of `shape`: [block_size, heads, …] or a state's.

    written   where it is, on all ranks
    read      those of `written` that are it once
    """

    begin: int
    end: int
    shape: tuple[int, ...]
    written: tuple[_Piece, ...]
    read: tuple[_Piece, ...]


class GroupBytes:
    """The blocks of group `group` of `pool`, which lies in the memory of the host, and of `others`."""

    def __init__(self, pool: KVPool, group: int, other_ranks: OtherRanks | None = None) -> None:
        self._fields: list[_Field] = []
        self.payload_bytes = 0
        layout: list[tuple[str, tuple[int, ...], str]] = []
        for layer, name, tensor in _tensors(pool, group):
            shape: tuple[int, ...] = tuple(tensor.shape[1:])
            written: tuple[_Piece, ...] = (_Piece(_words(tensor)),)
            if other_ranks is not None:
                shares = other_ranks.shares[layer][name]
                twins = (tensor, *(twin(tensor, memory) for memory in other_ranks.memories))
                shape, written = _whole(shape, [_words(piece) for piece in twins], shares)
            # what several ranks have alike is read from one; a slice is no key of a dict
            read = tuple({str(piece.whole): piece for piece in written}.values())
            begin = self.payload_bytes
            self.payload_bytes += int(np.prod(shape)) * tensor.itemsize
            self._fields.append(_Field(begin, self.payload_bytes, shape, written, read))
            layout.append((f"{layer}.{name}", shape, str(tensor.dtype)))
        self.layout = tuple(layout)  # what decides the meaning of a payload's bytes

    def read(self, block: int) -> bytes:
        payload = bytearray(self.payload_bytes)
        view = memoryview(payload)
        for begin, end, shape, _, read in self._fields:
            target = np.frombuffer(view[begin:end], read[0].words.dtype).reshape(shape)
            for words, source_index, target_index in read:
                np.copyto(target[target_index], words[block][source_index])
        return bytes(payload)

    def write(self, blocks: Sequence[int], payloads: Record) -> None:
        index = np.asarray(blocks)
        for begin, end, shape, written, _ in self._fields:
            values = payloads[:, begin:end].view(written[0].words.dtype)
            values = values.reshape(len(blocks), *shape)
            for words, target_index, source_index in written:
                words[(index, *target_index)] = values[(slice(None), *source_index)]


def _whole(
    shape: tuple[int, ...], ranks: Sequence[Words], shares: Sequence[CacheShare]
) -> tuple[tuple[int, ...], tuple[_Piece, ...]]:
    """Return the shape of a part that ranks divide, and the pieces that each of them has. shape: of
    one rank's.
    """
    axis = shares[0].axis
    before = (slice(None),) * axis
    size = max(piece_slice.stop for share in shares for piece_slice in share.pieces)
    located = []
    for words, share in zip(ranks, shares, strict=True):
        begin = 0
        for piece in share.pieces:
            end = begin + piece.stop - piece.start
            located.append(_Piece(words, (*before, slice(begin, end)), (*before, piece)))
            begin = end
        assert begin == shape[axis], (share, shape)
    return (*shape[:axis], size, *shape[axis + 1 :]), tuple(located)


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
    if pages.index is not None:
        yield "index_k", pages.index.k
        if pages.index.scale is not None:
            yield "index_scale", pages.index.scale
