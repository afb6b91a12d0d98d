"""Options, usage, errors and event bytes that the answers of chat and completions share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from freight.base.fields import JsonDict, JsonObject
from freight.outputs import CompletionDelta, FinishReason, RequestTimes
from freight.sampling import NO_TOKEN_LEFT
from freight.serve.call import ReplyHead
from freight.serve.transport.errors import ApiError, took_too_long
from freight.structured import CANNOT_GO_ON
from freight.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class AnswerOptions:
    """The contents of an answer besides its text.

    include_usage     the stream ends with a chunk of usage
    continuous_usage  every chunk has the usage so far
    token_ids         the ids of prompt and answer
    tokens_as_ids     tokens of log-probabilities are ids, "token_id:42", instead of texts
    prompt_logprobs   log-probabilities of the prompt, in a separate field
    """

    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs: bool = False


@dataclass(eq=False, slots=True)
class Usage:
    """Tokens of one answer so far.

    Drafts that were accepted and rejected are shown for a request with a prediction (`predicted`)
    alone, as in OpenAI's API: their number depends on what else runs, so that other answers would
    not have the same bytes twice.
    """

    prompt: int
    completion: int = 0
    cached: int = 0
    reasoning: int = 0
    accepted: int = 0
    rejected: int = 0
    predicted: bool = False

    def count_drafts(self, times: RequestTimes | None) -> None:
        """Add what was drafted for a request, at its end."""
        if times is not None:
            self.accepted += times.accepted
            self.rejected += times.drafted - times.accepted

    def count_reasoning(self, tokenizer: Tokenizer | None, texts: Sequence[str]) -> None:
        """Add the number of reasoning tokens of a finished completion, by tokenizing its text.

        They cannot be counted as they come: a delta may have tokens of both reasoning and content.
        """
        if tokenizer is not None and texts:
            self.reasoning += len(tokenizer.encode("".join(texts), add_special_tokens=False))

    def body(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning} | self._drafts(),
        }

    def _drafts(self) -> dict[str, int]:
        if not self.predicted:
            return {}
        return {
            "accepted_prediction_tokens": self.accepted,
            "rejected_prediction_tokens": self.rejected,
        }

    def json(self) -> str:
        """Return `body` as JSON, in a tenth of json.dumps' time: a stream may have it in every
        chunk.
        """
        drafts = "".join(f', "{name}": {count}' for name, count in self._drafts().items())
        return (
            f'{{"prompt_tokens": {self.prompt}, "completion_tokens": {self.completion}, '
            f'"total_tokens": {self.prompt + self.completion}, '
            f'"prompt_tokens_details": {{"cached_tokens": {self.cached}}}, '
            f'"completion_tokens_details": {{"reasoning_tokens": {self.reasoning}{drafts}}}}}'
        )


class Chunks:
    """Writes the chunks of one stream. Their common part is prepared once."""

    def __init__(self, common: JsonObject, options: AnswerOptions, usage: Usage) -> None:
        """Prepare the common part. common: the fields of every chunk but `choices` and `usage`."""
        self._lead = f'data: {json.dumps(common)[:-1]}, "choices": ['
        self._options = options
        self._usage = usage
        self._tail = ', "usage": null}\n\n' if options.include_usage else "}\n\n"

    def chunk(self, choice: str, more: str = "") -> str:
        """Return the chunk of one choice, given as JSON. more: further fields of this chunk, each
        as `, "name": value`.
        """
        if self._options.continuous_usage:
            return f'{self._lead}{choice}]{more}, "usage": {self._usage.json()}}}\n\n'
        return f"{self._lead}{choice}]{more}{self._tail}"

    def end(self) -> bytes:
        """Return the usage, if asked for, and the end of the stream."""
        if not self._options.include_usage:
            return DONE
        return f'{self._lead}], "usage": {self._usage.json()}}}\n\n'.encode("ascii") + DONE


def event(data: object) -> bytes:
    """Return one server-sent event. It is ASCII, so that no character can be read as a line end."""
    return f"data: {json.dumps(data)}\n\n".encode("ascii")


def failure_events(error: ApiError) -> bytes:
    """Return the end of a failed stream: clients raise for the first event, and wait for the
    second.
    """
    return event(error.openai_body()) + DONE


def check_ending(output: CompletionDelta) -> None:
    """Raise ApiError for a completion that ended by error, timeout or abort."""
    if output.finish_reason is FinishReason.ERROR:
        error = output.error or ""
        # Both are faults of the request: its grammar, or parameters that exclude every token.
        if error.startswith(CANNOT_GO_ON):
            raise ApiError(400, f"the answer was ended: {output.error}", code="invalid_grammar")
        if error.startswith(NO_TOKEN_LEFT):
            raise ApiError(400, f"the answer was ended: {output.error}", code="no_token_left")
        raise ApiError(
            500, f"the answer could not be computed further: {output.error or 'no reason is known'}"
        )
    if output.finish_reason is FinishReason.TIMEOUT:
        raise took_too_long()
    if output.finish_reason is FinishReason.ABORT:
        raise ApiError(
            503, "the request was aborted before its answer was complete", code="aborted"
        )


def common_fields(head: ReplyHead, prefix: str, kind: str) -> JsonDict:
    """Return the fields that every body and every chunk of an answer begins with."""
    return {
        "id": f"{prefix}-{head.request_id}",
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
    }
