"""KVPool: the memory of the cache, by layer. Only `PagedKV.store` writes pages and their scales;
only the mixer of its layer writes a state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from freight.cache.groups import least_of_complete
from freight.cache.pages import Empty, allocate_pages, empty_on, expand_scale
from freight.cache.spec import KVCacheSpec, LayerStateSpec
from freight.fp8.cast import torch_dtype
from freight.fp8.scheme import LayerScales
from freight.kernels.interface import KernelSet, SparseKernels
from freight.operands.attention import AttentionCall
from freight.operands.batch import ForwardBatch
from freight.operands.kv_pages import KeyCenter, KVPages
from freight.operands.packed import PackedWeight, Rows
from freight.operands.rotary import Rotary
from freight.operands.states import States, Stretch
from freight.parallel.stages import Stage
from freight.settings.engine import KVCacheConfig


class LayerKV(Protocol):
    """One layer's part of the cache, as the layer sees it. In a step, `store` comes before
    `attend`.
    """

    def store(self, qkv: Tensor, rotary: Rotary, batch: ForwardBatch) -> Tensor:
        """Norm and rotate the queries and keys in qkv, quantize keys and values into the batch's
        slots, and return q.

        qkv: [num_tokens, num_heads * k_dim + num_kv_heads * (k_dim + v_dim)], as projected; q:
        [num_tokens, num_heads, k_dim].
        """
        ...

    def rotate(self, q: Tensor, rotary: Rotary, batch: ForwardBatch) -> Tensor:
        """Norm and rotate the queries only, in place of `store`, for a layer that reads another
        layer's keys and values.

        q: [num_tokens, num_heads * k_dim], as projected; returns [num_tokens, num_heads, k_dim].
        """
        ...

    def attend(
        self,
        q: Tensor,
        batch: ForwardBatch,
        call: AttentionCall,
        consumer: PackedWeight | None = None,
    ) -> Rows:
        """Compute attention of q over the stored keys and values, [num_tokens, num_heads, v_dim],
        for `consumer`: see `KernelSet.attention`.
        """
        ...


@dataclass(frozen=True)
class PagedKV:
    """A `LayerKV` over pages, with the kernels that write and read them.

    `group` is the cache group whose slots and block tables the layer uses. With `shared` the pages
    are another layer's, and this one never stores.
    """

    pages: KVPages
    kernels: KernelSet
    group: int = 0
    shared: bool = False

    def store(self, qkv: Tensor, rotary: Rotary, batch: ForwardBatch) -> Tensor:
        assert not self.shared, "its pages are another layer's"
        return self.kernels.rotate_store(
            qkv, rotary, batch.positions, batch.slots[self.group], self.pages
        )

    def rotate(self, q: Tensor, rotary: Rotary, batch: ForwardBatch) -> Tensor:
        return self.kernels.rotate_store(q, rotary, batch.positions, None, self.pages)

    def attend(
        self,
        q: Tensor,
        batch: ForwardBatch,
        call: AttentionCall,
        consumer: PackedWeight | None = None,
    ) -> Rows:
        sequences = batch.sequences(self.group)
        return self.kernels.attention(q, self.pages, sequences, call, consumer)

    def choose(
        self, q: Tensor, k: Tensor, weights: Tensor, rotary: Rotary, batch: ForwardBatch, topk: int
    ) -> Tensor | None:
        """Store the keys of the layer's indexer, and choose the keys that each row reads: as
        `SparseKernels.choose` returns them. None if no row sees more than `topk`, so that each reads
        all.

        q: [num_tokens, heads, channels]; k: [num_tokens, channels], normed; weights: float32
        [num_tokens, heads].
        """
        index = self.pages.index
        assert index is not None
        sparse = self._sparse
        sparse.store_index(k, rotary, batch.positions, batch.slots[self.group], index)
        if int(batch.context_lens.max()) <= topk:
            return None
        sequences = batch.sequences(self.group)
        return sparse.choose(q, weights, rotary, batch.positions, index, sequences, topk)

    def attend_chosen(
        self, q: Tensor, batch: ForwardBatch, call: AttentionCall, chosen: Tensor
    ) -> Tensor:
        """Compute attention of q over the stored keys and values that each row chose, [num_tokens,
        num_heads, v_dim]: see `SparseKernels.attention`.
        """
        return self._sparse.attention(q, self.pages, batch.sequences(self.group), call, chosen)

    @property
    def _sparse(self) -> SparseKernels:
        sparse = self.kernels.sparse
        assert sparse is not None, "contexts in which attention is sparse are refused"
        return sparse


@dataclass(frozen=True)
class PagedState:
    """One layer's states, as its mixer sees them: it reads the source of each stretch and writes
    its target.

    group   cache group whose block tables the layer uses
    """

    states: States
    group: int = 0

    def stretches(self, batch: ForwardBatch) -> Iterator[Stretch]:
        """Yield `States.stretches` for this layer's blocks."""
        return self.states.stretches(batch.sequences(self.group))


# A layer's part of the cache, of its mixer's kind; None for a layer that keeps nothing.
LayerCache = LayerKV | PagedState | None


@dataclass(frozen=True)
class KVPool:
    """The cache of all layers, with `num_blocks` blocks in each group. The entry of a layer that
    keeps nothing is None.
    """

    layers: tuple[PagedKV | PagedState | None, ...]
    spec: KVCacheSpec
    num_blocks: tuple[int, ...]
    stages: tuple[Stage, ...] = ()  # where the layers are, if not all on one device
    _row_counters: Tensor | None = None  # [layers, rows, 2]
    _left_out: Tensor | None = None  # [2], of `counters`

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages and states."""
        return self.spec.bytes_of(self.num_blocks)

    @property
    def capacity_blocks(self) -> int:
        """Blocks that limit complete sequences: the fewest of the groups that keep all blocks, or
        of all groups if none does.
        """
        return least_of_complete(self.spec.groups, self.num_blocks)

    @property
    def capacity_tokens(self) -> int:
        """Tokens of complete sequences that fit (`KVCacheSpec.capacity_tokens`)."""
        return self.spec.capacity_tokens(self.num_blocks)

    @property
    def whole(self) -> tuple[range, ...]:
        """Block tables of a single sequence that has the pool to itself."""
        return tuple(range(count) for count in self.num_blocks)

    @property
    def paged(self) -> dict[int, PagedKV]:
        """Layers with pages, allocated or another layer's, by index."""
        return {
            index: layer for index, layer in enumerate(self.layers) if isinstance(layer, PagedKV)
        }

    @property
    def states(self) -> dict[int, PagedState]:
        """Layers with a state, by index."""
        return {
            index: layer for index, layer in enumerate(self.layers) if isinstance(layer, PagedState)
        }

    def with_layers(self, layers: Mapping[int, PagedKV | PagedState]) -> KVPool:
        """Return the pool with these layers replaced, by index."""
        return replace(
            self, layers=tuple(layers.get(index, layer) for index, layer in enumerate(self.layers))
        )

    def of_layers(self, indices: range) -> KVPool:
        """Return the pool with these layers alone, in the groups of all: what one of several models runs
        over.
        """
        return replace(self, layers=self.layers[indices.start : indices.stop])

    @property
    def values_per_token(self) -> int:
        return self.spec.values_per_token

    def less_bias(self, kv: KVCacheConfig) -> list[int]:
        """Return the layers whose keys are stored less a large bias, and not less centers of `kv`."""
        layers = []
        for index, layer in self._stored.items():
            scales = kv.scales.layers[index] if kv.scales is not None else None
            if layer.pages.k_center is not None and not (scales and scales.k_center):
                layers.append(index)
        return layers

    def counters(self) -> tuple[int, int]:
        """Return (NaNs stored since the start, values clipped to their scale's range). A working
        model stores no NaN.
        """
        counts = [layer.pages.counters for layer in self._stored.values()]
        if not counts:  # states are not counted
            return 0, 0
        if len({tensor.device for tensor in counts}) > 1:
            counts = [tensor.cpu() for tensor in counts]
        total = torch.stack(counts).sum(0)
        if self._left_out is not None:
            total = total - self._left_out
        nans, clipped = total.tolist()
        return nans, clipped

    @property
    def _stored(self) -> dict[int, PagedKV]:
        """Layers with pages of their own, by index."""
        return {index: layer for index, layer in self.paged.items() if not layer.shared}

    def counting_drafts(self, most: int) -> KVPool:
        """Return the pool with counters of each row, for `leave_out`, in steps that have up to `most`
        drafts and one known token; the pool itself for none.
        """
        if most == 0:
            return self
        stored = self._stored
        by_row = torch.zeros(len(stored), 1 + most, 2, dtype=torch.int64, device="cpu")
        layers = {}
        for (index, layer), counters in zip(stored.items(), by_row, strict=True):
            pages = replace(layer.pages, row_counters=counters)
            layers[index] = replace(layer, pages=pages)
        left_out = torch.zeros(2, dtype=torch.int64, device="cpu")
        return replace(self.with_layers(layers), _row_counters=by_row, _left_out=left_out)

    @torch.inference_mode()  # the pool may have been made in this mode, in another thread
    def leave_out(self, rows: Sequence[int]) -> None:
        """Take what these rows of the last step stored out of `counters`. On a CPU."""
        assert self._row_counters is not None
        assert self._left_out is not None
        self._left_out.add_(self._row_counters[:, rows].sum((0, 1)))


Angles = tuple[Tensor, Tensor]  # cos, sin, from `KeyCenter.angle_tiles`


def allocate_pool(
    spec: KVCacheSpec,
    kv: KVCacheConfig,
    num_blocks: Sequence[int],
    kernels: KernelSet,
    device: str = "cpu",
    rotaries: Sequence[Rotary | None] | None = None,
    empty: Empty | None = None,
    stages: tuple[Stage, ...] = (),
) -> KVPool:
    """Allocate pages and states: `num_blocks` by group. The system commits memory at the first
    write, not here.

    `rotaries` has the rotary tables of each layer, None for a layer without. They are needed for
    centered keys only: those that have a center in `kv.scales`, and quantized ones that have a large
    bias. `empty` allocates pages and states, on `device`. `stages`: where the layers are, if not all
    are on `device`.
    """
    device_of = {layer: stage.device for stage in stages for layer in stage.layers}
    of_layers: tuple[LayerScales | None, ...] = (None,) * len(spec.layers)
    if kv.scales is not None:
        of_layers = kv.scales.layers
    assert len(of_layers) == len(spec.layers), (
        f"scales of {len(of_layers)} layers for {len(spec.layers)}"
    )
    tables = AngleTables()
    pages_of: dict[int, PagedKV] = {}
    states_of: dict[int, PagedState] = {}
    groups: dict[int, int] = {}
    for index, members in enumerate(spec.groups):
        groups.update(dict.fromkeys(members.layers, index))
    for index, layer in spec.kept.items():
        scales = of_layers[index]
        there = device_of.get(index, device)
        empty_there = empty or empty_on(there)
        if isinstance(layer, LayerStateSpec):
            group = groups[index]
            states_of[index] = PagedState(
                _allocate_states(layer, num_blocks[group], spec, empty_there), group
            )
            continue
        if layer.source is not None:
            pages_of[index] = replace(pages_of[layer.source], shared=True)
            continue
        group = groups[index]
        block_size = spec.groups[group].tokens_per_block
        sizes = num_blocks[group], block_size
        pages = allocate_pages(layer, kv.layout, scales, *sizes, there, empty_there)
        if scales is not None and scales.k_center:
            assert rotaries is not None
            rotary = rotaries[index]
            assert rotary is not None
            b = expand_scale(scales.k_center, layer.num_kv_heads, layer.k_dim).to(there)
            pages = replace(pages, k_center=KeyCenter.of(b, *tables.of(rotary)))
        elif rotaries is not None and pages.format.is_quantized:
            pages = less_bias_pages(pages, rotaries[index], tables)
        pages_of[index] = PagedKV(pages, kernels, group)
    layers = tuple(pages_of.get(index) or states_of.get(index) for index in range(len(spec.layers)))
    return KVPool(layers, spec, tuple(num_blocks), stages)


def less_bias_pages(pages: KVPages, rotary: Rotary | None, tables: AngleTables) -> KVPages:
    """`pages`, with keys stored less the large biases of their projection (`KeyCenter.of_bias`)."""
    if rotary is None or rotary.key_bias is None or pages.v_in_k:
        return pages
    b = KeyCenter.of_bias(rotary.key_bias.float(), rotary.rotary_dim)
    if b is None:
        return pages
    return replace(pages, k_center=KeyCenter.of(b, *tables.of(rotary)))


class AngleTables:
    """The angle tables of key centers, one pair for all layers that share their rotary tables."""

    def __init__(self) -> None:
        # by the address of the cosines; the stored tensor keeps the address from being reused
        self._tiles: dict[int, tuple[Tensor, Angles]] = {}

    def of(self, rotary: Rotary) -> Angles:
        """Return the tiles of the cosines and sines of `rotary`."""
        address = rotary.cos.data_ptr()
        if address not in self._tiles:
            tiles = KeyCenter.angle_tiles(rotary.cos), KeyCenter.angle_tiles(rotary.sin)
            self._tiles[address] = rotary.cos, tiles
        return self._tiles[address][1]


def _allocate_states(
    spec: LayerStateSpec, num_blocks: int, cache: KVCacheSpec, empty: Empty
) -> States:
    assert cache.state_every is not None
    parts = {}
    for part in spec.parts:
        parts[part.name] = empty(num_blocks, *part.shape, dtype=torch_dtype(part.format))
    return States(parts, cache.state_every)
