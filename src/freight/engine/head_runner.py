"""HeadRunner: a pass of a head that drafts, over its layers of the cache and on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from freight.cache.pool import KVPool
from freight.engine.decode_steps import DecodeSteps
from freight.engine.prepare import SequenceSlice, prepare
from freight.model.draft_head import DraftHead


class HeadLeader(Protocol):
    """The other ranks of a head (`leader.py`)."""

    def drafting(
        self, slices: Sequence[SequenceSlice], features: Tensor | None
    ) -> AbstractContextManager[None]:
        """Have the others run the head, as the body does. Raises RankError once a rank is lost, and
        KernelError where one has left the pass.
        """


@dataclass(frozen=True)
class HeadRunner:
    """A head and its layers of the cache.

    pool      of the head's layers alone, in the groups of the whole cache
    dtype     of features
    captured  passes of few rows, which are replayed
    leader    has the other ranks make the same passes
    """

    head: DraftHead
    pool: KVPool
    device: str
    dtype: torch.dtype
    captured: DecodeSteps | None = None
    leader: HeadLeader | None = None

    @torch.inference_mode()
    def run(
        self, slices: Sequence[SequenceSlice], features: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Store the slices' K and V in the head's layers. Return float32 logits [slices with logits,
        tokens], and of a head that takes features the states of these rows. The next pass may
        overwrite them. Of several ranks the first alone has the logits.

        features: [num_tokens, size], as `DraftHead.hidden` takes them. Raises as `HeadLeader.drafting`.
        """
        if self.leader is None:
            return self._run(slices, features)
        with self.leader.drafting(slices, features):
            return self._run(slices, features)

    def _run(
        self, slices: Sequence[SequenceSlice], features: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.captured is not None and self.captured.takes(slices):
            return self.captured.run(slices), None
        batch = prepare(slices, self.pool.spec.groups, self.device)
        states = self.head.hidden(batch, features, self.pool.layers)
        if not len(states):  # prompts that go on
            return states.new_empty((0, 0), dtype=torch.float32), None
        logits = self.head.logits(states)
        if features is None:
            return logits, None
        return logits, states
