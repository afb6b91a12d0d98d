"""The way of all samples through a model, one layer at a time.

Memory holds one layer, its cache for one sample, and the hidden states of all samples (tokens x hidden_size in the
model's format). The layers are the engine's own. The cache has the model's own format and no scales, so it stores
values unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from freight.cache.pool import AngleTables, LayerCache, PagedKV, PagedState, allocate_pool
from freight.cache.spec import KVCacheSpec, LayerSpec, layer_spec
from freight.errors import CheckpointError
from freight.kernels.interface import KernelSet
from freight.model.architectures import tensor_names
from freight.model.config.model import ModelConfig
from freight.model.decoder import DecoderLayer
from freight.model.layers.rope import build_ropes
from freight.model.loader import model_builder
from freight.model.mixers.attention.layer import Attention
from freight.model.mixers.spec import Mixer
from freight.model.sources import WeightSource
from freight.operands.batch import ForwardBatch
from freight.operands.kv_pages import KeyCenter
from freight.operands.rotary import Rotary
from freight.quantizer.centers import LayerCenters
from freight.quantizer.expert_inputs import one_by_one
from freight.quantizer.watch import LayerWatch, WatchedKV
from freight.settings.engine import KVCacheConfig, LayerKVFormat

BLOCK_SIZE = 64  # of the cache that one sample is computed with
LATE = 0.75  # share of the tokens after which scales are compared with the final ones


def kv_sources(config: ModelConfig) -> list[int]:
    """Return for each layer the one whose keys and values it reads: itself, in most models."""
    sources = list(range(config.num_layers))
    for index, mixer in config.paged.items():
        if mixer.kv_from is not None:
            sources[index] = mixer.kv_from
    return sources


def rotary_of(layer: DecoderLayer) -> Rotary:
    """Return the rotary embedding of a layer with attention."""
    assert isinstance(layer.mixer, Attention), "keys of other layers are not centered"
    return layer.mixer.rotary


class Walk:
    """All samples, behind the layers that they have been through.

    hidden   [tokens, hidden_size], samples end to end: the input of the next layer
    """

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        kernels: KernelSet,
        samples: Sequence[Sequence[int]],
        device: str,
        cache_kernels: KernelSet,
        on_tokens: Callable[[int], None],
    ) -> None:
        """cache_kernels: what stores and reads keys and values; on_tokens: is called with the tokens that
        went through a layer, of all layers together.
        """
        self._config = config
        self._lengths = [len(ids) for ids in samples]
        self._kernels = cache_kernels
        self._device = device
        self._on_tokens = on_tokens
        self._total = sum(self._lengths)
        self._done = 0
        self._tokens = torch.tensor(
            [*chain.from_iterable(samples)], dtype=torch.int64, device=device
        )
        self.ropes = build_ropes(config.ropes, max(self._lengths), device)
        position = torch.arange(max(self._lengths), dtype=torch.int64, device=device)
        positions = torch.cat([position[:length] for length in self._lengths])
        self._builder = model_builder(config, source, kernels)
        self._of_layers = model_builder(config, source, one_by_one(kernels))
        self.hidden = self._builder.embedding()(self._tokens, positions)
        self._embedded = self.hidden[:0]
        if config.per_layer_vocab_size is not None:
            self._embedded = self.hidden.clone()
        self._blocks = [-(-length // BLOCK_SIZE) for length in self._lengths]
        self._caches: dict[tuple[LayerSpec, int | None], PagedKV | PagedState] = {}
        self._angles = AngleTables()
        self._sources = kv_sources(config)
        self._read = {
            source for index, source in enumerate(self._sources) if source != index
        }  # layers whose keys and values others read

    def layer(self, index: int, source: WeightSource | None = None) -> DecoderLayer:
        """Build layer `index`, of the tensors of `source` if given."""
        builder = self._of_layers
        if source is not None:
            builder = replace(builder, source=source)
        return builder.layer(index, self.ropes)

    def require_finite(self, index: int) -> None:
        """Raise CheckpointError if layer `index`, which was the last, gave NaN or infinity."""
        if not self.hidden.isfinite().all():
            name = tensor_names(self._config).layer.format(index).rstrip(".")
            raise CheckpointError(
                f"layer {index} ({name}) computes NaN or infinity during calibration, "
                "in 16 or 32 bits: nothing can be measured beyond it"
            )

    def _cache(self, mixer: Mixer, keep: int | None) -> PagedKV | PagedState | None:
        """Return a cache for one sample, the same for all layers of one shape; or that of layer
        `keep`, for all samples.

        None for a layer that keeps nothing of the tokens before.
        """
        format = self._config.checkpoint_format
        layer = layer_spec(mixer, LayerKVFormat(format, None), format)
        if layer is None:
            return None
        layer = layer.alone  # all tokens of a sample are kept
        if (layer, keep) not in self._caches:
            longest = max(self._blocks) * BLOCK_SIZE
            num_tokens = longest
            if keep is not None:
                num_tokens = sum(self._blocks) * BLOCK_SIZE
            spec = KVCacheSpec((layer,), BLOCK_SIZE, state_every=longest)
            num_blocks = spec.blocks_of(num_tokens)
            config = KVCacheConfig(format, granularity=None, scale_source=None, scales=None)
            cache = allocate_pool(spec, config, num_blocks, self._kernels, self._device).layers[0]
            assert cache is not None
            self._caches[layer, keep] = cache
        return self._caches[layer, keep]

    def through(
        self,
        index: int,
        layer: DecoderLayer,
        hidden: Tensor,
        watch: LayerWatch,
        centers: LayerCenters | None = None,
        projected: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        """Compute layer `index`, built as `layer`, for all samples, observed.

        hidden   [tokens, hidden_size], samples end to end; overwritten with the layer's output

        `watch` observes keys and values as they are stored, the keys less `centers` if given, and
        is then finished.
        """
        mixer = self._config.layers[index].mixer
        embeddings = self._builder.per_layer_embeddings(index)
        # Its keys and values, of all samples, are kept for the layers that read them
        keep = self._sources[index] if self._sources[index] in self._read else None
        cache: LayerCache = self._cache(mixer, keep)
        if isinstance(cache, PagedKV):
            pages = cache.pages
            if centers is not None and centers.k is not None:
                k_center = KeyCenter.of(centers.k, *self._angles.of(rotary_of(layer)))
                pages = replace(pages, k_center=k_center)
            if watch.kv or projected is not None:
                cache = WatchedKV(pages, cache.kernels, stored=watch.see_kv, projected=projected)
        begin = 0
        late = min(LATE * self._total, self._total - self._lengths[-1])
        first = 0
        for length, blocks in zip(self._lengths, self._blocks, strict=True):
            if begin > 0 and begin >= late:
                late = self._total
                for observer in watch.all:
                    observer.mark()
            rows = slice(begin, begin + length)
            inputs = None
            if embeddings is not None:
                inputs = embeddings(self._embedded[rows], self._tokens[rows])
            hidden[rows] = layer.whole(hidden[rows], self._batch(length, first), cache, inputs)
            begin += length
            if keep is not None:
                first += blocks
            self._done += length
            self._on_tokens(self._done)
        for observer in watch.all:
            observer.finish()

    def skip(self) -> None:
        """Count a pass that is not needed."""
        self._done += self._total
        self._on_tokens(self._done)

    def _batch(self, length: int, first: int) -> ForwardBatch:
        """Build the batch of one sequence from its beginning, in the blocks from `first` on. Layers
        do not use token ids.
        """
        position = torch.arange(length, dtype=torch.int64, device=self._device)
        blocks = first + torch.arange(
            -(-length // BLOCK_SIZE), dtype=torch.int32, device=self._device
        )
        return ForwardBatch(
            token_ids=position,
            positions=position,
            query_starts=torch.tensor([0, length], dtype=torch.int32, device=self._device),
            context_lens=torch.tensor([length], dtype=torch.int32, device=self._device),
            slots=(position + first * BLOCK_SIZE,),
            block_tables=(blocks[None],),
            logit_rows=position[:0],
        )
