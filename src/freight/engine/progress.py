"""What a request has come to, text, tokens and log-probabilities, and what of it is new.

Text is only ever whole characters, and stops exactly at a stop string. The token that ended a request (an end-of-text
or another stop id) is in `token_ids` but not in `text`, unless include_stop_str_in_output asks for it. All text follows
from the request's tokens, so `rebuild` makes it anew after an interrupted step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from freight.engine.accounts import Stamps
from freight.engine.adapters import LoadedAdapter
from freight.engine.pooled import PooledPrompt
from freight.engine.request import Request
from freight.engine.sampler import SamplingRow
from freight.engine.stated import StatedAnswer
from freight.outputs import (
    CompletionDelta,
    CompletionOutput,
    FinishReason,
    Pooled,
    RequestDelta,
    RequestOutput,
    RequestTimes,
    Scores,
    TokenLogprobs,
)
from freight.sampling import SamplingParams
from freight.text.detokenizer import Detokenizer
from freight.text.logprobs import to_logprobs
from freight.text.tokenizer import Tokenizer


@dataclass(eq=False)
class Completion:
    """One of a request's `n` completions. `logprobs` never has fewer entries than the request has
    output tokens.

    new_detokenizer   makes a Detokenizer for this completion; None when no text is asked for
    tokenizer         for the text of tokens in log-probabilities; None when there is none, or no
                      text is asked for
    stated            the answer in its prompt whose tokens are drawn again; None: it draws its own
    pooled            its prompt, of which a vector is made; None: it draws tokens
    """

    request: Request
    new_detokenizer: Callable[[], Detokenizer] | None
    tokenizer: Tokenizer | None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stated: StatedAnswer | None = None
    pooled: PooledPrompt | None = None

    def __post_init__(self) -> None:
        self._sent_tokens = self._sent_chars = 0  # what earlier deltas had
        self._restart()

    def _restart(self) -> None:
        request = self.request
        self.detokenizer: Detokenizer | None = None
        if self.new_detokenizer is not None:
            self.detokenizer = self.new_detokenizer()
        self._num_read = 0  # output tokens that the detokenizer has seen
        self._pieces: list[str] = []
        self._sent_pieces = 0
        self.row = SamplingRow(
            params=request.params,
            seed=request.seed,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.output_token_ids,
            stop_token_ids=request.stop_token_ids,
            grammar=request.grammar,
            bad_words=request.bad_words,
            thought=request.thought,
        )

    @property
    def is_refuted(self) -> bool:
        """Whether a token of its stated answer is drawn otherwise."""
        return self.stated is not None and self.stated.mismatch is not None

    def advance(self) -> str | None:
        """Turn the tokens since the last call into text; returns the stop string that they
        completed, if one.
        """
        if self.detokenizer is None:
            return None
        request = self.request
        tokens = self.request.output_token_ids
        self._pieces.append(
            self.detokenizer.append(tokens[self._num_read : len(tokens) - self._ended_by_stop_id])
        )
        self._num_read = len(tokens)
        if request.is_finished:
            self.flush()
        return self.detokenizer.stop_reason

    @property
    def _ended_by_stop_id(self) -> bool:
        """Whether the last token is no text, but the end. A grammar's last token of text ends a
        request as well.
        """
        request = self.request
        if request.params.include_stop_str_in_output:
            return False
        if request.finish_reason is not FinishReason.STOP or isinstance(request.stop_reason, str):
            return False
        last = request.output_token_ids[-1]
        return (
            request.grammar is None
            or last in request.stop_token_ids
            or last in request.grammar.stop_token_ids
        )

    def flush(self) -> None:
        """Give out the text that was held back: no more tokens come."""
        if self.detokenizer is not None:
            self._pieces.append(self.detokenizer.finish())

    def rebuild(self) -> str | None:
        """Make text and sampler state anew from the request's tokens, like `advance`; deltas go on
        where they were.
        """
        del self.logprobs[len(self.request.output_token_ids) :]
        self._restart()
        stop = self.advance()
        self._split()
        return stop

    def _split(self) -> str:
        """Return all text so far; kept as two pieces, the one that deltas had and the rest."""
        text = "".join(self._pieces)
        self._pieces = [text[: self._sent_chars], text[self._sent_chars :]]
        self._sent_pieces = 1
        return text

    @property
    def _ending(self) -> tuple[FinishReason | None, str | int | None]:
        """Finish reason and stop reason; a stop string may be completed by the token that reached
        the limit.
        """
        if self.detokenizer is None or self.detokenizer.stop_reason is None:
            return self.request.finish_reason, self.request.stop_reason
        return FinishReason.STOP, self.detokenizer.stop_reason

    def delta(self) -> CompletionDelta:
        """Return what is new since the last call."""
        request = self.request
        first = self._sent_tokens
        reason, stop = self._ending
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = self.logprobs[first:]
        delta = CompletionDelta(
            index=request.index,
            token_ids=request.output_token_ids[first:],
            text="".join(self._pieces[self._sent_pieces :]),
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop,
            error=request.error,
        )
        self._sent_tokens += len(delta.token_ids)
        self._sent_chars += len(delta.text)
        self._sent_pieces = len(self._pieces)
        return delta

    def output(self) -> CompletionOutput:
        reason, stop = self._ending
        request = self.request
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = self.logprobs[: len(request.output_token_ids)]
        return CompletionOutput(
            index=request.index,
            text=self._split(),
            token_ids=list(request.output_token_ids),
            finish_reason=reason,
            stop_reason=stop,
            logprobs=logprobs,
            error=request.error,
        )


@dataclass(eq=False)
class Group:
    """A caller's request: its prompt, its completions and how long it takes.

    tokenizer   for the text of tokens in `prompt_logprobs`; None: there is none
    scores      of the prompt's tokens from the second on, as far as they are computed, in parts
    num_deltas  the deltas so far
    adapter     the adapter that computes it; None: the model alone
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    completions: list[Completion]
    stamps: Stamps
    tokenizer: Tokenizer | None
    scores: list[Scores] = field(default_factory=list)
    num_deltas: int = 0
    adapter: LoadedAdapter | None = None

    def __post_init__(self) -> None:
        self._sent_scores = 0  # parts that earlier deltas had
        # what `output` made of the first parts
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._read_scores = 0  # these parts

    @property
    def finished(self) -> bool:
        return all(completion.request.is_finished for completion in self.completions)

    @property
    def num_scored(self) -> int | None:
        """Tokens of the prompt that are scored, the first counted; None when scores are not asked
        for.
        """
        if self.params.prompt_logprobs is None:
            return None
        return 1 + sum(map(len, self.scores))

    @property
    def pooled(self) -> Pooled | None:
        """What pooling has come to; None before its end, and where it is not asked for."""
        prompt = self.completions[0].pooled
        if prompt is None or not self.finished:
            return None
        return prompt.pooled

    def stamp(self, now: float) -> None:
        """Take note of what has happened by `now`: its first token, its end, and a first step that
        was interrupted.
        """
        stamps = self.stamps
        for completion in self.completions:
            if stamps.scheduled is None and completion.request.was_admitted:
                stamps.scheduled = now
            if stamps.first_token is None and completion.request.output_token_ids:
                stamps.first_token = now
        if stamps.ended is None and self.finished:
            stamps.ended = now

    def times(self, now: float) -> RequestTimes:
        """Return the times until `now`, or until its end."""
        preemptions = 0
        drafted = 0
        accepted = 0
        for completion in self.completions:
            preemptions += completion.request.num_preemptions
            drafted += completion.request.num_drafted
            accepted += completion.request.num_accepted
        return self.stamps.times(now, preemptions, drafted, accepted)

    def delta(self, advanced: list[Completion], now: float) -> RequestDelta:
        """Return what is new since the last call, of the completions that advanced, at `now` of the
        engine's clock.
        """
        new = self.scores[self._sent_scores :]
        self._sent_scores += len(new)
        self.num_deltas += 1
        finished = self.finished
        if finished or self.stamps.first_token is None:  # in most steps, neither
            self.stamp(now)
        scores = None
        if new:
            scores = Scores.joined(new)
        times = None
        if finished:
            times = self.times(now)
        return RequestDelta(
            request_id=self.request_id,
            outputs=[completion.delta() for completion in advanced],
            finished=finished,
            scores=scores,
            num_cached_tokens=self.completions[0].request.num_cached_tokens,
            times=times,
            pooled=self.pooled,
        )

    def output(self) -> RequestOutput:
        """Return everything so far."""
        prompt_logprobs = None
        if self.params.prompt_logprobs is not None:
            prompt_logprobs = self._all_prompt_logprobs()
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=[completion.output() for completion in self.completions],
            finished=self.finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.completions[0].request.num_cached_tokens,
            pooled=self.pooled,
        )

    def _all_prompt_logprobs(self) -> list[TokenLogprobs | None]:
        for part in self.scores[self._read_scores :]:
            self._prompt_logprobs += [to_logprobs(entries, self.tokenizer) for entries in part]
            self._read_scores += 1
        return list(self._prompt_logprobs)
