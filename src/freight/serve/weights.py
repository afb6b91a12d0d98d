"""The weights of a server while it runs: which requests wait for a change, and which end by it.

A change happens while no request is in the engine, so an answer is of one version from its first token
to its last, and `system_fingerprint` states that version. Requests that come meanwhile wait here,
before they are sent; those that run finish first, or end, as the change asks.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from freight.engine.messages import Action
from freight.errors import FreightError, shown
from freight.serve.engine_errors import from_engine
from freight.serve.processes.client import EngineClient, NotReadyError
from freight.serve.transport.errors import ApiError, took_too_long

logger = logging.getLogger("freight")

T = TypeVar("T")

_LOOK_EVERY = 0.005  # seconds between looks at what still runs


class PauseMode(StrEnum):
    """What becomes of the requests that run: they end with an error, finish first, or stand still."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class Paused(Protocol):
    """What a change needs of the server."""

    client: EngineClient
    draining: bool
    max_sequences: int

    def cut_answers(self, error: ApiError) -> None:
        """Fail the answers that would submit further requests."""

    def weights_changed(self) -> None:
        """Show what the engine has now."""


class ServedWeights:
    """Pauses a server, and changes the weights of its engine. It belongs to one event loop.

    version  the trainer's name of the weights of now; "default": those of the start
    paused   how requests were paused; None: they are served
    """

    def __init__(self, server: Paused) -> None:
        self.version = "default"
        self.paused: PauseMode | None = None
        # has an engine that is started in place of another load the weights of now
        self.on_update: Callable[[str], None] = lambda model: None
        self._server = server
        self._lock = asyncio.Lock()  # one change at a time
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._num_waiting = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def sleep_level(self) -> int:
        """How deep the engine sleeps."""
        return self._server.client.sleep_level

    async def settle(self, seconds: float | None = None) -> None:
        """Wait until requests are served, for `seconds` at most. Raises ApiError: 503 while the engine
        sleeps, 429 where too many wait already.
        """
        if not self._is_open.is_set():
            if self._num_waiting >= self._server.max_sequences:
                raise ApiError(
                    429,
                    f"{self._num_waiting} requests wait for the server to resume; try again later",
                    code="queue_full",
                )
            self._num_waiting += 1
            try:
                await self._opened(seconds)
            finally:
                self._num_waiting -= 1
        if self.sleep_level:
            raise ApiError(
                503,
                f"the model sleeps at level {self.sleep_level}; POST /wake_up wakes it up",
                code="sleeping",
            )

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Serve no requests until `resume`; returns once those that run are dealt with."""
        await self._alone(self._pause(mode, clear_cache))

    async def resume(self) -> None:
        """Serve requests again, and go on with those that stood still."""
        await self._alone(self._resume())

    async def update(self, model: str, version: str | None, abort: bool) -> None:
        """Load other weights of the same model. Raises ApiError where they do not fit, and the old
        ones stay.

        abort: end the requests that run, which finish first otherwise
        """
        await self._alone(self._update(model, version, abort))

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Give memory back; requests are refused until `wake_up`."""
        await self._alone(self._changed(Action.SLEEP, level, mode))
        logger.info("the engine sleeps at level %d", level)

    async def wake_up(self, level: int) -> None:
        """Take memory again: level 0 all of it, level 1 that of the weights."""
        await self._alone(self._changed(Action.WAKE_UP, level, PauseMode.WAIT))
        logger.info("the engine is awake")

    async def reset_prefix_cache(self) -> None:
        """Find no block of the cache again."""
        await self._alone(self._send(Action.RESET_PREFIX_CACHE))

    async def _alone(self, change: Coroutine[Any, Any, T]) -> T:
        """Run a change after the others; a client that leaves does not cut it short."""

        async def run() -> T:
            async with self._lock:
                return await change

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _opened(self, seconds: float | None) -> None:
        # no wait_for, which takes a further turn of the loop once this is done: the next change may
        # have begun by then
        end = math.inf
        if seconds is not None:
            end = time.monotonic() + seconds
        while not self._is_open.is_set() and not self._server.draining:
            if time.monotonic() >= end:
                raise took_too_long()
            await asyncio.sleep(_LOOK_EVERY)

    async def _pause(self, mode: PauseMode, clear_cache: bool) -> None:
        await self._thaw()
        self.paused = mode
        self._is_open.clear()
        await self._quiet(mode)
        if clear_cache:
            await self._send(Action.RESET_PREFIX_CACHE)

    async def _resume(self) -> None:
        await self._thaw()
        self.paused = None
        self._is_open.set()

    async def _thaw(self) -> None:
        if self.paused is PauseMode.KEEP:
            await self._send(Action.THAW)
            self.paused = PauseMode.WAIT

    async def _update(self, model: str, version: str | None, abort: bool) -> None:
        mode = PauseMode.WAIT
        if abort:
            mode = PauseMode.ABORT
        await self._changed(Action.UPDATE, model, mode)
        self.version = version or "default"
        self.on_update(model)
        logger.info("weights: %s, version %s", shown(model), shown(self.version))

    async def _changed(self, action: Action, value: str | int, mode: PauseMode) -> None:
        """Change the engine while nothing runs, and serve then as before."""
        count = self._server.client.num_running
        if self.paused is PauseMode.KEEP and count:
            if mode is not PauseMode.ABORT:
                raise ApiError(
                    409,
                    f"{count} requests stand still halfway, and an answer has one version of the weights: resume, or "
                    "abort them (mode=abort, abort_all_requests)",
                    code="requests_kept",
                )
            await self._thaw()
        self._is_open.clear()
        try:
            await self._quiet(mode)
            await self._send(action, value)
        finally:
            if self.paused is None:
                self._is_open.set()

    async def _quiet(self, mode: PauseMode) -> None:
        """Return once no request is computed."""
        if mode is PauseMode.KEEP:
            await self._send(Action.FREEZE)
            return
        client = self._server.client
        if mode is PauseMode.ABORT:
            self._server.cut_answers(_ABORTED)
            await self._send(Action.END_ALL)
        while client.num_running and client is self._server.client:
            await asyncio.sleep(_LOOK_EVERY)

    async def _send(self, action: Action, value: str | int = "") -> None:
        try:
            await self._server.client.change(action, value)
        except NotReadyError as error:
            raise from_engine(error) from None
        except FreightError as error:
            answer = from_engine(error)
            raise ApiError(400, str(error), code=answer.code or "not_changed") from None
        finally:
            self._server.weights_changed()


_ABORTED = ApiError(503, "the request was aborted before its answer was complete", code="aborted")
