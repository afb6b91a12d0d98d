"""A small HTTP/1.1 client for load: one request at a time on each connection, the answer handed on
as it arrives.

Guarantees: every piece of an answer carries the time at which the event loop gave it to this
process, and whatever is wrong with an answer (a refused connection, broken framing, an early end)
is a `StreamError` with its kind, so that it can be counted. It stands here because the load comes
from the cores that the server computes on: per piece of a stream it costs a small part of what a
general client does (figures in docs/benchmarks.md).
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from freight.errors import ConfigError

MAX_HEAD = 2**16  # bytes of a status line and headers
MAX_EVENT = 2**24  # bytes of one event


class StreamError(Exception):
    """What is wrong with an answer. `kind` is a word to count it by, the message is for a person."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Address:
    """Where a server is. `prefix` is what its paths begin with, without a slash at the end."""

    url: str
    host: str
    port: int
    secure: bool
    prefix: str

    @staticmethod
    def parse(url: str) -> Address:
        """Read http://host:port, with or without a path, and with or without the /v1 that clients
        are given.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ConfigError(
                f"--url {url!r} has no valid port: write http://127.0.0.1:8000"
            ) from None
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.query
            or parts.username
        ):
            raise ConfigError(
                f"--url {url!r} is not the address of a server: write http://127.0.0.1:8000"
            )
        secure = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return Address(url, parts.hostname, port or (443 if secure else 80), secure, prefix)

    def head(self, method: str, path: str, num_bytes: int, headers: Mapping[str, str]) -> bytes:
        """Request line and headers."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            f"Content-Length: {num_bytes}",
        ]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class AnswerReader:
    """The bytes of one answer -> status, headers, and its body without framing. Knows nothing of
    time or transport.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self._buffer = b""
        self._body: list[bytes] = []
        self._parts = self._read()

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection can take another request."""
        closing = self.headers.get("connection", "").lower() == "close"
        return self.complete and not closing and self._is_framed

    @property
    def _is_chunked(self) -> bool:
        return self.headers.get("transfer-encoding", "").lower() == "chunked"

    @property
    def _is_framed(self) -> bool:
        return self._is_chunked or "content-length" in self.headers

    def feed(self, data: bytes) -> bytes:
        """Take more bytes; returns what is new of the body. Raises StreamError where the framing is
        broken.
        """
        self._buffer += data
        next(self._parts, None)
        body = b"".join(self._body)
        self._body.clear()
        return body

    def close(self) -> None:
        """Take note that the connection ended. Raises StreamError where the answer is incomplete."""
        if self.complete:
            return
        if not self.status:
            raise StreamError("closed", "the connection was closed before an answer")
        if self._is_framed:
            raise StreamError("closed", "the connection was closed in the middle of an answer")
        self.complete = True

    def _read(self) -> Iterator[None]:
        """Read the parts of an answer in their order; each `yield` waits for more bytes."""
        code = "1"
        while code.startswith("1"):  # such as 100 Continue: the answer itself follows
            code = yield from self._head()
        self.status = int(code)
        if self._is_chunked:
            yield from self._chunks()
        elif self._is_framed:
            length = self.headers["content-length"]
            if not length.isdigit():
                raise StreamError("malformed", f"Content-Length is {length!r}")
            yield from self._pass_on(int(length))
            if self._buffer:
                raise StreamError("malformed", "the answer is longer than its Content-Length")
        else:
            yield from self._pass_on(sys.maxsize)  # up to the connection's end
        self.complete = True

    def _head(self) -> Generator[None, None, str]:
        """Read a status line and headers; returns the status."""
        too_long = f"the answer's headers are longer than {MAX_HEAD} bytes"
        head = yield from self._until(b"\r\n\r\n", too_long)
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise StreamError("malformed", f"the answer is not HTTP: it begins with {first[:40]!r}")
        self.headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        return words[1]

    def _chunks(self) -> Iterator[None]:
        too_long = "a chunk has no length"
        while size := _chunk_length((yield from self._until(b"\r\n", too_long))):
            yield from self._pass_on(size)
            if (yield from self._until(b"\r\n", too_long)):
                raise StreamError("malformed", "a chunk is longer than its length")
        while (yield from self._until(b"\r\n", too_long)):
            pass  # a trailer

    def _until(self, end: bytes, too_long: str) -> Generator[None, None, bytes]:
        """Return what comes before `end`, at most MAX_HEAD bytes."""
        while True:
            part, found_end, buffer = self._buffer.partition(end)
            if len(part) > MAX_HEAD:
                raise StreamError("malformed", too_long)
            if found_end:
                self._buffer = buffer
                return part
            yield

    def _pass_on(self, size: int) -> Iterator[None]:
        """Take `size` bytes of the body."""
        while True:
            part = self._buffer[:size]
            self._buffer = self._buffer[size:]
            self._body.append(part)
            size -= len(part)
            if not size:
                return
            yield


def _chunk_length(line: bytes) -> int:
    digits = line.split(b";")[0].strip()
    try:
        if not digits.isalnum():
            raise ValueError
        return int(digits, 16)
    except ValueError:
        raise StreamError("malformed", f"{line[:20]!r} is not the length of a chunk") from None


class EventReader:
    """The body of a stream of server-sent events -> the data of each."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take more bytes; returns the data of every event that is complete now. Comments and names
        are left out.
        """
        buffer = self._buffer + data
        if b"\r" in buffer:
            if buffer.endswith(b"\r"):  # half of a line's end, perhaps
                self._buffer = buffer
                return []
            buffer = buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *blocks, self._buffer = buffer.split(b"\n\n")
        if len(self._buffer) > MAX_EVENT:
            raise StreamError("malformed", f"an event is longer than {MAX_EVENT} bytes")
        events = []
        for block in blocks:
            lines = [
                line[5:].removeprefix(b" ")
                for line in block.split(b"\n")
                if line.startswith(b"data:")
            ]
            if lines:
                events.append(b"\n".join(lines))
        return events


OnBody = Callable[[bytes, float], None]  # a piece of the body, and when it came (time.perf_counter)


class Connection(asyncio.Protocol):
    """One connection to a server. `Connection.open` makes it, `send` uses it, `reusable` says
    whether it can go on.
    """

    def __init__(self) -> None:
        self.reusable = True
        self.reader = AnswerReader()
        self._transport: asyncio.Transport | None = None
        self._on_body: OnBody = lambda data, now: None
        self._done: asyncio.Future[None] | None = None

    @staticmethod
    async def open(address: Address, seconds: float = 10.0) -> Connection:
        """Raises StreamError of kind "connection"."""
        loop = asyncio.get_running_loop()
        secure = ssl.create_default_context() if address.secure else None
        try:
            made = loop.create_connection(Connection, address.host, address.port, ssl=secure)
            _, connection = await asyncio.wait_for(made, seconds)
        except TimeoutError:
            raise StreamError(
                "connection", f"{address.url} does not answer within {seconds:g} s"
            ) from None
        except OSError as error:  # ssl's errors are OSErrors
            reason = error.strerror or str(error)
            raise StreamError("connection", f"{address.url} cannot be reached: {reason}") from None
        return connection

    async def send(self, request: bytes, on_body: OnBody = lambda data, now: None) -> AnswerReader:
        """Send one request and wait for the end of its answer, whose body goes to `on_body` piece
        by piece.

        Raises StreamError, after which the connection is closed and not reusable; so it is when
        this is cancelled.
        """
        assert self.reusable
        assert self._transport is not None
        self.reader = AnswerReader()
        self._on_body = on_body
        self._done = asyncio.get_running_loop().create_future()
        self.reusable = False
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self._transport.abort()
            raise
        finally:
            self._done = None
        self.reusable = self.reader.keeps_alive and not self._transport.is_closing()
        return self.reader

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's derives from nothing

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._done is None or self._done.done():  # nobody asked: the server is out of step
            self.close()
            return
        try:
            body = self.reader.feed(data)
            if body:
                self._on_body(body, now)
        except StreamError as fault:
            self._done.set_exception(fault)
            return
        if self.reader.complete:
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._done is None or self._done.done():
            return
        try:
            self.reader.close()
        except StreamError as fault:
            self._done.set_exception(fault)
            return
        self._done.set_result(None)
