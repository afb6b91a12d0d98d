"""What a caller is told about its request: text, tokens and log-probabilities gathered so far.

Text is only ever whole characters, and stops exactly at a stop string. The token that ended a request (an end-of-text
or another stop id) is in `token_ids` but not in `text`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from freight.detokenizer import Detokenizer
from freight.engine.request import Request
from freight.engine.sampler import LogprobEntry, Sampled
from freight.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput, TokenLogprobs
from freight.sampling import SamplingParams
from freight.tokenizer import Tokenizer


def to_logprobs(entries: tuple[LogprobEntry, ...], tokenizer: Tokenizer | None) -> TokenLogprobs:
    """(token id, logprob, rank) -> {token id: Logprob}, with the tokens' text where there is a tokenizer."""
    return {
        token: Logprob(logprob, rank, tokenizer.decode([token], False) if tokenizer else None)
        for token, logprob, rank in entries
    }


@dataclass
class Completion:
    """One of a request's `n` completions."""

    request: Request
    detokenizer: Detokenizer | None
    tokenizer: Tokenizer | None
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def append(self, sampled: Sampled) -> str | None:
        """Take in a token that the scheduler has applied; returns the stop string that it completed, if one."""
        if sampled.logprobs is not None:
            self.logprobs.append(to_logprobs(sampled.logprobs, self.tokenizer))
        if self.detokenizer is None:
            return None
        ended = self.request.is_finished
        if not (ended and self.request.finish_reason is FinishReason.STOP):
            self.pieces.append(self.detokenizer.append([sampled.token_id]))
        if self.detokenizer.stop_reason is None and ended:
            self.flush()
        return self.detokenizer.stop_reason

    def flush(self) -> None:
        """No more tokens come: give out the text that was held back."""
        if self.detokenizer is not None:
            self.pieces.append(self.detokenizer.finish())

    def output(self) -> CompletionOutput:
        if len(self.pieces) > 1:
            self.pieces = ["".join(self.pieces)]
        request, stop = self.request, self.detokenizer.stop_reason if self.detokenizer else None
        return CompletionOutput(
            index=request.index,
            text=self.pieces[0] if self.pieces else "",
            token_ids=list(request.output_token_ids),
            # a stop string may be completed by the token that reached the limit
            finish_reason=FinishReason.STOP if stop is not None else request.finish_reason,
            stop_reason=stop if stop is not None else request.stop_reason,
            logprobs=list(self.logprobs) if request.params.logprobs is not None else None,
        )


@dataclass
class Group:
    """A caller's request: its prompt and its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    completions: list[Completion]
    prompt_logprobs: list[TokenLogprobs | None]

    @property
    def finished(self) -> bool:
        return all(c.request.is_finished for c in self.completions)

    def output(self) -> RequestOutput:
        wanted = self.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=[completion.output() for completion in self.completions],
            finished=self.finished,
            prompt_logprobs=list(self.prompt_logprobs) if wanted else None,
            num_cached_tokens=self.completions[0].request.num_cached_tokens,
        )
