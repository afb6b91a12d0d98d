"""ModelRunner: one step's slices through the model, over the one cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freight.cache.pool import KVPool
from freight.engine.graphs import DecodeGraphs
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.models.decoder import Decoder


@dataclass(frozen=True)
class ModelRunner:
    """A model and its cache on a device. With `graphs`, steps that only decode are replayed instead of launched."""

    model: Decoder
    pool: KVPool
    device: str
    graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def run(self, slices: Sequence[SequenceSlice]) -> list[Tensor]:
        """Store the slices' K and V; float32 logits of each slice, [num_logit_rows, vocab_size].

        The next step may overwrite the logits.
        """
        if self.graphs is not None and self.graphs.takes(slices):
            return list(self.graphs.run(slices).split(1))
        batch = prepare(slices, self.pool.spec.block_size, self.device)
        logits = self.model.forward(batch, self.pool.layers)
        return list(logits.split([part.num_logit_rows for part in slices]))

    def logits(self, token_ids: Sequence[int], start: int, block_ids: Sequence[int]) -> Tensor:
        """float32 logits after each of `token_ids`, which stand at `start` of the sequence in `block_ids`."""
        return self.run([SequenceSlice(token_ids, start, block_ids, Logits.ALL)])[0]
