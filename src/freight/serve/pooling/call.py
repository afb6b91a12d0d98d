"""PooledCall: a request whose answer is made of the vectors of its prompts, whatever the API."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from freight.outputs import RequestDelta
from freight.serve.call import ReplyHead, Served, TokenizedWork, Work
from freight.serve.openai.stream import check_ending, failure_events
from freight.serve.transport.errors import ApiError


@dataclass(frozen=True)
class Results:
    """What came of a call.

    vectors         of each prompt, float32 [size]
    prompt_tokens   of all prompts together
    cached_tokens   those of them that the prefix cache had
    """

    head: ReplyHead
    vectors: Sequence[array[float]]
    prompt_tokens: int
    cached_tokens: int

    def usage(self) -> dict[str, object]:
        """Return the `usage` of an answer, in OpenAI's form."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": 0,
            "total_tokens": self.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Shape(Protocol):
    """The shape of an API's answer."""

    def body(self, results: Results) -> object:
        """Return the answer, for `slices.json_bytes`."""


@dataclass(frozen=True)
class PooledCall:
    """A parsed request. `stream` is always False. error_of: makes the body of an error"""

    model: str
    work: tuple[Work, ...]
    ignored: tuple[str, ...]
    shape: Shape
    error_of: Callable[[ApiError], object] = ApiError.openai_body
    request_id: str | None = None
    stream: bool = False

    def reply(self, head: ReplyHead, served: Served, work: Sequence[TokenizedWork]) -> PooledReply:
        return PooledReply(head, work, self.shape)

    def failure_body(self, error: ApiError) -> object:
        return self.error_of(error)


class PooledReply:
    """A `Reply` that waits for the vectors of all prompts."""

    def __init__(self, head: ReplyHead, work: Sequence[TokenizedWork], shape: Shape) -> None:
        self._head = head
        self._shape = shape
        self._vectors: list[array[float] | None] = [None] * len(work)
        self._cached = [0] * len(work)
        self._prompt_tokens = sum(len(item.token_ids) for item in work)

    def start(self) -> bytes:
        return b""

    def advance(self, index: int, delta: RequestDelta) -> bytes:
        """Take a delta. Raises ApiError for a prompt that could not be computed, and for numbers
        that JSON does not have.
        """
        for output in delta.outputs:
            check_ending(output)
        self._cached[index] = max(self._cached[index], delta.num_cached_tokens)
        if delta.pooled is not None:
            values = delta.pooled.values
            if not math.isfinite(sum(values)):
                raise ApiError(
                    500, f"the model gave numbers for prompt {index} that are not finite"
                )
            self._vectors[index] = values
        return b""

    def end(self) -> bytes:
        return b""

    def body(self) -> object:
        vectors = [values for values in self._vectors if values is not None]
        assert len(vectors) == len(self._vectors)
        return self._shape.body(
            Results(self._head, vectors, self._prompt_tokens, sum(self._cached))
        )

    def failure(self, error: ApiError) -> bytes:
        return failure_events(error)
