"""The queue between the engine's deltas and the reader of an answer.

A reader takes everything that has arrived since its last call; `merged` turns that into one delta
per request. A slow reader therefore delays nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain
from typing import TypeVar

from freight.outputs import CompletionDelta, FinishReason, RequestDelta, Scores

T = TypeVar("T")

_NOT_FAILED = (None, FinishReason.STOP, FinishReason.LENGTH)  # None: the completion continues


class Inbox:
    """The pending deltas of all requests of one answer. For use within one event loop."""

    def __init__(self) -> None:
        self._deltas: list[tuple[int, RequestDelta]] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None  # half the cost of an asyncio.Event

    async def next(self) -> list[tuple[int, RequestDelta]]:
        """Return all deltas since the last call, each with the index of its request; empty after
        `nudge`.
        """
        if not self._deltas and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._deltas and self._error is not None:
            raise self._error
        deltas = self._deltas
        self._deltas = []
        return deltas

    def put(self, index: int, delta: RequestDelta) -> None:
        self._deltas.append((index, delta))
        self.nudge()

    def fail(self, error: Exception) -> None:
        """End the answer after the pending deltas: `next` then raises `error`."""
        self._error = self._error or error
        self.nudge()

    def nudge(self) -> None:
        """Make `next` return, empty if there is nothing."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merged(deltas: Sequence[tuple[int, RequestDelta]]) -> list[tuple[int, RequestDelta]]:
    """Merge the deltas of each request into one, as if the engine had reported less often.

    A failure stays a separate delta, so that the text before it is sent before the error.
    """
    if len(deltas) == 1:
        return list(deltas)
    runs: dict[int, list[list[RequestDelta]]] = {}
    for index, delta in deltas:
        request = runs.setdefault(index, [[]])
        if any(output.finish_reason not in _NOT_FAILED for output in delta.outputs):
            request.append([])
        request[-1].append(delta)
    deltas_of_request: list[tuple[int, RequestDelta]] = []
    for index, request in runs.items():
        deltas_of_request += [(index, _as_one(run)) for run in request if run]
    return deltas_of_request


def _as_one(run: Sequence[RequestDelta]) -> RequestDelta:
    if len(run) == 1:
        return run[0]
    completions: dict[int, list[CompletionDelta]] = {}
    for delta in run:
        for output in delta.outputs:
            completions.setdefault(output.index, []).append(output)
    scores = [delta.scores for delta in run if delta.scores is not None]
    return RequestDelta(
        run[-1].request_id,
        [_completion(parts) for parts in completions.values()],
        run[-1].finished,
        Scores.joined(scores) if scores else None,
        max(delta.num_cached_tokens for delta in run),
        run[-1].times,
        run[-1].pooled,
    )


def _completion(parts: Sequence[CompletionDelta]) -> CompletionDelta:
    last = parts[-1]
    return CompletionDelta(
        last.index,
        list(chain.from_iterable(part.token_ids for part in parts)),
        "".join(part.text for part in parts),
        _joined([part.logprobs for part in parts]),
        last.finish_reason,
        last.stop_reason,
        last.error,
    )


def _joined(lists: Sequence[list[T] | None]) -> list[T] | None:
    present = [values for values in lists if values is not None]
    if not present:
        return None
    return list(chain.from_iterable(present))
