"""Shares: how many requests one key may have in progress, so that it cannot lock out the others.

A request holds a place for a connection from its head to the end of its answer, whatever it is: a
body that comes slowly, a stream of the state, a completion. A key may have as many in progress as
places are free. So one key alone gets half of all, the next one half of the rest, and a key that
comes later finds some. Where there is one key, or none, nothing is shared.

Bytes of bodies are shared in the same way, and bounded for all together: connections times the limit
of a body would be gigabytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from freight.serve.transport.auth import Keys
from freight.serve.transport.body import Receive
from freight.serve.transport.errors import ApiError

_FREE = 1 << 16  # bytes of a body that are not counted: what is short is always let in
Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Shares:
    """Answers 429 to a request whose key has its share already. Reads what `RequireKey` has put into
    `scope["state"]["key_name"]`; requests without a key are not counted.
    """

    def __init__(self, app: App, keys: Keys, places: int) -> None:
        """places: the number of connections that may be open."""
        self._app = app
        self._keys = keys
        self._places = places
        self._in_progress: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key: str | None = scope.get("state", {}).get("key_name")
        if key is None:
            await self._app(scope, receive, send)
            return
        self._check(key)
        self._in_progress[key] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_progress[key] -= 1

    def _check(self, key: str) -> None:
        if len(self._keys.names) < 2:
            return
        running = self._in_progress[key]
        free = max(self._places - self._in_progress.total(), 0)
        # a key that has none is let in: the connection has a place
        if running > 0 and running >= free:
            raise ApiError(
                429,
                f"{running} requests of this key are in progress, and {free} of the server's {self._places} places are "
                "free; the other keys need them. Try again once one has ended",
                code="key_has_its_share",
                headers={"Retry-After": "1"},
            )


class BodyShares:
    """Counts the bytes of bodies from their receipt to the end of parsing."""

    def __init__(self, keys: Keys, most: int) -> None:
        """most: bytes of all bodies at a time, without the first 64 KiB of each."""
        self._keys = keys
        self._most = most
        self._held: Counter[str | None] = Counter()

    @contextmanager
    def place(self, key: str | None) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes the number of bytes that the request holds, and raises ApiError if
        that is too many: 503, or 429 where the other keys need the rest. At the end the request holds none.
        """
        reserved = 0

        def hold(size: int) -> None:
            nonlocal reserved
            more = max(size - _FREE, 0) - reserved
            self._check(key, more)
            self._held[key] += more
            reserved += more

        try:
            yield hold
        finally:
            self._held[key] -= reserved
            if not self._held[key]:
                del self._held[key]  # a key may be withdrawn

    def _check(self, key: str | None, more: int) -> None:
        if more <= 0:
            return
        free = self._most - self._held.total()
        again = {"Retry-After": "1"}
        if more > free:
            raise ApiError(
                503,
                f"the server holds bodies of {self._held.total()} bytes, and {self._most} are the most; try again",
                headers=again,
            )
        is_shared = key is not None and len(self._keys.names) > 1
        if is_shared and self._held[key] + more > free:
            raise ApiError(
                429,
                f"the server holds bodies of {self._held[key]} bytes of this key, and the other keys need the "
                f"{free} that are free. Try again once one has been read",
                code="key_has_its_share",
                headers=again,
            )
