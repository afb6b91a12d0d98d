"""A real server in a thread, and a client that sends bytes as they are: what the tests of HTTP
share.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from freight.serve.transport.http import server_config
from freight.serve.transport.http_limits import HttpLimits
from freight.serve.transport.tls import Server

QUICK = HttpLimits(
    head_seconds=0.2, body_seconds=0.2, body_total=1.0, write_seconds=0.3, linger_seconds=0.2
)
GET = b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n"


def post(body: bytes = b"", *headers: str, path: str = "/x", host: str = "localhost") -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", *headers]
    if not any(
        header.lower().startswith(("transfer-encoding", "content-length")) for header in headers
    ):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def in_time(attempt: Callable[[], bool]) -> bool:
    """Whether an attempt succeeds that fails where this machine stands still for longer than a
    server's limit.
    """
    return any(attempt() for _ in range(20))


@dataclass
class Answer:
    """What came on a connection: the first response, and whether the server closed the connection."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def error(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.body)["error"]
        return value


class Client:
    def __init__(
        self, port: int, timeout: float = 300.0, tls: ssl.SSLContext | None = None
    ) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        self.file = self.socket.makefile("rb")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
            self.socket.sendall(data)

    def read(self) -> Answer:
        """One response. Raises EOFError where the connection ends without one."""
        line = self.file.readline()
        if not line:
            raise EOFError
        status = int(line.split()[1])
        headers = {}
        while (line := self.file.readline().strip()) != b"":
            name, _, value = line.decode("latin-1").partition(": ")
            headers[name.lower()] = value
        if "content-length" in headers:
            return Answer(status, headers, self.file.read(int(headers["content-length"])))
        body = b""
        while size := int(self.file.readline() or b"0", 16):
            body += self.file.read(size)
            self.file.readline()
        self.file.readline()
        return Answer(status, headers, body)

    def ask(self, data: bytes) -> Answer:
        self.send(data)
        return self.read()

    def ended(self) -> bool:
        """Whether the server ends the connection, or has, within the timeout."""
        try:
            return self.file.read(1) == b""
        except (ConnectionResetError, ssl.SSLEOFError):
            return True
        except TimeoutError:
            return False


@dataclass
class Running:
    port: int
    server: uvicorn.Server

    def client(self, timeout: float = 300.0) -> Client:
        return Client(self.port, timeout)

    def ask(self, data: bytes) -> Answer:
        with self.client() as client:
            return client.ask(data)


@contextlib.contextmanager
def running(
    app: Any,
    limits: HttpLimits | None = None,
    loop: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[Running]:
    """`app` behind a server on a free port of 127.0.0.1; ended at exit."""
    config = server_config(app, limits or HttpLimits(), drain_seconds=1)
    config.loop = loop or config.loop
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    server = Server(config, limits or HttpLimits(), tls)
    ready = threading.Event()

    async def serve() -> None:
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        ready.set()
        await task
        for connection in list(server.server_state.connections):  # accepted while the server ended
            connection.transport.abort()
        await asyncio.sleep(0)

    def run() -> None:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(300)
    try:
        yield Running(listener.getsockname()[1], server)
    finally:
        server.should_exit = True
        thread.join(300)
        listener.close()
        assert not thread.is_alive()


@dataclass
class Echo:
    """An app that reads the body and answers with facts about the request; it remembers what it
    saw.
    """

    seen: list[dict[str, Any]] = field(default_factory=list)
    received: int = 0
    disconnects: int = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.seen.append(scope)
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnects += 1
                return
            self.received += len(message.get("body", b""))
            if not message.get("more_body"):
                break
        body = json.dumps(
            {"path": scope["path"], "headers": len(scope["headers"]), "received": self.received}
        ).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def until_disconnect(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
