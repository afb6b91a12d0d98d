"""A server with OpenAI's shapes and no model: streams known tokens at known intervals, and
misbehaves on demand.

It runs in a thread of its own, with a loop of its own, so that the load under test has the test's
thread to itself.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

REFUSED = b'{"error": {"message": "no such field: %s", "type": "invalid_request_error", "param": null, "code": null}}'


@dataclass
class StandIn:
    """How the server behaves.

    gap          seconds before each event
    per_event    tokens of each event
    refuses      fields of the body that it answers with 400
    fault        what goes wrong in each stream: "", "no_done", "error_event", "malformed",
                 "closed", "bad_chunk", "empty", "no_usage", "hang"
    status       of each answer; other than 200 it is an error
    hangs_up     closes an idle connection after each answer, without saying so
    count        tokens of a text
    cached       tokens of each prompt that came from a prefix cache; None: not said
    key          that every request must have
    """

    gap: float = 0.0
    per_event: int = 1
    refuses: tuple[str, ...] = ()
    fault: str = ""
    status: int = 200
    hangs_up: bool = False
    key: str = ""
    vocab_size: int | None = None
    count: Callable[[str], int] = lambda text: len(text) // 4
    cached: int | None = None
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_connections: int = 0
    at_once: int = 0
    most_at_once: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self.one(reader, writer):
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client left, or the test is over
        finally:
            writer.close()

    async def one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = {
            line.split(":")[0].lower(): line.partition(":")[2].strip()
            for line in head.split("\r\n")[1:]
            if line
        }
        body = await reader.readexactly(int(fields.get("content-length", "0")))
        method, path, _ = head.split(" ", 2)
        if self.key and fields.get("authorization") != f"Bearer {self.key}":
            self.plain(writer, 401, b'{"error": {"message": "wrong key"}}')
        elif method == "GET":
            self.get(writer, path)
        else:
            await self.post(writer, path, json.loads(body))
        return not (self.hangs_up or self.fault)

    def plain(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))

    def get(self, writer: asyncio.StreamWriter, path: str) -> None:
        found: dict[str, Any] = {
            "/v1/models": {"object": "list", "data": [{"id": "stand-in", "object": "model"}]},
            "/tokenizer_info": {"vocab_size": self.vocab_size},
        }
        if path in found:
            self.plain(writer, 200, json.dumps(found[path]).encode())
        else:
            self.plain(writer, 404, b'{"error": {"message": "no such path"}}')

    async def post(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> None:
        given = {*body, *body.get("stream_options", {})}
        for name in self.refuses:
            if name in given:
                self.plain(writer, 400, REFUSED % name.encode())
                return
        self.bodies.append(body)
        if self.status != 200:
            self.plain(writer, self.status, b'{"error": {"message": "not now"}}')
            return
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            await self.stream(writer, path.endswith("chat/completions"), body)
        finally:
            self.at_once -= 1

    async def stream(
        self, writer: asyncio.StreamWriter, is_chat: bool, body: dict[str, Any]
    ) -> None:
        continuous = body["stream_options"].get("continuous_usage_stats", False)
        wanted, prompt = body["max_tokens"], body.get("prompt") or body["messages"][0]["content"]
        num_prompt = self.count(prompt) if isinstance(prompt, str) else len(prompt)

        def event(choices: list[dict[str, Any]], num_tokens: int, usage: bool) -> None:
            found: dict[str, Any] = {"id": "x", "choices": choices}
            if usage and self.fault != "no_usage":
                found["usage"] = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
                if self.cached is not None:
                    found["usage"]["prompt_tokens_details"] = {"cached_tokens": self.cached}
            self.chunk(writer, b"data: " + json.dumps(found).encode() + b"\n\n")

        def choice(text: str) -> dict[str, Any]:
            return {"index": 0} | ({"delta": {"content": text}} if is_chat else {"text": text})

        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        if is_chat:
            event([{"index": 0, "delta": {"role": "assistant", "content": ""}}], 0, continuous)
        num_tokens = 0
        while num_tokens < wanted and self.fault != "empty":
            await writer.drain()
            await asyncio.sleep(self.gap)
            new = min(self.per_event, wanted - num_tokens)
            num_tokens += new
            event([choice("ab" * new)], num_tokens, continuous)
            if num_tokens >= 2 and await self.go_wrong(writer):
                return
        event([choice("") | {"finish_reason": "length"}], num_tokens, continuous)
        event([], num_tokens, True)
        if self.fault != "no_done":
            self.chunk(writer, b": keep-alive\n\ndata: [DONE]\n\n")
        self.chunk(writer, b"")

    async def go_wrong(self, writer: asyncio.StreamWriter) -> bool:
        """Whether this stream is over."""
        if self.fault == "error_event":
            self.chunk(writer, b'data: {"error": {"message": "the engine ended"}}\n\n')
            self.chunk(writer, b"data: [DONE]\n\n")
            self.chunk(writer, b"")
        elif self.fault == "malformed":
            self.chunk(writer, b'data: {"choices": [{"text":\n\n')
        elif self.fault == "bad_chunk":
            writer.write(b"zz\r\nab\r\n")
        elif self.fault == "hang":
            await asyncio.sleep(3600)
        return self.fault in ("error_event", "malformed", "bad_chunk", "closed")

    def chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))


@contextmanager
def running(*stand_ins: StandIn) -> Iterator[None]:
    """All of them, each on a port of its own, in one thread."""
    ready, loop = threading.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        servers = [await asyncio.start_server(one.handle, "127.0.0.1", 0) for one in stand_ins]
        for one, server in zip(stand_ins, servers, strict=True):
            one.port = server.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        for server in servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    stop = asyncio.Event()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(300)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(300)
        assert not thread.is_alive()
