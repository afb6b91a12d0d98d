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
import time
from collections.abc import Callable, Mapping
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
        # bytes to come of the body, or of this chunk; None: up to the connection's end
        self._left: int | None = None
        self._chunked = False
        self._state = "head"

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection can take another request."""
        closing = self.headers.get("connection", "").lower() == "close"
        return self.complete and not closing and (self._chunked or "content-length" in self.headers)

    def feed(self, data: bytes) -> bytes:
        """Take more bytes; returns what is new of the body. Raises StreamError where the framing is
        broken.
        """
        self._buffer = self._buffer + data if self._buffer else data
        while self._state == "head":
            if not self._read_head():
                return b""
        if self._chunked:
            return self._read_chunks()
        body = self._buffer
        self._buffer = b""
        if self._left is not None:
            if len(body) > self._left:
                raise StreamError("malformed", "the answer is longer than its Content-Length")
            self._left -= len(body)
            self.complete = self._left == 0
        return body

    def close(self) -> None:
        """Take note that the connection ended. Raises StreamError where the answer is incomplete."""
        if self.complete:
            return
        if self._state == "head":
            raise StreamError("closed", "the connection was closed before an answer")
        if self._chunked or self._left is not None:
            raise StreamError("closed", "the connection was closed in the middle of an answer")
        self.complete = True

    def _read_head(self) -> bool:
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        if not end or len(head) > MAX_HEAD:
            if len(head) > MAX_HEAD:
                raise StreamError(
                    "malformed", f"the answer's headers are longer than {MAX_HEAD} bytes"
                )
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise StreamError("malformed", f"the answer is not HTTP: it begins with {first[:40]!r}")
        self._buffer = body
        if words[1].startswith("1"):  # such as 100 Continue: the answer itself follows
            return True
        self.status = int(words[1])
        self.headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        length = self.headers.get("content-length")
        if not self._chunked and length is not None:
            if not length.isdigit():
                raise StreamError("malformed", f"Content-Length is {length!r}")
            self._left = int(length)
            self.complete = self._left == 0
        self._state = "body"
        return True

    def _read_chunks(self) -> bytes:
        out = []
        while self._state != "end":
            if self._left:
                part = self._buffer[: self._left]
                self._buffer = self._buffer[len(part) :]
                self._left -= len(part)
                out.append(part)
                if self._left:
                    break
                self._state = "chunk end"
            line, end, buffer = self._buffer.partition(b"\r\n")
            if not end:
                if len(line) > MAX_HEAD:
                    raise StreamError("malformed", "a chunk has no length")
                break
            self._buffer = buffer
            if self._state == "chunk end":
                if line:
                    raise StreamError("malformed", "a chunk is longer than its length")
                self._state = "body"
            elif self._state == "trailer":
                if not line:
                    self._state = "end"
                    self.complete = True
            else:
                self._left = _chunk_length(line)
                if self._left == 0:
                    self._state = "trailer"
        return b"".join(out)


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
        buffer = self._buffer + data if self._buffer else data
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
            if block.startswith(b"data: ") and b"\n" not in block:  # nearly all
                events.append(block[6:])
                continue
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
