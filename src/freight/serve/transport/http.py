"""HTTP/1.1 connections: uvicorn's protocol, with limits on sizes and times.

uvicorn alone accepts headers of any size and number, waits for ever for the rest of a request, and
does not notice that a client leaves after it has sent a second request. Here a request's head is
collected and checked before it is parsed (`head.py`), the next request is not read while one runs,
and every wait has a time limit. Refusals have OpenAI's envelope. `server_config` builds the
configuration for uvicorn.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
from collections.abc import Callable
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from freight.base.fields import JsonDict
from freight.serve.transport.errors import ApiError
from freight.serve.transport.head import END_OF_HEAD, read_head, refuse_early
from freight.serve.transport.http_limits import HttpLimits as HttpLimits
from freight.serve.transport.places import SPARE, asks_for_health, fitted, gives_way, set_options

_log = logging.getLogger(__name__)


_BODIES_DROPPED = 4  # as many times the limit of a body is read of a client that goes on sending
_AGAIN = {"Retry-After": "1"}
_FULL = ApiError(503, "too many connections are open; try again", headers=_AGAIN)
_TOO_SLOW = ApiError(
    503, "all connections are taken and this request's body came slowest; try again", headers=_AGAIN
)


class _Output:
    """The transport for uvicorn's answers. Closing it goes through the protocol."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        if not self._connection.ending:
            self._connection.transport.write(data)

    def close(self) -> None:
        self._connection.end()

    def is_closing(self) -> bool:
        return self._connection.ending or self._connection.transport.is_closing()


class Connection(HttpToolsProtocol):
    """One connection. `limits` is set by the subclass that `server_config` makes.

    ending      True once nothing more is read or answered
    idle_since  when the last answer ended, or the connection began, in the event loop's time
    """

    limits = HttpLimits()

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: JsonDict,
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        # uvicorn declares an int; a float works.
        self.timeout_keep_alive = cast(int, self.limits.idle_seconds)
        self.ending = False
        self.idle_since = self.loop.time()
        self._input = bytearray()  # received and not parsed
        self._body_left: int | None = 0  # bytes of the body to come; None: chunks
        self._body_received = 0
        self._dropped = 0  # bytes that came behind the end
        self._between_chunks = 0  # bytes of chunk framing since the last byte of the body
        self._head_expected = False
        self._head_done = False
        self._body_begun = self._body_seen = 0.0  # times
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._is_spare = False  # holds a spare place, for /health alone, until another is free

    @property
    def _is_one_too_many(self) -> bool:
        return len(self.connections) > self.limits.max_connections

    @property
    def lingers(self) -> bool:
        """True while the last answer is sent and only the client's reading is awaited."""
        return self.ending and self._read_timer is not None

    @property
    def is_idle(self) -> bool:
        return self.ending or not self.running

    @property
    def body(self) -> tuple[float, int] | None:
        return (self._body_begun, self._body_received) if self._body_left != 0 else None

    def give_way(self) -> None:
        """Free this place for another connection."""
        if self.ending:
            self._drop()
        elif self.is_idle:
            self.end()
        else:
            self._refuse(_TOO_SLOW)

    @property
    def running(self) -> bool:
        """True while a request has no complete answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        set_options(transport, self.limits)
        self._wait_for_a_request()
        if self._is_one_too_many:
            open_connections = (
                peer
                for peer in self.connections
                if isinstance(peer, Connection) and peer is not self
            )
            other = gives_way(
                (peer for peer in open_connections if peer.lingers or not peer.ending),
                self.loop.time(),
            )
            if other is not None:
                other.give_way()
            elif len(self.connections) > self.limits.max_connections + SPARE:
                self._refuse(_FULL)
            else:
                self._is_spare = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.ending = True
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_reading_timer()
        self._stop_writing_timer()

    def data_received(self, data: bytes) -> None:
        if self.ending:
            self._dropped += len(data)
            if self._dropped > _BODIES_DROPPED * self.limits.body_bytes:
                self.flow.pause_reading()
            return
        self._unset_keepalive_if_required()
        self._input += data
        self._advance()

    def _advance(self) -> None:
        """Parse the received bytes as far as possible."""
        try:
            while self._input and not self.ending:
                take = self._take_head if self._body_left == 0 else self._take_body
                if not take():
                    break
        except ApiError as error:
            self._refuse(error)
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "the request is not valid HTTP/1.1"))

    def _take_head(self) -> bool:
        """Parse a head from the input; returns False if it is not complete yet."""
        if self.running:  # on_response_complete goes on with the next request
            if len(self._input) > self.limits.head_bytes:
                self._drop()
            return False
        # Some clients end a body with an empty line.
        del self._input[: len(self._input) - len(self._input.lstrip(b"\r\n"))]
        if not self._input:
            self._wait_for_a_request()
            return False
        end = self._input.find(END_OF_HEAD)
        if end < 0:
            refuse_early(bytes(self._input), self.limits)
            self._read_timer = self._read_timer or self.loop.call_later(
                self.limits.head_seconds, self._head_is_late
            )
            return False
        head = read_head(bytes(self._input[: end + len(END_OF_HEAD)]), self.limits)
        del self._input[: end + len(END_OF_HEAD)]
        self._is_spare = self._is_spare and self._is_one_too_many
        if self._is_spare and not asks_for_health(head.raw, head.body_bytes != 0):
            raise _FULL
        self._stop_reading_timer()
        self._head_expected = True
        self._head_done = False
        self._body_received = self._between_chunks = 0
        self.parser.feed_data(head.raw)
        if head.body_bytes != 0:
            self._body_left = head.body_bytes
            self._body_begun = self._body_seen = self.loop.time()
            self._read_timer = self.loop.call_later(self.limits.body_seconds, self._check_body)
        return True

    def _take_body(self) -> bool:
        """Feed the received part of the body to the parser."""
        # Chunks are fed in small parts, so that the bytes between two of them can be counted.
        most = self._body_left or self.limits.head_bytes
        size = min(most, len(self._input))
        part = bytes(self._input[:size])
        del self._input[:size]
        if self._body_left is not None:
            self._body_left -= size
        self._between_chunks += size
        self.parser.feed_data(part)
        if self._body_left is None and self._between_chunks > self.limits.head_bytes:
            raise ApiError(
                400, f"the body has more than {self.limits.head_bytes} bytes between two chunks"
            )
        if self.cycle.response_complete and self._body_received > self.limits.body_bytes:
            self.end()
        return True

    def on_message_begin(self) -> None:
        # A request behind a chunked body in the same bytes: its head was not checked.
        if not self._head_expected:
            raise ValueError("a request that was not expected")
        self._head_expected = False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers behind a chunked body are dropped: they were not checked.
        if not self._head_done:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_done = True
        super().on_headers_complete()
        self.cycle.transport = cast(asyncio.Transport, _Output(self))

    def on_body(self, body: bytes) -> None:
        self._body_received += len(body)
        self._between_chunks = 0
        self._body_seen = self.loop.time()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._body_left = 0
        self._stop_reading_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.idle_since = self.loop.time()
        if not self.ending and self._body_left != 0 and self.expect_100_continue:
            self.end()  # the client may or may not send the body, so the connection is unusable
        if self.ending:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if self._input:
            self.loop.call_soon(self._advance)

    def _head_is_late(self) -> None:
        self._refuse(
            ApiError(
                408, f"the request's headers did not come within {self.limits.head_seconds:g} s"
            )
        )

    def _check_body(self) -> None:
        """End a request whose body is late, or set the timer for the next check."""
        now = self.loop.time()
        if self.flow.read_paused:  # the server is not reading, so the client cannot send
            self._body_seen = now
        left = min(
            self._body_seen + self.limits.body_seconds - now,
            self._body_begun + self.limits.body_total - now,
        )
        if left > 0:
            self._read_timer = self.loop.call_later(left, self._check_body)
        elif self.running:
            self._refuse(ApiError(408, "the request's body did not come in time"))
        else:
            self.end()

    def _refuse(self, error: ApiError) -> None:
        """Send an error and end the connection."""
        if self.ending or self.transport.is_closing():
            return
        _log.debug("refused: %d %s", error.status, error.message)
        if self.running and self.cycle.response_started:
            self._drop()  # an error inside the running answer would be read as a part of it
            return
        if self.running:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = json.dumps(error.openai_body()).encode()
        headers = {
            **error.headers,
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
        }
        lines = [name + b": " + value for name, value in self.server_state.default_headers]
        lines += [f"{name}: {value}".encode("latin-1") for name, value in headers.items()]
        self.transport.write(STATUS_LINE[error.status] + b"\r\n".join(lines) + END_OF_HEAD + body)
        self.end(linger=error.status != 503)  # after a 503 the place is needed: do not linger

    def end(self, linger: bool | None = None) -> None:
        """Close the connection once everything is sent.

        linger  delay the close, for unread input; by default if the body is incomplete

        Closing a connection with unread input resets it, and the client may lose the answer; many
        clients read it only once their whole body is sent. So the write side is shut down first,
        what comes is read and dropped, and the close comes once nothing came for `linger_seconds`.
        """
        if self.ending:
            return
        self.ending = True
        self._unset_keepalive_if_required()
        self._stop_reading_timer()
        self._input.clear()
        linger = self._body_left != 0 if linger is None else linger
        if linger and not self.transport.is_closing():
            self.flow.resume_reading()
            if self.transport.can_write_eof():  # TLS cannot be half-closed
                self.transport.write_eof()
            latest = self.loop.time() + self.limits.body_seconds
            self._linger(self._dropped, latest)
            self.idle_since = 0.0  # the first to give way
        else:
            self._close()
            self._watch_writing()

    def _linger(self, dropped: int, latest: float) -> None:
        """Close the connection in `linger_seconds`, or later if more than `dropped` bytes came by
        then, but not after `latest`.
        """

        def check() -> None:
            if self._dropped > dropped and self.loop.time() < latest:
                self._linger(self._dropped, latest)
            else:
                self._drop()

        self._read_timer = self.loop.call_later(self.limits.linger_seconds, check)

    def _close(self) -> None:
        # asyncio's TLS transport, closed twice, fails when it is asked for its buffer's size.
        if not self.transport.is_closing():
            self.transport.close()

    def _drop(self) -> None:
        self.ending = True
        self._stop_reading_timer()
        self._stop_writing_timer()
        self.transport.abort()

    def shutdown(self) -> None:
        """Close the connection, after the running answer. uvicorn calls it when the server ends."""
        if self.running:
            self.cycle.keep_alive = False
        elif self.ending:
            self._close()  # the event loop ends before linger_seconds have passed
        else:
            self.end(linger=False)

    def timeout_keep_alive_handler(self) -> None:
        self.end()

    def _wait_for_a_request(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.ending:
            self._stop_writing_timer()

    def _watch_writing(self) -> None:
        if self._write_timer is None:
            self._unsent = self.transport.get_write_buffer_size()
            self._write_timer = self.loop.call_later(self.limits.write_seconds, self._check_writing)

    def _check_writing(self) -> None:
        """Drop the connection if its client has read nothing since the last check, although data is
        waiting.
        """
        self._write_timer = None
        unsent = self.transport.get_write_buffer_size()
        if unsent >= self._unsent > 0:
            self._drop()
        elif unsent:
            self._watch_writing()

    def _stop_reading_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _stop_writing_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the factory of the server's event loop: uvloop's, if it is installed; None for
    asyncio's own.
    """
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module(
        "uvloop"
    ).new_event_loop
    return factory


def server_config(app: Any, limits: HttpLimits, drain_seconds: int | None = None) -> uvicorn.Config:
    """Return uvicorn's configuration for `app`, for `uvicorn.Server(...).serve(sockets=[...])`.

    No lifespan, no WebSocket, no trust in X-Forwarded-*, no `Server` header, logging untouched. No
    more connections than the limit on open files of this process (RLIMIT_NOFILE) leaves room for.
    `drain_seconds`: the time for running answers after the server was asked to end; None: no limit.
    """
    http_limits = fitted(limits)

    class Limited(Connection):
        limits = http_limits

    return uvicorn.Config(
        app,
        http=Limited,
        loop="none",
        ws="none",
        interface="asgi3",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=drain_seconds,
    )
