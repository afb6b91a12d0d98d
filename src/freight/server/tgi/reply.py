"""Answers of TGI's API: deltas -> events of a stream, or one body; and its errors.

Guarantees: the texts of a stream's tokens, joined, are its `generated_text` (without the prompt),
and that is the text of the same answer in one piece. A token's `text` is therefore what it adds: ""
for one that ends within a character, and for one that is no part of the text (end of text). As in
TGI, `generated_text` includes the stop string that ended it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from freight.outputs import (
    CompletionDelta,
    FinishReason,
    Logprob,
    RequestDelta,
    Scores,
    TokenLogprobs,
)
from freight.sampling import SamplingParams
from freight.server.call import TokenizedWork
from freight.server.transport.errors import ApiError
from freight.text.detokenizer import Detokenizer
from freight.text.tokenizer import Tokenizer

_ERROR_TYPES = {
    401: "authentication",
    404: "not_found",
    424: "generation",
    429: "overloaded",
    503: "overloaded",
}
_LOWEST = -9999.0  # in place of minus infinity, which JSON does not have


@dataclass(frozen=True)
class ReplyOptions:
    """What a request wants to see.

    details       finish reason, tokens, ...
    top_n_tokens  the most likely tokens at each position; 0: none
    prefix        before the generated text: the prompt, or nothing
    as_list       the body is a list with one answer
    """

    stream: bool = False
    details: bool = False
    top_n_tokens: int = 0
    prefix: str = ""
    as_list: bool = False


def error_body(error: ApiError) -> dict[str, object]:
    """The envelope of TGI's API, whose `error_type` its clients make exceptions of.

    TGI has no type for a key that is wrong and for what is not there. These get names of their own,
    or clients would say that the request's fields are at fault.
    """
    kind = _ERROR_TYPES.get(error.status) or (
        "validation" if 400 <= error.status < 500 else "generation"
    )
    if kind == "generation" and error.code == "incomplete_generation":
        kind = error.code
    return {"error": error.message, "error_type": kind}


class GenerateReply:
    """One answer while it grows."""

    def __init__(
        self,
        options: ReplyOptions,
        work: TokenizedWork,
        tokenizer: Tokenizer,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """stop_token_ids: the model's own, which are no text whatever the tokenizer says of them."""
        self._special = tokenizer.special_token_ids | stop_token_ids
        self._options = options
        self._work = work
        self._tokenizer = tokenizer
        # Of tokens without regard to stop strings: a delta holds text back, but each token has its
        # event at once.
        self._detokenizer = Detokenizer(tokenizer, SamplingParams(), work.token_ids)
        self._given = 0  # characters that tokens have had
        self._pieces: list[str] = []
        self._tokens: list[dict[str, Any]] = []
        self._top_tokens: list[list[dict[str, Any]]] = []
        self._scores: list[Scores] = []
        self._finish: str | None = None
        self._text = ""  # all of it, when it has ended

    def start(self) -> bytes:
        return b""

    def advance(self, index: int, delta: RequestDelta) -> bytes:
        if delta.scores is not None:
            self._scores.append(delta.scores)
        events = []
        for completion in delta.outputs:
            first = len(self._tokens)
            self._take(completion)
            if self._options.stream:
                events += [
                    self._event(first + n, token) for n, token in enumerate(self._tokens[first:], 1)
                ]
                if self._finish is not None and not completion.token_ids:
                    events.append(self._event(first + 1, self._no_token()))
        return b"".join(events)

    def end(self) -> bytes:
        return b""

    def body(self) -> object:
        answer: dict[str, Any] = {"generated_text": self._options.prefix + self._text}
        if self._options.details:
            answer["details"] = self._details() | {
                "prefill": self._prefill(),
                "tokens": self._tokens,
            }
            if self._options.top_n_tokens:
                answer["details"]["top_tokens"] = self._top_tokens
        return [answer] if self._options.as_list else answer

    def failure(self, error: ApiError) -> bytes:
        return _sse(error_body(error))

    def _take(self, delta: CompletionDelta) -> None:
        """Raises ApiError for a completion that could not be finished."""
        _check_finish(delta)
        self._pieces.append(delta.text)
        ends = delta.finish_reason is not None
        if ends:
            by_string = isinstance(delta.stop_reason, str)
            self._finish = _finish(delta)
            self._text = "".join(self._pieces) + (str(delta.stop_reason) if by_string else "")
        if not (self._options.stream or self._options.details):
            return
        entries = delta.logprobs or [{}] * len(delta.token_ids)
        for number, (token, entry) in enumerate(zip(delta.token_ids, entries, strict=True), 1):
            self._add(token, entry, ends and number == len(delta.token_ids))

    def _add(self, token: int, entry: TokenLogprobs, last: bool) -> None:
        # The last has all that is left: also what waited for more tokens, and nothing behind a stop
        # string.
        text = self._text[self._given :] if last else self._detokenizer.append([token])
        self._given += len(text)
        own = entry.get(token)
        self._tokens.append(
            {"id": token, "text": text, "logprob": _logprob(own), "special": token in self._special}
        )
        if self._options.top_n_tokens:
            best = sorted(
                (found.rank, other)
                for other, found in entry.items()
                if found.rank <= self._options.top_n_tokens
            )
            self._top_tokens.append([self._alone(other, entry[other]) for _, other in best])

    def _alone(self, token: int, found: Logprob) -> dict[str, Any]:
        """A token that is not in the text, with its own text."""
        tokenizer = self._tokenizer
        return {
            "id": token,
            "text": tokenizer.token_text(token),
            "logprob": _logprob(found),
            "special": token in self._special,
        }

    def _event(self, index: int, token: dict[str, Any]) -> bytes:
        event: dict[str, Any] = {"index": index, "token": token}
        if self._options.top_n_tokens:
            event["top_tokens"] = (
                self._top_tokens[index - 1] if index <= len(self._top_tokens) else []
            )
        event["generated_text"] = event["details"] = None
        if self._finish is not None and index >= len(self._tokens):
            event["generated_text"] = self._options.prefix + self._text
            if self._options.details:
                event["details"] = self._details() | {"input_length": len(self._work.token_ids)}
        return _sse(event)

    def _no_token(self) -> dict[str, Any]:
        """In the last event of an answer that ended without one more token: what was left of the
        text.
        """
        last = self._tokens[-1]["id"] if self._tokens else 0
        return {"id": last, "text": self._text[self._given :], "logprob": 0.0, "special": True}

    def _details(self) -> dict[str, Any]:
        return {
            "finish_reason": self._finish,
            "generated_tokens": len(self._tokens),
            "seed": None if self._work.params.greedy else self._work.params.seed,
        }

    def _prefill(self) -> list[dict[str, Any]]:
        """The prompt's tokens, the first without a log-probability; empty unless they were asked
        for.
        """
        if self._work.params.prompt_logprobs is None:
            return []
        text_of, scores = self._tokenizer.token_text, Scores.joined(self._scores)
        own = scores.logprobs[
            scores.width - 1 :: scores.width
        ]  # the last of each token's entries is the token itself
        logprobs = [None, *(value if math.isfinite(value) else _LOWEST for value in own)]
        return [
            {"id": token, "text": text_of(token), "logprob": logprob}
            for token, logprob in zip(self._work.token_ids, logprobs, strict=False)
        ]


def _check_finish(delta: CompletionDelta) -> None:
    if delta.finish_reason is FinishReason.ERROR:
        raise ApiError(424, delta.error or "the answer could not be computed further")
    if delta.finish_reason in (FinishReason.ABORT, FinishReason.TIMEOUT):
        why = "took too long" if delta.finish_reason is FinishReason.TIMEOUT else "was given up"
        raise ApiError(
            424, f"the request {why} before its answer was complete", code="incomplete_generation"
        )


def _finish(delta: CompletionDelta) -> str:
    if delta.finish_reason is FinishReason.LENGTH:
        return "length"
    return "stop_sequence" if isinstance(delta.stop_reason, str) else "eos_token"


def _logprob(found: Logprob | None) -> float:
    return found.logprob if found and math.isfinite(found.logprob) else _LOWEST


def _sse(event: object) -> bytes:
    return b"data:" + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
