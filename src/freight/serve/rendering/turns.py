"""Turns: a lock that keys take in turn, so that nobody waits for all that another key has asked for.

Each key has a queue of its own, and the queues are served one after the other. A key may have as
many requests waiting as there are places left, so that a key that comes later always finds some.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class NoTurnError(Exception):
    """Too many requests wait, or too many of this key."""

    def __init__(self, num_waiting: int) -> None:
        super().__init__(num_waiting)
        self.num_waiting = num_waiting


class Turns:
    """A lock. For use within one event loop."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._is_taken = False
        self._num_waiting = 0
        self._queues: OrderedDict[str | None, deque[asyncio.Future[None]]] = OrderedDict()

    async def acquire(self, key: str | None = None) -> None:
        """Wait for a turn, which `release` ends. Raises NoTurnError.

        key: the name of who asks; None, where there are no keys: one may use all places.
        """
        if not self._is_taken:
            self._is_taken = True
            return
        left = self._max_waiting - self._num_waiting
        queued = 0 if key is None else len(self._queues.get(key, ()))
        if left <= queued:
            raise NoTurnError(self._num_waiting)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(key, deque()).append(turn)
        self._num_waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # the turn had come
            else:
                self._leave(key, turn)
            raise

    def release(self) -> None:
        """End the turn; the next key's first request has the next one."""
        if not self._queues:
            self._is_taken = False
            return
        key = next(iter(self._queues))
        turn = self._queues[key][0]
        self._leave(key, turn)
        if key in self._queues:
            self._queues.move_to_end(key)
        turn.set_result(None)

    def _leave(self, key: str | None, turn: asyncio.Future[None]) -> None:
        queue = self._queues[key]
        queue.remove(turn)
        self._num_waiting -= 1
        if not queue:
            del self._queues[key]
