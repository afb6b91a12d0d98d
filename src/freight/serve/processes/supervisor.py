"""Supervisor: an engine's process over time. Starts it, looks for signs of life, starts another where
one ends, and stops it.

What an engine is used for is its owner's business: a server's, or an AsyncLLM's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from freight.base.fields import JsonObject
from freight.cache.events import CacheChanged
from freight.errors import CheckpointError, ConfigError, RankError
from freight.outputs import EngineStats
from freight.serve.processes.client import EngineClient, EngineState, WorkerOptions, describe_exit
from freight.serve.processes.wire import exit_status

logger = logging.getLogger("freight")

_RESTARTS = 3  # so many new engines in so many seconds; more would fail as well
_WITHIN = 600.0


class Owner(Protocol):
    """Who has an engine supervised. All is called within the event loop."""

    async def load(self, client: EngineClient) -> None:
        """A process was started: do what it takes until it is used. Awaits `client.opened` and
        `client.ready`, which are cancelled where the process ends.
        """

    def set_stats(self, stats: EngineStats) -> None: ...

    def observe_step(self, seconds: float, num_tokens: int) -> None: ...

    def set_stalled(self, is_stalled: bool) -> None:
        """Record whether the engine gives no sign of life. Called at every tick."""

    def replaced(self, client: EngineClient) -> None:
        """Use `client`, whose process is started in place of the one that ended."""

    def failed(self, status: int, reason: str) -> None:
        """Give up: no engine will be started. status: the exit status for that."""


class Supervisor:
    """Belongs to one event loop. `client` is the engine of now, also once it has ended."""

    def __init__(
        self,
        options: WorkerOptions,
        owner: Owner,
        restarts: bool = False,
        on_told: Callable[[], None] = lambda: None,
        on_changed: Callable[[CacheChanged], None] = lambda _: None,
    ) -> None:
        """restarts: start another process when one ends or is stalled. on_told, on_changed: of
        EngineClient.
        """
        self._options = options
        self._owner = owner
        self._restarts = restarts
        self._on_told = on_told
        self._on_changed = on_changed
        self._ends: deque[float] = deque(maxlen=_RESTARTS)  # times of processes that were replaced
        self._is_over = False
        self._num_clients = 0
        self.client = self._new_client()

    async def load(self) -> None:
        """Start the process, and have the owner load."""
        client = self.client
        try:
            await client.start()
            await self._owner.load(client)
        except asyncio.CancelledError:
            return  # the engine ended: `_on_end` goes on
        except Exception as error:
            if not isinstance(error, CheckpointError | ConfigError):
                logger.exception("the model cannot be served")
            self._owner.failed(1, str(error))

    async def watch(self) -> None:
        """Look for signs of life until cancelled."""
        while self._options.stall_timeout > 0:
            await asyncio.sleep(self.client.between_ticks)
            client = self.client
            before = client.state
            silent = client.tick(time.monotonic())
            is_stalled = client.state is EngineState.STALLED
            self._owner.set_stalled(is_stalled)
            if is_stalled and before is EngineState.READY:
                waiting = f"{client.num_running} requests wait for it"
                logger.error(
                    "the engine's process has given no sign of life for %.0f s; %s", silent, waiting
                )
                if self._restarts:
                    client.kill()
            elif before is EngineState.STALLED and client.state is EngineState.READY:
                logger.warning("the engine's process gives signs of life again")

    def change_args(self, changed: JsonObject) -> None:
        """Start the engines to come with these fields of EngineArgs."""
        engine_args = {**self._options.engine_args, **changed}
        self._options = replace(self._options, engine_args=engine_args)

    def begin_again(self) -> None:
        """Have another engine for `load`, after `stop`."""
        self._is_over = False
        self.client = self._new_client()
        self._owner.replaced(self.client)

    def expect_end(self) -> None:
        """Ignore the end of the engine from now on."""
        self._is_over = True

    async def stop(self) -> None:
        """End the process, and wait for its end."""
        self.expect_end()
        await self.client.stop()

    def _new_client(self) -> EngineClient:
        owner = self._owner
        self._num_clients += 1
        return EngineClient(
            self._options,
            owner.set_stats,
            owner.observe_step,
            partial(self._on_end, self._num_clients),
            self._on_told,
            self._on_changed,
        )

    def _on_end(self, number: int) -> None:
        """Start another engine after one has ended, or tell the owner that none will be. `number` counts
        engines: one that was stopped may tell its end after the next has begun.
        """
        if self._is_over or number != self._num_clients:
            return
        failure = self.client.failure
        ending = describe_exit(self.client.ended.result())
        # a rank that was lost while the first engine loaded may never come; that of a later one did
        if failure is not None and not (isinstance(failure, RankError) and self._ends):
            self._owner.failed(exit_status(failure), str(failure))
            return
        if failure is not None:
            logger.error("%s", failure)
        now = time.monotonic()
        often = len(self._ends) == _RESTARTS and now - self._ends[0] < _WITHIN
        if not self._restarts or often:
            self._owner.failed(1, f"the engine's process ended with {ending}")
            return
        logger.error("the engine's process ended with %s; another is started", ending)
        self._ends.append(now)
        self.client = self._new_client()
        self._owner.replaced(self.client)
        self._loading = asyncio.get_running_loop().create_task(self.load())
