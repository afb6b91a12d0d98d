"""One request while it grows, between the thread that hears of the engine and the event loop that
reads.

The engine's side adds what is new to what is known; it never waits. The reader takes all of that as
one RequestOutput. So a slow reader holds up nobody, and what is kept for it is no more than its
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from freight.engine.adapters import LoRARequest
from freight.engine.intake import AcceptedPrompt
from freight.errors import RequestError
from freight.outputs import (
    CompletionDelta,
    CompletionOutput,
    FinishReason,
    Pooled,
    RequestDelta,
    RequestOutput,
    Scores,
    TokenLogprobs,
)
from freight.sampling import SamplingParams
from freight.serve.processes.client import Running
from freight.text.logprobs import to_logprobs
from freight.text.tokenizer import Tokenizer

T = TypeVar("T")
Waiter = asyncio.Future[None]


class Readers:
    """Wakes readers that wait in their event loops: all of one loop in one go. The host calls
    `flush` once it has handed out what came together.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.AbstractEventLoop, list[Waiter]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, waiter: Waiter) -> None:
        """Have a reader woken by the next `flush`."""
        self._waiting.setdefault(loop, []).append(waiter)

    def flush(self) -> None:
        waiting = self._waiting
        self._waiting = {}
        for loop, waiters in waiting.items():
            _wake(loop, waiters)


def _wake(loop: asyncio.AbstractEventLoop, waiters: Sequence[Waiter]) -> None:
    with contextlib.suppress(RuntimeError):  # a loop that is closed: nobody waits there any more
        loop.call_soon_threadsafe(_resolve, waiters)


def _resolve(waiters: Sequence[Waiter]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


@dataclass
class _Completion:
    """One of a request's completions, as far as it is known."""

    index: int
    logprobs: list[TokenLogprobs] | None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    def add(self, delta: CompletionDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        if self.logprobs is not None:
            self.logprobs += delta.logprobs or ()
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.error = delta.error

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            self.index,
            self.text,
            list(self.token_ids),
            self.finish_reason,
            self.stop_reason,
            _copy(self.logprobs),
            self.error,
        )


def _copy(logprobs: list[T] | None) -> list[T] | None:
    if logprobs is None:
        return None
    return list(logprobs)


class Growing:
    """A request of the event loop in which it is made. `put`, `fail` and `end` may be called from
    any thread.

    name     what the engine calls the request; `request_id` is the caller's name for it
    running  set by the host once the engine has been sent the request
    """

    def __init__(
        self,
        name: str,
        request_id: str,
        prompt: AcceptedPrompt,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        adapter: LoRARequest | None = None,
    ) -> None:
        self.name = name
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.adapter = adapter
        self.running: Running | None = None
        self.readers: Readers | None = None  # of the host that the request is given to
        self._tokenizer = tokenizer
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiter: Waiter | None = None
        self._is_new = False
        self._error: Exception | None = None
        self._prompt_token_ids = list(prompt.token_ids)  # all its outputs have this one list
        self._completions = [
            _Completion(index, None if params.logprobs is None else []) for index in range(params.n)
        ]
        self._cached = 0
        self._pooled: Pooled | None = None
        self._scores: list[Scores] = []  # that `_prompt_logprobs` has not
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]
        self.is_finished = False

    def put(self, index: int, delta: RequestDelta) -> None:
        """Add what is new. The reader is woken with others, by `readers`."""
        with self._lock:
            if self.is_finished:  # it was aborted meanwhile
                return
            for output in delta.outputs:
                self._completions[output.index].add(output)
            if delta.scores is not None:
                self._scores.append(delta.scores)
            self._cached = delta.num_cached_tokens
            self._pooled = delta.pooled
            self.is_finished = delta.finished
            self._is_new = True
            waiter = self._waiter
            self._waiter = None
        if waiter is not None:
            assert self.readers is not None, "a request that no host has gets nothing"
            self.readers.add(self._loop, waiter)

    def fail(self, error: Exception) -> None:
        """End the request with an error, which the reader gets after the known output."""
        with self._lock:
            if self.is_finished:
                return
            self.is_finished = True
            self._error = error
            waiter = self._waiter
            self._waiter = None
        if waiter is not None:
            _wake(self._loop, [waiter])

    def end(self, reason: FinishReason) -> None:
        """End the request without an error."""
        with self._lock:
            if self.is_finished:
                return
            for completion in self._completions:
                completion.finish_reason = completion.finish_reason or reason
            self.is_finished = self._is_new = True
            waiter = self._waiter
            self._waiter = None
        if waiter is not None:
            _wake(self._loop, [waiter])

    def check_loop(self) -> None:
        """Raise RequestError in another event loop than the request's."""
        if asyncio.get_running_loop() is not self._loop:
            raise RequestError(
                f"request {self.request_id!r} belongs to the event loop in which its first output was awaited: "
                "await the others there too"
            )

    async def next(self) -> RequestOutput:
        """Wait for something new, and return the whole output so far. Raises the request's error."""
        while True:
            with self._lock:
                if self._is_new:
                    self._is_new = False
                    return self._output()
                if self._error is not None:
                    raise self._error
                waiter = self._waiter = self._loop.create_future()
            await waiter

    def _output(self) -> RequestOutput:
        if self._prompt_logprobs is not None:
            for part in self._scores:
                self._prompt_logprobs += [to_logprobs(entry, self._tokenizer) for entry in part]
            self._scores = []
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[completion.output() for completion in self._completions],
            finished=self.is_finished and self._error is None,
            prompt_logprobs=_copy(self._prompt_logprobs),
            num_cached_tokens=self._cached,
            pooled=self._pooled,
        )
