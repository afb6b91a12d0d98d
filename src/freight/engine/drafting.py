"""Drafts by a head: its passes over the requests of a step, before the model's own pass. What goes wrong
here costs drafts, and changes no result.

The head keeps keys and values in layers of its own, which lie in the blocks of the model's layers: a
prefix hit brings both, and blocks that are taken back are taken back from both. Its pass takes in the known
tokens that it has not seen, in most steps those that the last step drew; the last row gives the first
draft. Each further draft is a pass of one row for each request.

A draft is drawn from the head's logits as the model draws from its own: with the same parameters and the
same random number, that of (seed, position). So both draw the same token more often than with numbers of
their own, and the model's draw stays what it is without drafts. (A coupling of samples: Daliri, Musco and
Suresh 2024, arXiv:2408.07978. Theirs bounds how often the two differ; one number on the line of
probabilities does not, but to draw otherwise would change what every seed gives.)

Of several layers that predict further tokens the first drafts all of them: those for further depths
would have to take in every token as well, at their own depth.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from freight.engine.compute import ChunkWork
from freight.engine.guesses import LEAST, Guesses
from freight.engine.head_runner import HeadRunner
from freight.engine.prepare import Logits, SequenceSlice
from freight.engine.sampler import Draw, draw, highest
from freight.engine.step import ScheduledChunk
from freight.errors import RankError

logger = logging.getLogger("freight")

AT_ONCE = 512  # tokens of a request that a pass takes in, which the others of its step wait for
KEPT = 64  # rows of features that a request keeps before a pass takes them in


@dataclass(eq=False, slots=True)
class _Going:
    """A request that gets drafts: its place in the work, and the drafts so far with their kinds."""

    place: int
    work: ChunkWork
    guesses: Guesses
    drafts: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    firsts: tuple[int, int] | None = None

    @property
    def draw(self) -> Draw:
        """What the next draft is drawn with."""
        row = self.work.row
        return Draw(row.params, row.seed, row.position + len(self.drafts))

    @property
    def is_full(self) -> bool:
        return len(self.drafts) >= self.work.chunk.most_drafts


class Drafting:
    """A head over its layers of the cache. `method`: its kind, in what is counted."""

    def __init__(
        self,
        method: str,
        runner: HeadRunner,
        vocab_size: int,
        limit: int,
        cost: float,
        row: float,
    ) -> None:
        """vocab_size: of the model. limit: positions that the head has. cost: of a pass for one row, in
        steps of the model. row: what one more row adds to a step, in the same.
        """
        self.method = method
        self.runner = runner
        self._vocab_size = vocab_size
        self._limit = limit
        self._cost = cost
        self._row = row
        self._has_failed = False  # which is logged once
        self._takes_features = runner.head.feature_layers is not None

    def guesses(self) -> Guesses:
        """Return those of a new request."""
        return Guesses(self._cost, self._row)

    def takes(self, chunk: ScheduledChunk, are_few: bool) -> bool:
        """Return whether the head has a pass for a chunk. are_few: whether the step's requests are so few
        that they may have drafts.
        """
        guesses = chunk.request.guesses
        if guesses is None or guesses.is_given_up:
            return False
        if chunk.most_drafts:
            return True
        if self._takes_features:  # or too many would be kept
            return chunk.num_tokens > 1 or guesses.num_kept >= KEPT
        return are_few and chunk.num_tokens > 1

    def propose(self, work: Sequence[ChunkWork]) -> list[tuple[int, ...]]:
        """Take in the tokens of these chunks, and return the drafts behind each: none where the head
        fails. Raises RankError once a rank is lost.
        """
        try:
            return self._propose(work)
        except RankError:
            raise
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
        features: list[Tensor] = []
        going: list[_Going] = []
        filled = []
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
            if self._takes_features:
                unseen = self._unseen_features(item, guesses, features)
            else:
                unseen = self._unseen(item, guesses)
            if unseen is None:
                continue
            slices.append(unseen)
            filled.append((guesses, unseen.start + len(unseen.token_ids)))
            if unseen.logits is Logits.LAST:
                going.append(_Going(place, item, guesses))
        if slices:
            logits, states = self._run(slices, features)
            for guesses, end in filled:
                guesses.num_filled = end
            self._draft(logits, states, going)
        for drafted in going:
            position = drafted.work.row.position
            drafted.guesses.propose(drafted.drafts, drafted.kinds, position, drafted.firsts)
            drafts[drafted.place] = tuple(drafted.drafts)
        return drafts

    def _unseen(self, work: ChunkWork, guesses: Guesses) -> SequenceSlice | None:
        """Return the tokens that a second model has to take in, those of the chunk included, with logits
        if drafts follow; None if there are none.
        """
        chunk = work.chunk
        start = guesses.num_filled
        behind = chunk.start + chunk.num_tokens
        end = min(behind, self._limit, start + AT_ONCE)
        if end <= start:
            return None
        logits = Logits.NONE
        if chunk.most_drafts and end == behind:
            logits = Logits.LAST
        return SequenceSlice(chunk.request.tokens(start, end), start, chunk.block_ids, logits)

    def _unseen_features(
        self, work: ChunkWork, guesses: Guesses, features: list[Tensor]
    ) -> SequenceSlice | None:
        """Return the rows before the chunk that have features and were not taken in, each with the token
        behind it, and append the features; None if there are none.
        """
        chunk = work.chunk
        end = min(chunk.start, self._limit)
        parts = guesses.take_kept(end)
        if not parts:
            return None
        for part in parts:
            assert isinstance(part, Tensor)
            features.append(part)
        start = guesses.num_filled
        logits = Logits.NONE
        if chunk.most_drafts and end == chunk.start:
            logits = Logits.LAST
        tokens = chunk.request.tokens(start + 1, end + 1)
        return SequenceSlice(tokens, start, chunk.block_ids, logits)

    def _draft(self, logits: Tensor, states: Tensor | None, going: list[_Going]) -> None:
        """Draw the first draft of each from `logits`, float32 [len(going), tokens], and those behind as
        long as they are worth a pass. states: of these rows, if the head takes features.
        """
        while going:
            further = self._drawn(logits, going)
            if not further:
                return
            features = []
            rows = []
            for index, item in enumerate(going):
                if item not in further:
                    continue
                chunk = item.work.chunk
                position = chunk.start + len(item.drafts)
                if states is not None:
                    position = position - 1
                    features.append(states[index : index + 1])
                row = SequenceSlice(item.drafts[-1:], position, chunk.block_ids, Logits.LAST)
                rows.append(row)
            going = further
            logits, states = self._run(rows, features)
            if not self._takes_features:  # features of the model come later, and these rows anew
                for item, row in zip(going, rows, strict=True):
                    item.guesses.num_filled = row.start + 1

    def _drawn(self, logits: Tensor, going: Sequence[_Going]) -> list[_Going]:
        """Append a draft to each, and return those that go on."""
        chosen, _ = draw(logits, [item.draw for item in going])
        likeliest = highest(logits)
        drawn = self._ids(chosen)
        tops = self._ids(likeliest)
        for index, item in enumerate(going):
            if item.work.row.params.greedy:
                continue
            if not item.drafts:
                item.firsts = (drawn[index], tops[index])
            if item.guesses.takes_likeliest:
                chosen[index] = likeliest[index]
        chances = _probabilities(logits, chosen).tolist()
        further = []
        for item, token, chance in zip(going, self._ids(chosen), chances, strict=True):
            kinds = [*item.kinds, item.guesses.kind_of(chance)]
            if token >= self._vocab_size or item.guesses.likely(kinds) < LEAST:
                continue
            item.drafts.append(token)
            item.kinds = kinds
            next_position = item.work.chunk.start + len(item.drafts)
            if not item.is_full and next_position < self._limit and item.guesses.goes_on(kinds):
                further.append(item)
        return further

    def _ids(self, tokens: Tensor) -> list[int]:
        """Return the model's ids of tokens of the head's vocabulary."""
        if self.runner.head.vocabulary is not None:
            tokens = self.runner.head.vocabulary[tokens]
        ids: list[int] = tokens.tolist()
        return ids

    def _run(
        self, slices: Sequence[SequenceSlice], features: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Run the head; return float32 logits [slices with logits, tokens], and of a head that takes
        features the states of these rows.
        """
        joined = None
        if self._takes_features:
            joined = features[0]
            if len(features) > 1:
                joined = torch.cat(list(features))
        return self.runner.run(slices, joined)


def _probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return float32 [rows]: the probability of each row's token, at temperature 1. NaN counts as 0."""
    chosen = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return (chosen - logits.logsumexp(-1)).exp().nan_to_num(0.0)
