"""The server's end of an HTTP/1.1 connection: uvicorn's, with limits on what a client sends and how
long it takes.

uvicorn alone accepts headers of any size and number, waits for ever for the rest of a request, and
loses sight of a client that sends a second request while its first one runs. Here a request's head
is collected and checked before it is parsed (`head.py`), the next request is not looked at while
one runs, and each wait has an end. Refusals have OpenAI's envelope. `server_config` is how uvicorn
is to be started.
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

from freight.server.transport.errors import ApiError
from freight.server.transport.head import END_OF_HEAD, read_head, refuse_early
from freight.server.transport.http_limits import HttpLimits as HttpLimits
from freight.server.transport.places import SPARE, asks_for_health, fitted, gives_way, set_options

_log = logging.getLogger(__name__)


_AGAIN = {"Retry-After": "1"}
_FULL = ApiError(503, "too many connections are open; try again", headers=_AGAIN)
_TOO_SLOW = ApiError(
    503, "all connections are taken and this request's body came slowest; try again", headers=_AGAIN
)


class _Output:
    """What uvicorn writes an answer to: the transport, but the end of the connection goes through
    its protocol.
    """

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

    ending      nothing is read or answered any more
    idle_since  time of the event loop at which the last answer ended, or the connection began
    """

    limits = HttpLimits()

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.timeout_keep_alive = cast(
            int, self.limits.idle_seconds
        )  # any number of seconds will do
        self.ending = False
        self.idle_since = self.loop.time()
        self._input = bytearray()  # received and not parsed
        self._body_left: int | None = 0  # bytes of the body to come; None: chunks
        self._body_received = 0
        self._between_chunks = 0  # bytes since the last byte of a body in chunks
        self._head_expected = False
        self._head_done = False
        self._body_begun = self._body_seen = 0.0  # times
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._is_spare = False  # its place is for /health alone, until another one is free

    @property
    def _is_one_too_many(self) -> bool:
        return len(self.connections) > self.limits.max_connections

    @property
    def lingers(self) -> bool:
        """It has its last answer, and waits for nothing but the client to read it."""
        return self.ending and self._read_timer is not None

    @property
    def is_idle(self) -> bool:
        return self.ending or not self.running

    @property
    def body(self) -> tuple[float, int] | None:
        return (self._body_begun, self._body_received) if self._body_left != 0 else None

    def give_way(self) -> None:
        """Leave this place to another connection."""
        if self.ending:
            self._drop()
        elif self.is_idle:
            self.end()
        else:
            self._refuse(_TOO_SLOW)

    @property
    def running(self) -> bool:
        """Whether a request has no complete answer yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        set_options(transport, self.limits)
        self._wait_for_a_request()
        if self._is_one_too_many:
            others = (
                one for one in self.connections if isinstance(one, Connection) and one is not self
            )
            other = gives_way(
                (one for one in others if one.lingers or not one.ending), self.loop.time()
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
            return
        self._unset_keepalive_if_required()
        self._input += data
        self._advance()

    def _advance(self) -> None:
        """Parse what was received, as far as it can be."""
        try:
            while (
                self._input
                and not self.ending
                and (self._take_head() if self._body_left == 0 else self._take_body())
            ):
                pass
        except ApiError as error:
            self._refuse(error)
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "the request is not valid HTTP/1.1"))

    def _take_head(self) -> bool:
        """Parse a head from the input. False: it is not there yet."""
        if self.running:  # its turn comes in on_response_complete
            if len(self._input) > self.limits.head_bytes:
                self._drop()
            return False
        del self._input[
            : len(self._input) - len(self._input.lstrip(b"\r\n"))
        ]  # some clients end a body with an empty line
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
        self._head_expected, self._head_done = True, False
        self._body_received = self._between_chunks = 0
        self.parser.feed_data(head.raw)
        if head.body_bytes != 0:
            self._body_left = head.body_bytes
            self._body_begun = self._body_seen = self.loop.time()
            self._read_timer = self.loop.call_later(self.limits.body_seconds, self._check_body)
        return True

    def _take_body(self) -> bool:
        """Give the parser what the input has of the body."""
        most = (
            self._body_left or self.limits.head_bytes
        )  # of chunks, little enough to see what lies between two
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
        if (
            not self._head_expected
        ):  # after a body in chunks, in the same packet: its head was not checked
            raise ValueError("a request that was not expected")
        self._head_expected = False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if (
            not self._head_done
        ):  # what follows a body in chunks is no header of the request: it was not checked
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
            self.end()  # nobody knows whether the body will come
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
        """Called when the body may be late: ends the request, or says when to look again."""
        now = self.loop.time()
        if self.flow.read_paused:  # the server does not read at present, so the client cannot go on
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
        """Answer what cannot be served, and end the connection."""
        if self.ending or self.transport.is_closing():
            return
        _log.debug("refused: %d %s", error.status, error.message)
        if self.running and self.cycle.response_started:
            self._drop()  # a second answer in the middle of the first would be read as a part of it
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
        self.end(linger=error.status != 503)  # those wait for a free place: hold none

    def end(self, linger: bool | None = None) -> None:
        """Close the connection once all is sent. linger: unread input may be left, by default a
        rest of the body.

        A connection that is closed with unread input is reset, and the client may lose the answer.
        So the answer is followed by an end of the stream, nothing more is read, and the close comes
        a little later.
        """
        if self.ending:
            return
        self.ending = True
        self._unset_keepalive_if_required()
        self._stop_reading_timer()
        self._input.clear()
        linger = self._body_left != 0 if linger is None else linger
        if linger and not self.transport.is_closing():
            self.flow.pause_reading()
            if self.transport.can_write_eof():  # TLS has no half of an end
                self.transport.write_eof()
            self._read_timer = self.loop.call_later(self.limits.linger_seconds, self._drop)
            self.idle_since = 0.0  # the first to give way
        else:
            self._close()
            self._watch_writing()

    def _close(self) -> None:
        if (
            not self.transport.is_closing()
        ):  # asyncio's TLS transport cannot tell its buffer's size if closed twice
            self.transport.close()

    def _drop(self) -> None:
        self.ending = True
        self._stop_reading_timer()
        self._stop_writing_timer()
        self.transport.abort()

    def shutdown(self) -> None:
        """Called by uvicorn when the server ends."""
        if self.running:
            self.cycle.keep_alive = False
        elif self.ending:
            self._close()  # the event loop ends before the time to linger does
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
        """Drop a connection whose client has read nothing since the last look, although something
        waits for it.
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
    """What makes the event loop of the server's process: uvloop's, where it is installed; None:
    asyncio's own.
    """
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module(
        "uvloop"
    ).new_event_loop
    return factory


def server_config(app: Any, limits: HttpLimits, drain_seconds: int | None = None) -> uvicorn.Config:
    """How uvicorn runs `app`, for `uvicorn.Server(...).serve(sockets=[...])`.

    No lifespan, no WebSocket, no trust in X-Forwarded-*, no `Server` header, logging untouched. No
    more connections than the limit on open files of this process (RLIMIT_NOFILE) leaves room for.
    `drain_seconds`: how long answers may go on after the server was asked to end; None: until they
    are done.
    """
    given = fitted(limits)

    class Limited(Connection):
        limits = given

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
