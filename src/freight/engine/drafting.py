"""Drafts by a head: its passes over the requests of a step, before the model's own pass. What goes wrong
here costs drafts, and changes no result.

The head keeps keys and values in layers of its own, which lie in the blocks of the model's layers: a
prefix hit brings both, and blocks that are taken back are taken back from both. Its pass takes in the known
tokens that it has not seen, in most steps those that the last step drew; the last row gives the first
draft. Each further draft is a pass of one row for each request.

A draft is drawn from the head's logits as the model draws from its own: with the same parameters and the
same random number, that of (seed, position). So both draw the same token about as often as their
distributions agree (a coupling of samples; Daliri, Musco and Suresh 2024, arXiv:2408.07978), and the
model's draw stays what it is without drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from freight.cache.pool import KVPool
from freight.engine.compute import ChunkWork
from freight.engine.decode_steps import DecodeSteps
from freight.engine.guesses import LEAST, Guesses
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.engine.sampler import Draw, draw
from freight.model.draft_head import DraftHead

logger = logging.getLogger("freight")

AT_ONCE = 512  # tokens of a request that a pass takes in, which the others of its step wait for


@dataclass(slots=True)
class _Going:
    """A request that gets drafts: its place in the work, and the drafts so far with their kinds."""

    place: int
    work: ChunkWork
    guesses: Guesses
    drafts: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)

    @property
    def draw(self) -> Draw:
        """What the next draft is drawn with."""
        row = self.work.row
        return Draw(row.params, row.seed, row.position + len(self.drafts))

    @property
    def is_full(self) -> bool:
        return len(self.drafts) >= self.work.chunk.most_drafts


class Drafting:
    """A head over its layers of the cache."""

    def __init__(
        self,
        head: DraftHead,
        pool: KVPool,
        captured: DecodeSteps | None,
        device: str,
        vocab_size: int,
        limit: int,
        cost: float,
    ) -> None:
        """pool: of the head's layers alone, in the groups of the whole cache. captured: passes of few
        rows, which are replayed. vocab_size: of the model. limit: positions that the head has. cost: of
        a pass for one row, in steps of the model.
        """
        self._head = head
        self._pool = pool
        self._captured = captured
        self._device = device
        self._vocab_size = vocab_size
        self._limit = limit
        self._cost = cost
        self._has_failed = False  # which is logged once

    def guesses(self) -> Guesses:
        """Return those of a new request."""
        return Guesses(self._cost)

    def propose(self, work: Sequence[ChunkWork]) -> list[tuple[int, ...]]:
        """Take in the tokens of these chunks, and return the drafts behind each: none where the head
        fails.
        """
        try:
            return self._propose(work)
        except Exception as error:
            if not self._has_failed:
                logger.warning(
                    "a step has no drafts, nor others like it: %s", error, exc_info=error
                )
            self._has_failed = True
            return [()] * len(work)

    @torch.inference_mode()
    def _propose(self, work: Sequence[ChunkWork]) -> list[tuple[int, ...]]:
        drafts: list[tuple[int, ...]] = [()] * len(work)
        slices: list[SequenceSlice] = []
        going: list[_Going] = []
        ends = []
        for place, item in enumerate(work):
            request = item.chunk.request
            guesses = request.guesses
            assert guesses is not None
            guesses.note(
                request.output_token_ids,
                request.num_prompt_tokens,
                request.num_preemptions,
                item.chunk.start,
            )
            unseen = self._unseen(item, guesses)
            if unseen is None:
                continue
            slices.append(unseen)
            ends.append((guesses, unseen.start + len(unseen.token_ids)))
            if unseen.logits is Logits.LAST:
                going.append(_Going(place, item, guesses))
        if slices:
            logits = self._run(slices)
            for guesses, end in ends:
                guesses.num_filled = end
            self._draft(logits, going)
        for drafted in going:
            drafted.guesses.propose(drafted.drafts, drafted.kinds, drafted.work.row.position)
            drafts[drafted.place] = tuple(drafted.drafts)
        return drafts

    def _unseen(self, work: ChunkWork, guesses: Guesses) -> SequenceSlice | None:
        """Return the tokens that the head has to take in, with logits if drafts follow; None if there
        are none.
        """
        chunk = work.chunk
        start = guesses.num_filled
        known = min(chunk.start + chunk.num_tokens, self._limit)
        end = min(known, start + AT_ONCE)
        if end <= start:
            return None
        logits = Logits.NONE
        if chunk.most_drafts and end == chunk.start + chunk.num_tokens:
            logits = Logits.LAST
        return SequenceSlice(chunk.request.tokens(start, end), start, chunk.block_ids, logits)

    def _draft(self, logits: Tensor, going: list[_Going]) -> None:
        """Draw the first draft of each from `logits`, float32 [len(going), tokens], and those behind as
        long as they are worth a pass.
        """
        while going:
            going = self._drawn(logits, going)
            rows = []
            for item in going:
                chunk = item.work.chunk
                position = chunk.start + len(item.drafts)
                row = SequenceSlice(item.drafts[-1:], position, chunk.block_ids, Logits.LAST)
                rows.append(row)
            if rows:
                logits = self._run(rows)
                for item, row in zip(going, rows, strict=True):
                    item.guesses.num_filled = row.start + 1

    def _drawn(self, logits: Tensor, going: Sequence[_Going]) -> list[_Going]:
        """Append a draft to each, and return those that go on."""
        tokens, _ = draw(logits, [item.draw for item in going])
        chances = _probabilities(logits, tokens).tolist()
        further = []
        for item, token, chance in zip(going, tokens.tolist(), chances, strict=True):
            kinds = [*item.kinds, item.guesses.kind_of(chance)]
            if token >= self._vocab_size or item.guesses.likely(kinds) < LEAST:
                continue
            item.drafts.append(token)
            item.kinds = kinds
            next_position = item.work.chunk.start + len(item.drafts)
            if not item.is_full and next_position < self._limit and item.guesses.goes_on(kinds):
                further.append(item)
        return further

    def _run(self, slices: Sequence[SequenceSlice]) -> Tensor:
        """Run the head; return float32 logits [slices with logits, tokens]."""
        if self._captured is not None and self._captured.takes(slices):
            return self._captured.run(slices)
        batch = prepare(slices, self._pool.spec.groups, self._device)
        return self._head.logits(self._head.hidden(batch, None, self._pool.layers))


def _probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return float32 [rows]: the probability of each row's token, at temperature 1. NaN counts as 0."""
    chosen = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return (chosen - logits.logsumexp(-1)).exp().nan_to_num(0.0)
