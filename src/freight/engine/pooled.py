"""A pooled prompt: the states of its tokens, as its chunks are computed, become one.

The result has the same bits in any chunks: the sum of the mean goes token by token, in float64.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from freight.engine.prepare import Logits
from freight.engine.runner import StepRows
from freight.engine.step import ScheduledChunk
from freight.model.config.pooling import PoolingKind
from freight.model.pooler import Pooler
from freight.outputs import Pooled
from freight.pooling import PoolingParams


class PooledPart(NamedTuple):
    """What is known of a prompt after a chunk.

    state   the pooled state so far: [hidden_size], float64 for a mean; None: nothing yet
    pooled  the result, after the last chunk
    error   why there is none
    """

    state: Tensor | None
    pooled: Pooled | None = None
    error: str | None = None


@dataclass(eq=False, slots=True)
class PooledPrompt:
    """A prompt on its way through the engine, of which one vector is made.

    state   of the chunks that were computed, as `PooledPart.state`
    pooled  the result, once it is there
    """

    pooler: Pooler
    params: PoolingParams
    num_tokens: int
    state: Tensor | None = None
    pooled: Pooled | None = None

    @property
    def needs_all_rows(self) -> bool:
        """Whether states of tokens before the last are needed, so that none may be left out."""
        return self.pooler.config.kind is not PoolingKind.LAST

    def rows_of(self, chunk: ScheduledChunk) -> Logits:
        """Say which rows of a chunk are needed."""
        is_last = chunk.start + chunk.num_tokens == self.num_tokens
        match self.pooler.config.kind:
            case PoolingKind.MEAN:
                return Logits.STATES
            case PoolingKind.CLS:
                return Logits.STATES if chunk.start == 0 else Logits.NONE
            case PoolingKind.LAST:
                return Logits.STATE if is_last else Logits.NONE

    def pool(self, chunk: ScheduledChunk, rows: StepRows, first_row: int) -> PooledPart:
        """Pool the rows of a chunk, of which `first_row` of `rows` is the first. Changes nothing."""
        state = self.state
        config = self.pooler.config
        if config.kind is PoolingKind.MEAN:
            state = self._sum(chunk, rows.states(first_row, chunk.num_tokens))
        elif config.kind is PoolingKind.CLS:
            if chunk.start == 0:
                state = rows.states(first_row, 1)[0].clone()
        elif chunk.start + chunk.num_tokens == self.num_tokens:
            state = self._last(rows, first_row)
        if chunk.start + chunk.num_tokens < self.num_tokens:
            return PooledPart(state)
        assert state is not None
        if config.kind is PoolingKind.MEAN:
            state = state / self.num_tokens
        values = self.pooler.finish(state, self.params)
        if not bool(values.isfinite().all()):
            return PooledPart(None, error="the model gave NaN or infinite states for its prompt")
        return PooledPart(None, Pooled(array("f", values.tolist())))

    def _sum(self, chunk: ScheduledChunk, states: Tensor) -> Tensor:
        """Add the states of a chunk to those before it, in order."""
        states = states.to("cpu", torch.float64)
        before = self.state
        # a prompt that lost its blocks begins anew
        if before is None or chunk.start == 0:
            before = torch.zeros_like(states[0])
        return torch.cat([before[None], states]).cumsum(0)[-1]

    def _last(self, rows: StepRows, first_row: int) -> Tensor:
        tokens = self.pooler.config.token_ids
        if not tokens:
            return rows.states(first_row, 1)[0]
        return rows.logits([first_row])[0, list(tokens)]

    def take(self, part: PooledPart) -> None:
        """Take note of what was pooled."""
        self.state = part.state
        self.pooled = part.pooled
