"""Redraws: an answer that was given before is checked in one prefill.

A row's bits depend on its own history alone, and a draw on its logits, parameters, seed and position
(`sampler.py`). So prompt and answer are computed as one prompt, and `compute.py` draws each token of
the answer again, from the logits of the row before it. As long as the tokens drawn are those stated,
they are what `Engine.add` would have drawn, with their log-probabilities.

A `Redraw` is one answer on its way through the engine. Its tokens are drawn by the row of another
completion, `told`, that is never scheduled. When all are drawn, `tell` gives them to that one by one.
So its text, its end and its outputs come about as those of any other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from freight.engine.progress import Completion, Group
from freight.engine.request import RequestState
from freight.engine.sampler import Sampled
from freight.outputs import FinishReason
from freight.text.logprobs import to_logprobs


class Otherwise(NamedTuple):
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


@dataclass(eq=False, kw_only=True)
class Redraw(Completion):
    """One answer that is drawn again. Its request has prompt and answer as its prompt, and draws nothing.

    told       the completion that the answer is of, without a token
    answer     the tokens stated
    drawn      the leading tokens of the answer that were drawn again
    otherwise  the first one that was not
    """

    told: Completion
    answer: tuple[int, ...]
    drawn: list[Sampled] = field(default_factory=list)
    otherwise: Otherwise | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return self.told.request.num_prompt_tokens

    def tell(self) -> None:
        """Give the tokens drawn to `told`, one by one, until one ends it."""
        completion = self.told
        request = completion.request
        if request.num_tokens >= request.token_limit:  # max_tokens is 0: the prompt was all
            request.finish_reason = FinishReason.LENGTH
            request.state = RequestState.FINISHED
        for sampled in self.drawn:
            if request.is_finished:
                return
            if sampled.logprobs is not None:
                completion.logprobs.append(to_logprobs(sampled.logprobs, completion.tokenizer))
            request.output_token_ids.append(sampled.token_id)
            if (ending := request.ending()) is not None:
                request.finish_reason, request.stop_reason = ending
                request.state = RequestState.FINISHED
            stop = completion.advance()
            if stop is not None and not request.is_finished:
                request.finish_reason = FinishReason.STOP
                request.stop_reason = stop
                request.state = RequestState.FINISHED
        if not request.is_finished:
            completion.flush()


@dataclass(frozen=True)
class Redrawn:
    """What came of the answers to one request.

    group      the request, with the completions as far as they were told
    otherwise  for each completion the first token that is drawn otherwise than stated, if one is
    errors     for each completion why it could not be computed; None: it was
    """

    group: Group
    otherwise: tuple[Otherwise | None, ...]
    errors: tuple[str | None, ...]
