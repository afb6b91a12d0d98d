"""What the numbers of one layer's weights cost: the divergence of next-token distributions with that
layer alone rounded.

The samples go through the model together, one layer after the other, so that memory holds their
streams before one layer. There the layer is replaced by each candidate, and the layers from it on
run again: N layers take (N + 1) / 2 passes a candidate. Candidates are computed as the numbers that
they stand for, in the model's 16 bits.

KL is KL(16 bits || rounded) in nats, the mean over all tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freight.model.decoder import DecoderLayer, Residual
from freight.operands.batch import ForwardBatch
from freight.quantizer.sensitivity import Meter, OnPass, Samples

# Layer and candidate -> the layer so; None: the model has no such layer
BuildLayer = Callable[[int, int], DecoderLayer | None]


@dataclass(frozen=True, eq=False)
class Text:
    """Samples, and what the model makes of them in 16 bits: final states [tokens, hidden_size] each."""

    samples: Samples
    references: Sequence[Tensor]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.samples))


@dataclass(frozen=True)
class WeightMeter:
    """A model in 16 bits (`meter`) in which layers are replaced by what `build` makes of them."""

    meter: Meter
    build: BuildLayer

    @torch.inference_mode()
    def text(self, samples: Samples) -> Text:
        """Run the model over samples."""
        meter = self.meter
        references = []
        for ids in samples:
            batch = meter.batch(ids)
            stream = meter.through(0, meter.decoder.begin(batch), batch, meter.plain.layers)
            references.append(meter.normed(stream))
        return Text(samples, references)

    @torch.inference_mode()
    def by_layer(self, text: Text, num_candidates: int, on_pass: OnPass) -> list[list[float]]:
        """Measure each candidate in each layer alone: [layers][candidates], infinity where the layer
        cannot have it.
        """
        meter = self.meter
        layers = meter.decoder.layers
        batches = [meter.batch(ids) for ids in text.samples]
        streams = [meter.decoder.begin(batch) for batch in batches]
        measured: list[list[float]] = []
        total = len(layers) * num_candidates
        for index, layer in enumerate(layers):
            costs = []
            for candidate in range(num_candidates):
                on_pass(index * num_candidates + candidate, total)
                replaced = self.build(index, candidate)
                costs.append(self._alone(index, replaced, text, batches, streams))
                del replaced  # before the next one is built
            measured.append(costs)
            cache = meter.plain.layers[index]
            for place, batch in enumerate(batches):
                streams[place] = layer(streams[place], batch, cache)
        on_pass(total, total)
        return measured

    def _alone(
        self,
        index: int,
        replaced: DecoderLayer | None,
        text: Text,
        batches: Sequence[ForwardBatch],
        streams: Sequence[Residual],
    ) -> float:
        """Return the KL with layer `index` replaced. streams: before that layer."""
        if replaced is None:
            return float("inf")
        meter = self.meter
        caches = meter.plain.layers[index:]
        total = 0.0
        for batch, stream, reference in zip(batches, streams, text.references, strict=True):
            behind = replaced(stream, batch, caches[0])
            final = meter.normed(meter.through(index + 1, behind, batch, caches[1:]))
            total += meter.kl(reference, final)
        return max(total / text.num_tokens, 0.0)  # rounding of sums

    @torch.inference_mode()
    def whole(self, choice: Sequence[int | None], text: Text) -> float:
        """Measure the KL with candidate `choice[layer]` in every layer at once; None: 16 bits."""
        meter = self.meter
        batches = [meter.batch(ids) for ids in text.samples]
        streams = [meter.decoder.begin(batch) for batch in batches]
        for index, candidate in enumerate(choice):
            layer: DecoderLayer | None = meter.decoder.layers[index]
            if candidate is not None:
                layer = self.build(index, candidate)
            assert layer is not None, "a choice has candidates that fit"
            cache = meter.plain.layers[index]
            for place, batch in enumerate(batches):
                streams[place] = layer(streams[place], batch, cache)
        total = 0.0
        for stream, reference in zip(streams, text.references, strict=True):
            total += meter.kl(reference, meter.normed(stream))
        return total / text.num_tokens
