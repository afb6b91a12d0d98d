"""Redraws: answers that were given before are checked in one prefill each (`stated.py`).

Each answer is a completion whose request has prompt and answer as its prompt, and draws nothing. When
its tokens are drawn again, they are given one by one to the completion that the answer is of, which is
never scheduled. So its text, its end and its outputs come about as those of any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freight.engine.progress import Completion, Group
from freight.engine.request import Request, RequestState
from freight.engine.sampler import Sampled
from freight.engine.stated import Mismatch
from freight.outputs import FinishReason, Scores
from freight.text.logprobs import to_logprobs


@dataclass(frozen=True)
class Redrawn:
    """What came of the answers to one request.

    group       the request, with the completions as far as their tokens were drawn as stated
    mismatches  for each completion the first token that is drawn otherwise than stated, if one is
    errors      for each completion why it could not be computed; None: it was
    """

    group: Group
    mismatches: tuple[Mismatch | None, ...]
    errors: tuple[str | None, ...]


@dataclass(eq=False, kw_only=True)
class RedrawGroup(Group):
    """Answers that are drawn again, of which each completion has one as `stated`.

    answers  the request that they are to: its completions get the tokens, and are never scheduled
    """

    answers: Group

    def result(self) -> Redrawn:
        """Give the tokens that were drawn to the answers. To be called once, at the end."""
        assert self.finished
        if self.params.prompt_logprobs is not None:
            # the scores are also those of the first answer's tokens
            count = len(self.prompt_token_ids) - 1
            self.answers.scores = []
            if count:
                self.answers.scores.append(Scores.joined(self.scores).part(0, count))
        mismatches = []
        errors = []
        for computed, answer in zip(self.completions, self.answers.completions, strict=True):
            assert computed.stated is not None
            error = computed.request.error
            try:
                complete(answer, computed.stated.drawn)
            except Exception as problem:  # as in `Engine._read`
                error = f"its tokens cannot be turned into text: {problem}"
            mismatches.append(computed.stated.mismatch)
            errors.append(error)
        return Redrawn(self.answers, tuple(mismatches), tuple(errors))


def complete(completion: Completion, drawn: Sequence[Sampled]) -> None:
    """Give tokens to a completion that is not scheduled, one by one, until one ends it."""
    request = completion.request
    if request.num_tokens >= request.token_limit:  # max_tokens is 0: the prompt was all
        _end(request, FinishReason.LENGTH, None)
    for sampled in drawn:
        if request.is_finished:
            return
        if sampled.logprobs is not None:
            completion.logprobs.append(to_logprobs(sampled.logprobs, completion.tokenizer))
        request.output_token_ids.append(sampled.token_id)
        if (ending := request.ending()) is not None:
            _end(request, *ending)
        stop = completion.advance()
        if stop is not None and not request.is_finished:
            _end(request, FinishReason.STOP, stop)
    if not request.is_finished:
        completion.flush()


def _end(request: Request, reason: FinishReason, stop_reason: str | int | None) -> None:
    request.finish_reason = reason
    request.stop_reason = stop_reason
    request.state = RequestState.FINISHED
