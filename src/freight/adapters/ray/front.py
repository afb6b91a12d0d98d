"""Front: what clients talk to. It sends each request to a replica, and again to another one while nothing
of its answer has gone out.

It is an ASGI application without routes: every answer, header and error is a replica's. Its own errors
are those that no replica could send, in the form of the path's API.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from freight.adapters.ray.cut import cut_events
from freight.adapters.ray.passing import AWAY, ENDED, Request, is_complete, plain_scope
from freight.adapters.ray.prompts import prefix_keys
from freight.base.fields import JsonObject
from freight.serve.transport.body import Receive
from freight.serve.transport.errors import ApiError
from freight.serve.transport.http_limits import HttpLimits
from freight.serve.transport.middleware import (
    App,
    Errors,
    Message,
    RequestIds,
    Scope,
    Send,
    header,
)

logger = logging.getLogger("freight")

# A request that ends every engine that computes it must not end them all.
MOST_LOSSES = 4
_FIRST_WAIT = 0.05  # seconds before a request is sent again; each doubles
_LONGEST_WAIT = 1.0
_LARGE = 1 << 16  # bytes: parsing a larger body takes longer than other requests should wait
_CREDENTIALS = (b"authorization", b"x-api-key")


class ReplicaLostError(Exception):
    """The replica ended, or cannot be reached, before its answer was complete."""


class NoReplicaError(Exception):
    """There is no replica, and none is coming."""


class Replicas(Protocol):
    """Where requests go."""

    def send(self, request: Request) -> AsyncGenerator[list[Message], None]:
        """Send a request to a replica, once there is one; yields the groups of `passing.answer`.

        Raises ReplicaLostError, NoReplicaError. Closing the generator is a client that leaves.
        """


def front(replicas: Replicas, limits: HttpLimits, keyed: bool) -> App:
    """Build the ASGI application.

    keyed  each API key has a part of the prefix cache of its own
    """
    return RequestIds(Errors(Front(replicas, limits, keyed)))


class Front:
    """Reads a request, sends it to a replica, passes the answer on."""

    def __init__(self, replicas: Replicas, limits: HttpLimits, keyed: bool) -> None:
        self._replicas = replicas
        self._limits = limits
        self._keyed = keyed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        declared = header(scope, b"content-length") or b""
        most = self._limits.body_bytes
        # one that says how large it is is refused for that, before it comes
        is_larger = declared.isdigit() and (len(declared) > 18 or int(declared) > most)
        content = b"" if is_larger else await _read(receive, most)
        if content is None:
            return
        request, body = await self._understood(scope, content)
        answering = asyncio.ensure_future(self._answer(request, body, send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            is_answered = answering.done()
            answering.cancel()
            await asyncio.wait((answering, leaving))
        if is_answered:
            answering.result()

    async def _understood(self, scope: Scope, content: bytes) -> tuple[Request, JsonObject]:
        """Return the request for a replica, and its body as far as it is JSON."""
        request_id = scope["state"]["request_id"].encode()
        headers = [(bytes(key), bytes(value)) for key, value in scope["headers"]]
        headers = [pair for pair in headers if pair[0] != b"x-request-id"]
        headers.append((b"x-request-id", request_id))  # so that both logs have the same
        request = Request(plain_scope(scope, headers), content)
        if scope["method"] != "POST":
            return request, {}
        credential = b""
        if self._keyed:
            credential = b"\0".join(header(scope, name) or b"" for name in _CREDENTIALS)
        if len(content) <= _LARGE:
            body, request.keys = _parsed(content, credential)
        else:
            body, request.keys = await asyncio.to_thread(_parsed, content, credential)
        return request, body

    async def _answer(self, request: Request, body: JsonObject, send: Send) -> None:
        losses = 0
        wait = _FIRST_WAIT
        while True:
            passed = _Passed(send)
            try:
                if await self._try(request, passed):
                    return
            except NoReplicaError:
                raise _no_replica() from None
            except ReplicaLostError:
                losses += 1
                if passed.has_begun:
                    events = cut_events(
                        request.scope["path"], body, passed.first, passed.last, _ended()
                    )
                    await passed.end(events)
                    return
                if losses == MOST_LOSSES:
                    raise _ended() from None
                logger.warning("a replica ended before it had answered: its request is sent again")
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    async def _try(self, request: Request, passed: _Passed) -> bool:
        """Send the request to a replica and pass its answer on; False if it does not serve now.

        Raises ReplicaLostError, NoReplicaError.
        """
        async with aclosing(self._replicas.send(request)) as groups:
            async for group in groups:
                if group[0]["type"] == AWAY:
                    return False
                if group[0]["type"] == ENDED:
                    break
                await passed.on(group)
                if is_complete(group[-1]):
                    return True
        raise ReplicaLostError


@dataclass
class _Passed:
    """What has gone out of an answer: the beginning and the end of it are kept."""

    send: Send
    has_begun: bool = False
    first: bytes = b""
    last: bytes = b""

    async def on(self, group: list[Message]) -> None:
        """Pass on messages."""
        self.has_begun = True
        self.last = b"".join(message.get("body", b"") for message in group)
        self.first = self.first or self.last
        for message in group:
            await self.send(message)

    async def end(self, events: bytes) -> None:
        """End a stream that was cut."""
        await self.send({"type": "http.response.body", "body": events, "more_body": False})


def _parsed(content: bytes, credential: bytes) -> tuple[JsonObject, list[bytes]]:
    """Return a body and the keys of its prompt. A replica says what is wrong with one that is no
    JSON.
    """
    try:
        body = json.loads(content)
        if isinstance(body, dict):
            return body, prefix_keys(body, credential)
    except (ValueError, RecursionError):
        pass
    return {}, []


async def _read(receive: Receive, most: int) -> bytes | None:
    """Return a request's body; None if the client has left. Of one that is too large, return as much
    as a replica needs to refuse it.
    """
    content = bytearray()
    more = True
    while more and len(content) <= most:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        content += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(content[: most + 1])


async def _left(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


def _ended() -> ApiError:
    return ApiError(503, "the replica that computed this answer has ended", code="engine_ended")


def _no_replica() -> ApiError:
    return ApiError(
        503,
        "no replica serves, and none is coming; the server's log has the cause",
        code="no_replica",
        headers={"Retry-After": "5"},
    )
