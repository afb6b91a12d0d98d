"""What one layer's cache costs: the divergence of next-token distributions with that layer alone
quantized.

The model runs once with an unquantized cache, and its stream before every layer is kept. With layer
l quantized only the layers from l on compute anything else, so they alone run again: N layers take
(N + 1) / 2 passes a candidate. The kernels are the engine's, so on a CPU these are the bits that it
computes. Layers that read the keys and values of another layer count to that one: quantizing its
cache changes what all of them read.

KL is KL(unquantized || quantized) in nats, the mean over all tokens of all samples. It is 0 where
nothing is quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freight.cache.pool import KVPool, LayerCache, allocate_pool
from freight.errors import ConfigError
from freight.model.decoder import Decoder, Residual
from freight.model.open import OpenModel, require_native
from freight.operands.batch import ForwardBatch
from freight.operands.packed import as_tensor
from freight.settings.engine import EngineConfig, KVCacheConfig

ROWS = 256  # of logits at a time, so that memory is bounded for any vocabulary
Samples = Sequence[Sequence[int]]
OnPass = Callable[[int, int], None]  # (samples done, of how many)


@dataclass(frozen=True)
class Sensitivity:
    """KL of each cache quantized alone, over `num_tokens` tokens.

    kl       [cache][candidate], in the order of the layers that have a cache; all do unless some
             share one
    shared   of each cache, the layers that attend over it: the one that stores first, then its
             readers
    """

    kl: tuple[tuple[float, ...], ...]
    shared: tuple[tuple[int, ...], ...]
    num_tokens: int


@dataclass(frozen=True)
class Meter:
    """A loaded model with an unquantized cache (`plain`) and others for the same layers, all of one
    sample's length.
    """

    decoder: Decoder
    plain: KVPool
    caches: tuple[KVPool, ...]
    device: str

    @staticmethod
    def open(
        opened: OpenModel, config: EngineConfig, caches: Sequence[KVCacheConfig], length: int
    ) -> Meter:
        """Load the model. `config` has the unquantized cache; `caches` are measured against it, on
        samples of at most `length`.
        """
        require_native(opened.model, opened.args.model, "measuring its layers one at a time")
        decoder = opened.load(config, length)
        kernels = opened.kernels(config)
        assert isinstance(decoder, Decoder)

        def pool(kv: KVCacheConfig) -> KVPool:
            spec = opened.cache_spec(replace(config, kv=kv))
            return allocate_pool(
                spec, kv, spec.blocks_of(length), kernels, config.device, decoder.rotaries
            )

        return Meter(decoder, pool(config.kv), tuple(map(pool, caches)), config.device)

    @torch.inference_mode()
    def by_layer(self, samples: Samples, on_pass: OnPass = lambda done, total: None) -> Sensitivity:
        """Measure each cache in each layer alone, with those that read the layer's."""
        shared = self._shared()
        sums = [[0.0] * len(self.caches) for _ in shared]
        plain = list(self.plain.layers)
        for done, ids in enumerate(samples):
            on_pass(done, len(samples))
            batch = self.batch(ids)
            streams = [self.decoder.begin(batch)]
            for layer, kv in zip(self.decoder.layers, plain, strict=True):
                streams.append(layer(streams[-1], batch, kv))
            reference = self.normed(streams[-1])
            for of_layer, sharing in reversed(list(zip(sums, shared, strict=True))):
                first = sharing[0]
                for candidate, cache in enumerate(self.caches):
                    # layers behind `first` overwrite their unquantized pages, which nothing reads
                    # again
                    layers = plain.copy()
                    for index in sharing:
                        layers[index] = cache.layers[index]
                    stream = self.through(first, streams[first], batch, layers[first:])
                    of_layer[candidate] += self.kl(reference, self.normed(stream))
        on_pass(len(samples), len(samples))
        total = sum(map(len, samples))
        means = []
        for of_layer in sums:
            means.append(tuple(value / total for value in of_layer))
        return Sensitivity(tuple(means), shared, total)

    @torch.inference_mode()
    def whole(self, choice: Sequence[int | None], samples: Samples) -> float:
        """Measure the KL with cache `choice[layer]` in every layer at once; None: unquantized.

        A layer that reads another's keys and values has to have the same choice.
        """
        plain = list(self.plain.layers)
        for sharing in self._shared():
            assert len({choice[layer] for layer in sharing}) == 1
        chosen = plain.copy()
        for layer, index in enumerate(choice):
            if index is not None:
                chosen[layer] = self.caches[index].layers[layer]
        total = 0.0
        for ids in samples:
            batch = self.batch(ids)
            embedded = self.decoder.begin(batch)
            reference = self.normed(self.through(0, embedded, batch, plain))
            quantized = self.normed(self.through(0, embedded, batch, chosen))
            total += self.kl(reference, quantized)
        return total / sum(map(len, samples))

    def _shared(self) -> tuple[tuple[int, ...], ...]:
        """Return `Sensitivity.shared`."""
        readers: dict[int, list[int]] = {}  # by the layer whose cache they read
        for index in self.plain.paged:
            source = self.plain.spec.kept[index].source
            readers.setdefault(index if source is None else source, []).append(index)
        return tuple(tuple(readers[layer]) for layer in sorted(readers))

    def through(
        self, first: int, stream: Residual, batch: ForwardBatch, caches: Sequence[LayerCache]
    ) -> Residual:
        """Run the layers from `first` on, with a cache for each."""
        for layer, kv in zip(self.decoder.layers[first:], caches, strict=True):
            stream = layer(stream, batch, kv)
        return stream

    def normed(self, stream: Residual) -> Tensor:
        """Return the final states [rows, hidden_size] of the stream behind the last layer."""
        if self.decoder.norm is None:
            return stream.x if stream.delta is None else stream.x + stream.delta
        return as_tensor(stream.normed(self.decoder.norm)[1])

    def kl(self, reference: Tensor, other: Tensor) -> float:
        """Sum the KL over the rows of two final states [rows, hidden_size], in nats."""
        total = 0.0
        for start in range(0, len(reference), ROWS):
            rows = slice(start, start + ROWS)
            p = torch.log_softmax(self.decoder.logits(reference[rows]), -1)
            q = torch.log_softmax(self.decoder.logits(other[rows]), -1)
            by_row = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
            total += float(by_row.double().sum())
        return total

    def batch(self, ids: Sequence[int]) -> ForwardBatch:
        """Build the batch of one sequence from its beginning."""
        spec = self.plain.spec
        length = len(ids)
        position = torch.arange(length, dtype=torch.int64, device=self.device)
        tables = []
        for count in spec.blocks_of(length):
            blocks = torch.arange(count, dtype=torch.int32, device=self.device)
            tables.append(blocks[None])
        return ForwardBatch(
            token_ids=torch.tensor(list(ids), dtype=torch.int64, device=self.device),
            positions=position,
            query_starts=torch.tensor([0, length], dtype=torch.int32, device=self.device),
            context_lens=torch.tensor([length], dtype=torch.int32, device=self.device),
            slots=tuple(position if group.has_slots else position[:0] for group in spec.groups),
            block_tables=tuple(tables),
            logit_rows=position,
        )


def at_most(samples: Samples, num_tokens: int) -> Samples:
    """Return the first samples, at least one, until they have `num_tokens` tokens."""
    first = []
    total = 0
    for ids in samples:
        if total >= num_tokens:
            break
        first.append(ids[: num_tokens - total])
        total += len(first[-1])
    if not total:
        raise ConfigError("there is no token to measure with; give text")
    return first
