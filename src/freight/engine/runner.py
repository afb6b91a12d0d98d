"""ModelRunner: one step's slices through the model, over the one cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freight.cache.pool import KVPool
from freight.engine.decode_steps import DecodeSteps
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.model.decoder import LanguageModel


@dataclass(frozen=True)
class StepRows:
    """The rows of a step whose logits are wanted, one after another in the slices' order:
    `num_rows` of each slice.

    `hidden` has their final states [rows, hidden_size]; `captured` their logits, where the step was
    replayed.
    """

    model: LanguageModel
    num_rows: list[int]
    hidden: Tensor | None = None
    captured: Tensor | None = None

    def logits(self, rows: Sequence[int]) -> Tensor:
        """float32 [len(rows), vocab_size]: the logits of these rows, in rising order."""
        source = self.hidden if self.captured is None else self.captured
        assert source is not None
        if isinstance(rows, range) and rows.step == 1:
            source = source[rows.start : rows.stop]
        elif len(rows) < len(source):  # by slices: the host waits for no index on its way to a GPU
            source = torch.cat([source[row : row + 1] for row in rows])
        return source if self.captured is not None else self.model.logits(source)

    def all_logits(self) -> Tensor:
        """float32 [rows, vocab_size]."""
        return self.logits(range(sum(self.num_rows)))


@dataclass(frozen=True)
class ModelRunner:
    """A model and its cache on a device. Steps that `captured` takes are replayed."""

    model: LanguageModel
    pool: KVPool
    device: str
    captured: DecodeSteps | None = None

    def __post_init__(self) -> None:
        # captured steps write into its pages
        assert self.captured is None or self.captured.pool is self.pool

    @torch.inference_mode()
    def run(self, slices: Sequence[SequenceSlice], tokens: Tensor | None = None) -> StepRows:
        """Store the slices' K and V, and give the rows whose logits are wanted. The next step may
        overwrite them.

        `tokens`, int64 [tokens] on the device, take the place of those in the slices, which are as
        many.
        """
        num_rows = [part.num_logit_rows for part in slices]
        if self.captured is not None and self.captured.takes(slices):
            return StepRows(self.model, num_rows, captured=self.captured.run(slices, tokens))
        batch = prepare(slices, self.pool.spec.groups, self.device)
        if tokens is not None:
            batch = replace(batch, token_ids=tokens)
        return StepRows(self.model, num_rows, hidden=self.model.hidden(batch, self.pool.layers))

    @property
    def num_ranks(self) -> int:
        """How many ranks compute the steps."""
        return 1

    def close(self) -> None:
        """End the other ranks; there is none here (`leader.py`)."""

    def on_lost(self, call: Callable[[], None]) -> None:
        """Have `call` called once another rank is lost; there is none here (`leader.py`)."""

    @torch.inference_mode()
    def logits(
        self, token_ids: Sequence[int], start: int, block_ids: Sequence[Sequence[int]]
    ) -> Tensor:
        """float32 logits after each of `token_ids`, which stand at `start` of the sequence in
        `block_ids`, by group.
        """
        return self.run([SequenceSlice(token_ids, start, block_ids, Logits.ALL)]).all_logits()
