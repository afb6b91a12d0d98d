"""What the page talks to in its tests: the paths that it asks for, answered from a script that a
test writes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from freight.serve.page import page_response

STATE: dict[str, Any] = {
    "running": 3,
    "waiting": 1,
    "cache": {
        "format": "fp8_e4m3",
        "capacity_tokens": 65536,
        "held_tokens": 18432,
        "reusable_tokens": 9216,
        "equivalent_16bit_tokens": 32768,
    },
    "prefix_hit_rate": 0.63,
    "prompt_tokens_per_s": 1893.2,
    "generated_tokens_per_s": 412.4,
    "saturated_values": 0,
    "nan_values": 0,
    "preemptions": 2,
    "model": "demo",
    "kv_cache_dtype": "fp8_e4m3",
    "uptime_s": 8040,
}

Send = Callable[[str], None]


def data(value: object) -> str:
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n"


def chunk(
    content: str | None = None, finish: str | None = None, usage: int | None = None, **delta: Any
) -> str:
    """One event of a chat stream; `usage` is the number of generated tokens so far."""
    if content is not None:
        delta["content"] = content
    value: dict[str, Any] = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    if usage is not None:
        details = {"cached_tokens": 8}
        value["usage"] = {
            "prompt_tokens": 12,
            "completion_tokens": usage,
            "prompt_tokens_details": details,
        }
    return data(value)


def answer(*texts: str) -> Callable[[Send], None]:
    """A script that streams `texts` as a chat answer, whole and in order."""

    def play(send: Send) -> None:
        send(chunk("", role="assistant") + ": keep-alive\n\n")
        for i, text in enumerate(texts, 1):
            send(chunk(text, usage=i))
        send(chunk(finish="stop", usage=len(texts)) + data("[DONE]"))

    return play


@dataclass
class Fake:
    """The server's behaviour, and what it saw. `play` sends the events of the next answer."""

    play: Callable[[Send], None] = field(default_factory=lambda: answer("Hello"))
    state: dict[str, Any] = field(default_factory=lambda: dict(STATE))
    key: str | None = None
    refusal: tuple[int, str] | None = None  # the status and message of every answer
    health: int = 200
    chat: bool = True
    streams: bool = True  # whether /state/stream exists
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    gone: threading.Event = field(
        default_factory=threading.Event
    )  # the client closed an answer's connection
    ended: threading.Event = field(
        default_factory=threading.Event
    )  # the test is over, or the server goes away
    changed: threading.Event = field(default_factory=threading.Event)  # /state/stream sends at once


class Handler(BaseHTTPRequestHandler):
    """One connection per request: an answer ends by closing it."""

    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def reply_json(self, status: int, value: object) -> None:
        self.reply(status, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def stream(self) -> Send:
        self.reply(200, b"", **{"Content-Type": "text/event-stream"})
        return lambda text: (self.wfile.write(text.encode()), self.wfile.flush())[0]

    def refused(self) -> bool:
        fake = self.server.fake
        self.server.fake.keys.append(self.headers.get("Authorization"))
        if fake.key is None or self.headers.get("Authorization") == f"Bearer {fake.key}":
            return False
        self.reply_json(401, {"error": {"message": "This server needs a key."}})
        return True

    def do_GET(self) -> None:
        fake = self.server.fake
        page = page_response(self.path, self.headers.get("If-None-Match"))
        if page:
            self.reply(page.status, page.body, **page.headers)
        elif self.path == "/health":
            self.reply(fake.health, b"")
        elif self.refused():
            pass
        elif self.path == "/v1/models":
            self.reply_json(
                200,
                {
                    "object": "list",
                    "data": [{"id": "demo", "object": "model", "max_model_len": 8192}],
                },
            )
        elif self.path == "/info":
            self.reply_json(
                200, {"model_id": "demo", "chat": fake.chat, "defaults": {"temperature": 0.7}}
            )
        elif self.path == "/state":
            self.reply_json(200, fake.state)
        elif self.path == "/state/stream" and fake.streams:
            self.follow(fake)
        else:
            self.reply_json(404, {"error": {"message": "Not found."}})

    def follow(self, fake: Fake) -> None:
        send = self.stream()
        try:
            while not fake.ended.is_set():
                send(data(fake.state))
                fake.changed.wait(1)
                fake.changed.clear()
        except OSError:  # the page was closed
            pass

    def do_POST(self) -> None:
        fake = self.server.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refused():
            return
        fake.bodies.append((self.path, body))
        if fake.refusal:
            status, message = fake.refusal
            self.reply_json(status, {"error": {"message": message}})
            return
        try:
            fake.play(self.stream())
        except OSError:
            fake.gone.set()


class Server(ThreadingHTTPServer):
    """On a free port of 127.0.0.1; `fake` is exchanged between tests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fake = Fake()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.fake.ended.set()
            server.shutdown()
            thread.join()
