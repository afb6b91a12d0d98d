"""Answers of TGI's API: deltas -> events of a stream, or one body; and its errors.

Guarantees: the texts of a stream's tokens, joined, are its `generated_text` (without the prompt),
and that equals the text of the same answer without streaming. A token's `text` is therefore what it
adds: "" for one that ends within a character, and for one that is not part of the text (end of
text). As in TGI, `generated_text` includes the stop string that ended it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from freight.base.fields import JsonDict
from freight.outputs import (
    CompletionDelta,
    FinishReason,
    Logprob,
    RequestDelta,
    Scores,
    TokenLogprobs,
)
from freight.sampling import SamplingParams
from freight.serve.call import TokenizedWork
from freight.serve.transport.errors import ApiError
from freight.text.detokenizer import Detokenizer
from freight.text.tokenizer import Tokenizer

_ERROR_TYPES = {
    401: "authentication",
    404: "not_found",
    424: "generation",
    429: "overloaded",
    503: "overloaded",
}
_LOWEST = -9999.0  # replaces minus infinity, which JSON does not have


@dataclass(frozen=True)
class ReplyOptions:
    """The contents of an answer, as the request asks for them.

    details       add finish reason, tokens, ...
    top_n_tokens  number of most likely tokens at each position; 0: none
    prefix        the text before the generated one: the prompt, or nothing
    as_list       the body is a list with one answer
    """

    stream: bool = False
    details: bool = False
    top_n_tokens: int = 0
    prefix: str = ""
    as_list: bool = False


def error_body(error: ApiError) -> dict[str, object]:
    """Return the error envelope of TGI's API; its clients derive exceptions from `error_type`.

    TGI has no type for a wrong key, and none for an unknown path. These get types that TGI does not
    have: with "validation" clients would blame the request's fields.
    """
    kind = _ERROR_TYPES.get(error.status) or (
        "validation" if 400 <= error.status < 500 else "generation"
    )
    if kind == "generation" and error.code == "incomplete_generation":
        kind = error.code
    return {"error": error.message, "error_type": kind}


def error_event(error: ApiError) -> bytes:
    """Return the end of a stream that failed."""
    return _sse(error_body(error))


class GenerateReply:
    """One answer in progress."""

    def __init__(
        self,
        options: ReplyOptions,
        work: TokenizedWork,
        tokenizer: Tokenizer,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Start with no tokens. stop_token_ids: the model's own, which are never text, whatever the
        tokenizer says.
        """
        self._special = tokenizer.special_token_ids | stop_token_ids
        self._options = options
        self._work = work
        self._tokenizer = tokenizer
        # Ignores stop strings: a delta may hold text back, but each token gets its event at once.
        self._detokenizer = Detokenizer(tokenizer, SamplingParams(), work.token_ids)
        self._given = 0  # characters assigned to tokens so far
        self._pieces: list[str] = []
        self._tokens: list[JsonDict] = []
        self._top_tokens: list[list[JsonDict]] = []
        self._scores: list[Scores] = []
        self._finish: str | None = None
        self._text = ""  # the full text, once the answer has ended

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
        answer: JsonDict = {"generated_text": self._options.prefix + self._text}
        if self._options.details:
            answer["details"] = self._details() | {
                "prefill": self._prefill(),
                "tokens": self._tokens,
            }
            if self._options.top_n_tokens:
                answer["details"]["top_tokens"] = self._top_tokens
        return [answer] if self._options.as_list else answer

    def failure(self, error: ApiError) -> bytes:
        return error_event(error)

    def _take(self, delta: CompletionDelta) -> None:
        """Take a delta. Raises ApiError for a completion that could not be finished."""
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
        # The last token gets the rest of the text: it includes characters that waited for more
        # tokens, and ends at a stop string.
        text = self._text[self._given :] if last else self._detokenizer.append([token])
        self._given += len(text)
        token_entry = entry.get(token)
        self._tokens.append(
            {
                "id": token,
                "text": text,
                "logprob": _logprob(token_entry),
                "special": token in self._special,
            }
        )
        if self._options.top_n_tokens:
            best = sorted(
                (candidate.rank, other)
                for other, candidate in entry.items()
                if candidate.rank <= self._options.top_n_tokens
            )
            self._top_tokens.append([self._alone(other, entry[other]) for _, other in best])

    def _alone(self, token: int, entry: Logprob) -> JsonDict:
        """Describe a candidate token, with its text outside of any context."""
        tokenizer = self._tokenizer
        return {
            "id": token,
            "text": tokenizer.token_text(token),
            "logprob": _logprob(entry),
            "special": token in self._special,
        }

    def _event(self, index: int, token: JsonDict) -> bytes:
        event: JsonDict = {"index": index, "token": token}
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

    def _no_token(self) -> JsonDict:
        """Return the token of a last event without a token: it carries the rest of the text."""
        last = self._tokens[-1]["id"] if self._tokens else 0
        return {"id": last, "text": self._text[self._given :], "logprob": 0.0, "special": True}

    def _details(self) -> JsonDict:
        return {
            "finish_reason": self._finish,
            "generated_tokens": len(self._tokens),
            "seed": None if self._work.params.greedy else self._work.params.seed,
        }

    def _prefill(self) -> list[JsonDict]:
        """Return the prompt's tokens, the first without a log-probability; empty by default."""
        if self._work.params.prompt_logprobs is None:
            return []
        text_of = self._tokenizer.token_text
        scores = Scores.joined(self._scores)
        # The last of each position's entries is the prompt's token itself.
        token_logprobs = scores.logprobs[scores.width - 1 :: scores.width]
        logprobs = [None, *(value if math.isfinite(value) else _LOWEST for value in token_logprobs)]
        return [
            {"id": token, "text": text_of(token), "logprob": logprob}
            for token, logprob in zip(self._work.token_ids, logprobs, strict=False)
        ]


def _check_finish(delta: CompletionDelta) -> None:
    if delta.finish_reason is FinishReason.ERROR:
        raise ApiError(424, delta.error or "the answer could not be computed further")
    if delta.finish_reason in (FinishReason.ABORT, FinishReason.TIMEOUT):
        why = "took too long" if delta.finish_reason is FinishReason.TIMEOUT else "was aborted"
        raise ApiError(
            424, f"the request {why} before its answer was complete", code="incomplete_generation"
        )


def _finish(delta: CompletionDelta) -> str:
    if delta.finish_reason is FinishReason.LENGTH:
        return "length"
    return "stop_sequence" if isinstance(delta.stop_reason, str) else "eos_token"


def _logprob(entry: Logprob | None) -> float:
    return entry.logprob if entry and math.isfinite(entry.logprob) else _LOWEST


def _sse(event: object) -> bytes:
    return b"data:" + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
