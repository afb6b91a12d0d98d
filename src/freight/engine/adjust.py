"""What a request's parameters change in its logits before a token is chosen: bias, penalties, and
which may be drawn.

`sampler.py` has the definition. A row keeps what it needs as dense tensors on the logits' device,
so that the cost of a step depends neither on the length of the prompt nor on that of the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freight.engine.bad_words import BadWords
from freight.engine.grammar import Matcher
from freight.engine.thinking import Thought
from freight.sampling import SamplingParams


@dataclass
class _Shared:
    """What rows of one sequence share."""

    changes: _Changes | None = None
    # allowed_token_ids as a mask, once it is needed
    allowed: NDArray[np.bool_] | None = None


class SamplingRow:
    """How one request is sampled: built once for the request, and used in every step that draws a
    token for it.

    params            what the caller asked for
    seed              what the row draws from; with `position`, it decides the draw alone
    prompt_token_ids  read once
    output_token_ids  the request's own list, read as it grows; it may grow by any number of tokens,
                      and never shrinks
    stop_token_ids    barred before min_tokens; ids outside of the vocabulary are ignored
    grammar           which tokens may come next; None: all
    bad_words         which tokens may not come next; None: any may
    thought           which token has to come next, because the budget of a thought is used up; None:
                      thoughts have no budget

    A repetition penalty keeps 4 bytes for each token of the vocabulary on the device, presence and
    frequency penalties together another 4. An exception inside `sample`, at any point, leaves the
    row as good as it was: what was done of an update is done again, with the same result.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        stop_token_ids: frozenset[int],
        grammar: Matcher | None = None,
        bad_words: BadWords | None = None,
        thought: Thought | None = None,
    ) -> None:
        self.params = params
        self.seed = seed
        self.prompt_token_ids = prompt_token_ids
        self.output_token_ids = output_token_ids
        self.stop_token_ids = stop_token_ids
        self.grammar = grammar
        self.bad_words = bad_words
        self.thought = thought
        penalised = (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )
        masked = not (grammar is None and params.allowed_token_ids is None and bad_words is None)
        self._always_changes = penalised or bool(params.logit_bias) or masked
        self._may_bar_stop_ids = params.min_tokens > 0 and bool(stop_token_ids)
        self._shared = _Shared()

    def fork(self, output_token_ids: Sequence[int]) -> SamplingRow:
        """Return a row that goes on from here with a list of its own, which begins with this row's
        output. Neither changes the other.
        """
        row = copy(self)
        row.output_token_ids = output_token_ids
        if self.grammar is not None:
            row.grammar = self.grammar.fork()
        if self.thought is not None:
            row.thought = self.thought.fork()
        row._shared = copy(self._shared)
        if row._shared.changes is not None:
            row._shared.changes = row._shared.changes.fork()
        return row

    def along(self, output_token_ids: Sequence[int], count: int) -> list[SamplingRow]:
        """Return the rows that draw the last `count` of these tokens, each from those before it; the
        list begins with this row's output, and this row is not changed.

        The rows share one state, which goes forwards: `adjust` takes them in this order, once.
        """
        first = self.fork(output_token_ids)
        rows = []
        for length in range(len(output_token_ids) - count, len(output_token_ids)):
            row = copy(first)
            row.output_token_ids = output_token_ids[:length]
            if first.thought is not None:  # where a token is forced is asked of all rows before any
                row.thought = first.thought.fork()
            rows.append(row)
        return rows

    @property
    def position(self) -> int:
        """How many output tokens come before the one that is drawn next."""
        return len(self.output_token_ids)

    @property
    def bars_stop_ids(self) -> bool:
        return self._may_bar_stop_ids and self.position < self.params.min_tokens

    @property
    def changes_logits(self) -> bool:
        """Whether the next token is drawn from other logits than the model's."""
        return self._always_changes or self.bars_stop_ids or self._forced_thought is not None

    @property
    def may_follow(self) -> bool:
        """Whether the token after the next one is drawn from the model's logits, whatever the next
        one is, if this one is.
        """
        return self.thought is None or not self.thought.may_force_next(self.output_token_ids)

    @property
    def forced(self) -> int | None:
        """The token that has to come next; None: any may. A grammar that does not permit it wins."""
        token = self._forced_thought
        if token is None or self.grammar is None:
            return token
        permitted = self.grammar.permitted(self.output_token_ids)
        if permitted is None or not permitted[token]:
            return None
        return token

    @property
    def _forced_thought(self) -> int | None:
        if self.thought is None:
            return None
        return self.thought.forced(self.output_token_ids)

    def adjust(self, x: Tensor) -> None:
        """Change the logits x, float32 [vocab_size], in place."""
        forced = self.forced
        if forced is not None:
            x.fill_(-math.inf)
            x[forced] = 0.0
            return
        changes = self._shared.changes
        if changes is None or changes.device != x.device or changes.vocab_size != x.shape[0]:
            changes = self._shared.changes = _Changes(self, x.shape[0], x.device)
        changes.catch_up(self.output_token_ids)
        changes.make(x, self.bars_stop_ids and self.grammar is None)
        left = self._left(x.shape[0])
        if left is None:
            return
        forbidden = torch.from_numpy(~left)
        if x.device.type == "cuda":
            forbidden = forbidden.pin_memory()
        x.masked_fill_(forbidden.to(x.device, non_blocking=True), -math.inf)

    def _left(self, vocab_size: int) -> NDArray[np.bool_] | None:
        """bool [vocab_size]: tokens that may be drawn, whatever their logits; None: all.

        None of them, when the grammar has an error.
        """
        allowed_ids = self._kept(vocab_size)
        if self.grammar is None:
            return allowed_ids
        barred = frozenset[int]()
        if self.bars_stop_ids:
            barred = self.stop_token_ids
        if self.bars_stop_ids or self.params.ignore_eos:
            barred |= self.grammar.stop_token_ids
        permitted = self.grammar.permitted(self.output_token_ids, barred, allowed_ids)
        if permitted is None:
            return np.zeros(vocab_size, np.bool_)
        return permitted

    def _kept(self, vocab_size: int) -> NDArray[np.bool_] | None:
        """bool [vocab_size]: tokens that allowed_token_ids and bad_words leave; None: all."""
        ids = self.params.allowed_token_ids
        allowed = self._shared.allowed
        if ids is not None and (allowed is None or allowed.size != vocab_size):
            allowed = np.zeros(vocab_size, np.bool_)
            allowed[list(ids)] = True
            self._shared.allowed = allowed  # last: an exception before leaves it to the next call
        if self.bad_words is None:
            return allowed
        if allowed is None:
            allowed_ids = np.ones(vocab_size, np.bool_)
        else:
            allowed_ids = allowed.copy()
        allowed_ids[self.bad_words.barred(self.output_token_ids)] = False
        return allowed_ids


def adjust(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return the logits [num_rows, vocab_size] that tokens are drawn from; the given tensor itself
    when no row changes any.
    """
    changing = [i for i, row in enumerate(rows) if row.changes_logits]
    if not changing:
        return logits
    adjusted = logits.clone()
    for i in changing:
        rows[i].adjust(adjusted[i])
    return adjusted


def send(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` on `device`; the host does not wait for what a GPU still computes, as torch.tensor
    would.
    """
    host = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class _Changes:
    """A row's state for one vocabulary size and device."""

    def __init__(self, row: SamplingRow, vocab_size: int, device: torch.device) -> None:
        params = row.params
        self.device = device
        self.vocab_size = vocab_size
        self._params = params
        self._bias_ids = send(list(params.logit_bias), torch.int64, device)
        self._bias = send(list(params.logit_bias.values()), torch.float32, device)
        stops: list[int] = []
        if params.min_tokens:
            stops = [token for token in row.stop_token_ids if token < vocab_size]
        self._stop_ids = send(stops, torch.int64, device)
        self._factor: Tensor | None = None  # repetition_penalty at every token seen, 1 elsewhere
        if params.repetition_penalty != 1:
            self._factor = torch.ones(vocab_size, dtype=torch.float32, device=device)
            seen = send(row.prompt_token_ids, torch.int64, device)
            self._factor.index_fill_(0, seen, params.repetition_penalty)
        # presence_penalty + frequency_penalty * n(v), 0 where n(v) is 0
        self._cost: Tensor | None = None
        if params.presence_penalty != 0 or params.frequency_penalty != 0:
            self._cost = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        # token -> its count in output[:end], and that end
        self._counts: dict[int, tuple[int, int]] = {}
        self._num_taken = 0  # leading output tokens that all of the above has taken in

    def fork(self) -> _Changes:
        """Return a copy that takes in tokens of its own."""
        fork = copy(self)
        if self._factor is not None:
            fork._factor = self._factor.clone()
        if self._cost is not None:
            fork._cost = self._cost.clone()
        fork._counts = dict(self._counts)
        return fork

    def catch_up(self, output: Sequence[int]) -> None:
        """Take in the output tokens that came since the last call. Every assignment may be
        repeated.
        """
        if self._factor is None and self._cost is None:
            return
        fresh = output[self._num_taken :]
        if not fresh:
            return
        ids = send(fresh, torch.int64, self.device)
        if self._factor is not None:
            self._factor.index_fill_(0, ids, self._params.repetition_penalty)
        if self._cost is not None:
            for position, token in enumerate(fresh, self._num_taken):
                count, end = self._counts.get(token, (0, 0))
                if position >= end:  # not counted by an earlier call that an exception ended
                    self._counts[token] = (count + 1, position + 1)
            presence = self._params.presence_penalty
            frequency = self._params.frequency_penalty
            cost = [presence + frequency * self._counts[token][0] for token in fresh]
            # a token twice in `fresh` has one cost
            self._cost[ids] = send(cost, torch.float32, self.device)
        # last: until here an exception makes the next call begin at the same token
        self._num_taken += len(fresh)

    def make(self, x: Tensor, bars_stop_ids: bool) -> None:
        """Change the logits x [vocab_size] in place, in the order of the definition."""
        if self._bias_ids.numel():
            x[self._bias_ids] += self._bias
        if self._factor is not None:
            # Of x / r and x * r the definition takes the smaller for r > 1, the larger for r < 1,
            # whatever x's sign. It is several times faster than `where`; a factor of 1 changes no
            # bit.
            choose = torch.maximum
            if self._params.repetition_penalty > 1:
                choose = torch.minimum
            choose(x / self._factor, x * self._factor, out=x)
        if self._cost is not None:
            x -= self._cost
        if bars_stop_ids:
            x.index_fill_(0, self._stop_ids, -math.inf)
