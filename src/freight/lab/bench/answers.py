"""One streamed answer as load sees it: when its tokens came, how many they were, and whether it was
in order.

Guarantees: tokens are counted from `usage`, never from the number of events, because an event may
carry several tokens or none. An answer counts as complete only if it ended with `[DONE]` and
reported its usage; everything else is an error with a kind: `error_event`, `no_done`, `malformed`, `closed`,
`no_usage`, `empty`, `http_429`, ...
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from freight.base.fields import JsonObject
from freight.lab.bench.http_stream import EventReader, StreamError

DONE = b"[DONE]"
_GENERATED = ("content", "reasoning", "reasoning_content", "tool_calls")


@dataclass(frozen=True)
class Answer:
    """What became of one request. Times in seconds of time.perf_counter.

    start         when the request was due
    sent          when it was sent: later than `start` where the load itself was late
    times         when the events that carry tokens came
    counts        tokens of each of them, where the server gives its usage in every event; else None
    num_tokens    of the answer, from usage
    num_prompt    of the prompt, from usage
    num_cached    of the prompt's, found in the prefix cache; None: not reported
    max_tokens    tokens that were asked for
    error         what was wrong with it, a word to count by; "" if nothing
    message       the same for a person
    """

    start: float
    sent: float
    end: float
    times: tuple[float, ...] = ()
    counts: tuple[int, ...] | None = None
    num_tokens: int = 0
    num_prompt: int = 0
    num_cached: int | None = None
    max_tokens: int = 0
    error: str = ""
    message: str = ""


class AnswerStream:
    """Reads the body of a streamed answer, of chat or of completions."""

    def __init__(self) -> None:
        self.done_at: float | None = None
        self._events = EventReader()
        self._times: list[float] = []
        self._counts: list[int] | None = []
        self._usage: JsonObject = {}

    def feed(self, data: bytes, now: float) -> None:
        """Take a piece of the body that came at `now`. Raises StreamError."""
        for event in self._events.feed(data):
            if event == DONE:
                self.done_at = now
            elif self.done_at is not None:
                raise StreamError("malformed", "an event came after [DONE]")
            else:
                self._take(event, now)

    def _take(self, event: bytes, now: float) -> None:
        try:
            chunk = json.loads(event)
            error = chunk.get("error")
            if error is not None:
                message = error.get("message") if isinstance(error, dict) else error
                raise StreamError(
                    "error_event", f"the server ended the stream with an error: {message}"
                )
            usage = chunk.get("usage")
            if usage:
                new = usage["completion_tokens"] - self._usage.get("completion_tokens", 0)
                self._usage = usage
            choices = chunk["choices"]
            if usage and choices:  # usage in every event
                if new and self._counts is not None:
                    self._times.append(now)
                    self._counts.append(new)
            elif choices and any(map(_carries, choices)):
                self._times.append(now)
                self._counts = None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise StreamError(
                "malformed", f"an event is not a chunk of a completion: {event[:60]!r}"
            ) from None

    def answer(self, start: float, sent: float, num_asked: int) -> Answer:
        """Return the complete answer. Raises StreamError for a stream that is not complete."""
        if self.done_at is None:
            raise StreamError("no_done", "the stream ended without [DONE]")
        if not self._usage:
            raise StreamError(
                "no_usage", "the stream says no usage, so its tokens cannot be counted"
            )
        num_tokens = self._usage["completion_tokens"]
        if not num_tokens or not self._times:
            raise StreamError("empty", "the answer has no token")
        counts = tuple(self._counts or ())
        details = self._usage.get("prompt_tokens_details") or {}
        return Answer(
            start=start,
            sent=sent,
            end=self.done_at,
            times=tuple(self._times),
            counts=counts if sum(counts) == num_tokens else None,
            num_tokens=num_tokens,
            num_prompt=self._usage.get("prompt_tokens", 0),
            num_cached=details.get("cached_tokens"),
            max_tokens=num_asked,
        )


def _carries(choice: JsonObject) -> bool:
    """Say whether a choice of a chunk has something generated."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text")) or any(delta.get(name) for name in _GENERATED)
