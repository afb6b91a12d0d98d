"""A second model that drafts for the first: a smaller one with the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from freight.cache.pool import LayerCache
from freight.model.decoder import Decoder
from freight.model.mixers.spec import Mixer
from freight.operands.batch import ForwardBatch
from freight.operands.rotary import Rotary


@dataclass(frozen=True)
class SecondModel:
    """A `Decoder` as a `DraftHead`: its states are its final states, normed, and it takes no features."""

    decoder: Decoder

    feature_layers = None
    vocabulary = None

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return tuple(layer.mixer for layer in self.decoder.config.layers)

    @property
    def rotaries(self) -> tuple[Rotary | None, ...]:
        return self.decoder.rotaries

    @property
    def read(self) -> object:
        return self.decoder.layers, self.decoder.head

    def hidden(
        self,
        batch: ForwardBatch,
        features: Tensor | None,
        kv_cache: Sequence[LayerCache],
        depth: int = 0,
    ) -> Tensor:
        assert features is None
        return self.decoder.hidden(batch, kv_cache)

    def logits(self, states: Tensor) -> Tensor:
        return self.decoder.logits(states)
