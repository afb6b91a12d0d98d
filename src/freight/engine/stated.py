"""A stated answer: tokens that were given to a prompt before, and are drawn again from its logits.

A row's bits depend on its own history alone, and a draw on its logits, parameters, seed and position
(`sampler.py`). So prompt and answer are computed as one prompt, and each token of the answer is drawn
again, from the logits of the row before it. As long as the tokens drawn are those stated, they are
what `Engine.add` would have drawn, with their log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from freight.engine.runner import StepRows
from freight.engine.sampler import Sampled, SamplingRow, sample
from freight.engine.step import ScheduledChunk

# tokens of an answer that are drawn again at once: a draw holds five times the memory of its logits
REDRAWN_AT_ONCE = 32


class Mismatch(NamedTuple):
    """A token that is drawn otherwise than stated, after `position` output tokens.

    Log-probabilities are the model's, of both tokens. drawn: -1, with a log-probability of NaN, where
    no token can be drawn; `error` says why.
    """

    position: int
    stated: int
    drawn: int
    stated_logprob: float
    drawn_logprob: float
    error: str | None = None


class DrawnAgain(NamedTuple):
    """Further tokens of an answer that are drawn as stated, and the first that is not."""

    tokens: Sequence[Sampled]
    mismatch: Mismatch | None


@dataclass(eq=False, slots=True)
class StatedAnswer:
    """An answer on its way through the engine, behind a prompt of `num_prompt_tokens` tokens.

    tokens    those stated
    row       what they are drawn with
    drawn     the leading ones that were drawn again
    mismatch  the first one that is drawn otherwise; what follows is not drawn
    """

    tokens: tuple[int, ...]
    num_prompt_tokens: int
    row: SamplingRow
    drawn: list[Sampled] = field(default_factory=list)
    mismatch: Mismatch | None = None

    def to_draw(self, chunk: ScheduledChunk) -> range:
        """Return the tokens that `chunk` has the rows for, and that are not drawn yet."""
        if self.mismatch is not None:
            return range(0)
        begin = chunk.start + 1 - self.num_prompt_tokens
        end = min(begin + chunk.num_tokens, len(self.tokens))
        return range(max(begin, len(self.drawn)), end)

    def draw(self, chunk: ScheduledChunk, rows: StepRows, first_row: int) -> DrawnAgain:
        """Draw the tokens `to_draw` of a chunk; `first_row` of `rows` is its first. Changes nothing."""
        # the row before a token judges it
        before = first_row + self.num_prompt_tokens - 1 - chunk.start
        positions = self.to_draw(chunk)
        tokens: list[Sampled] = []
        for begin in range(positions.start, positions.stop, REDRAWN_AT_ONCE):
            end = min(begin + REDRAWN_AT_ONCE, positions.stop)
            logits = rows.logits(range(before + begin, before + end))
            sampling = self.row.along(self.tokens[:end], end - begin)
            for position, sampled in enumerate(sample(logits, sampling), begin):
                stated = self.tokens[position]
                if sampled.error is not None or sampled.token_id != stated:
                    mismatch = _mismatch(position, stated, sampled, logits[position - begin])
                    return DrawnAgain(tokens, mismatch)
                tokens.append(sampled)
        return DrawnAgain(tokens, None)

    def take(self, again: DrawnAgain) -> None:
        """Take note of what was drawn."""
        self.drawn.extend(again.tokens)
        self.mismatch = self.mismatch or again.mismatch


def _mismatch(position: int, stated: int, sampled: Sampled, logits: Tensor) -> Mismatch:
    """logits: float32 [vocab_size], of this position."""
    both = torch.tensor([stated, max(sampled.token_id, 0)], dtype=torch.int64, device=logits.device)
    expected, drawn = logits.log_softmax(-1)[both].tolist()
    if sampled.error is not None:
        return Mismatch(position, stated, -1, expected, math.nan, sampled.error)
    return Mismatch(position, stated, sampled.token_id, expected, drawn)
