"""What comes of an answer's requests, until its reader takes it.

A reader gets everything that has come since its last look; `merged` makes one delta for each
request of it. A slow reader therefore holds up nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from freight.outputs import CompletionDelta, FinishReason, RequestDelta, Scores

T = TypeVar("T")

_WHOLE = (None, FinishReason.STOP, FinishReason.LENGTH)  # how a completion stands that did not fail


class Inbox:
    """What comes of all the requests of one answer. For use within one event loop."""

    def __init__(self) -> None:
        self._deltas: list[tuple[int, RequestDelta]] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = (
            None  # a future costs half of what an asyncio.Event does
        )

    async def next(self) -> list[tuple[int, RequestDelta]]:
        """All that has come since the last call, with the index of its request; empty after
        `nudge`.
        """
        if not self._deltas and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._deltas and self._error is not None:
            raise self._error
        deltas, self._deltas = self._deltas, []
        return deltas

    def put(self, index: int, delta: RequestDelta) -> None:
        self._deltas.append((index, delta))
        self.nudge()

    def fail(self, error: Exception) -> None:
        """End the answer, after what has come: `next` raises `error`."""
        self._error = self._error or error
        self.nudge()

    def nudge(self) -> None:
        """Make `next` return, with nothing if there is nothing."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merged(deltas: Sequence[tuple[int, RequestDelta]]) -> list[tuple[int, RequestDelta]]:
    """One delta for each request in place of several, as if the engine had reported less often.

    A completion that fails keeps a delta of its own: what came before is sent before the error.
    """
    if len(deltas) == 1:
        return list(deltas)
    runs: dict[int, list[list[RequestDelta]]] = {}
    for index, delta in deltas:
        request = runs.setdefault(index, [[]])
        if any(one.finish_reason not in _WHOLE for one in delta.outputs):
            request.append([])
        request[-1].append(delta)
    return [(index, _as_one(run)) for index, request in runs.items() for run in request if run]


def _as_one(run: Sequence[RequestDelta]) -> RequestDelta:
    if len(run) == 1:
        return run[0]
    completions: dict[int, list[CompletionDelta]] = {}
    for delta in run:
        for one in delta.outputs:
            completions.setdefault(one.index, []).append(one)
    scores = [delta.scores for delta in run if delta.scores is not None]
    return RequestDelta(
        run[-1].request_id,
        [_completion(parts) for parts in completions.values()],
        run[-1].finished,
        Scores.joined(scores) if scores else None,
        max(delta.num_cached_tokens for delta in run),
        run[-1].times,
    )


def _completion(parts: Sequence[CompletionDelta]) -> CompletionDelta:
    last = parts[-1]
    return CompletionDelta(
        last.index,
        [token for part in parts for token in part.token_ids],
        "".join(part.text for part in parts),
        _joined([part.logprobs for part in parts]),
        last.finish_reason,
        last.stop_reason,
        last.error,
    )


def _joined(lists: Sequence[list[T] | None]) -> list[T] | None:
    given = [one for one in lists if one is not None]
    return [value for one in given for value in one] if given else None
