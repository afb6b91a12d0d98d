"""A client for the tests of a running `freight serve`: requests, streams that can be left, and what
its metrics say.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

# With these options an answer of 64 completions, one after the other: no machine ends it before it
# is disturbed. Its text repeats itself, so with drafts each would take half a second.
ONE_BY_ONE = ("--max-num-seqs", "1", "--max-queue", "128", "--speculate", "0")
ENDLESS = {
    "prompt": ["def main("] * 4,
    "n": 16,
    "max_tokens": 900,
    "temperature": 0,
    "ignore_eos": True,
}

_SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Answered:
    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.body["error"]
        return found

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events; "[DONE]" as text."""
        found = [
            line[6:]
            for line in self.raw.decode().lstrip().split("\n\n")
            if line.startswith("data: ")
        ]
        return [event if event == "[DONE]" else json.loads(event) for event in found]


class Open:
    """A request that was sent, on a connection of its own, whose answer has not been read."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self.connection = connection
        self.answer: http.client.HTTPResponse | None = None

    def first_event(self) -> bytes:
        self.answer = self.connection.getresponse()
        assert self.answer.status == 200, self.answer.read()
        return self.answer.readline()

    def events(self, count: int) -> list[Any]:
        """The next so many events of a stream that has begun, which does not end before."""
        assert self.answer is not None
        found: list[Any] = []
        while len(found) < count:
            line = self.answer.readline()
            assert line, f"the stream ended after {found[-1:]}"
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:]))
        return found

    def whole(self) -> Answered:
        answer = self.answer or self.connection.getresponse()
        with answer:
            return Answered(
                answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
            )

    def leave(self, reset: bool = False) -> None:
        """Close the connection; `reset`: without the handshake, as a machine does that lost its
        connections.
        """
        sock = self.connection.sock
        if sock is not None and reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if self.answer is not None:
            self.answer.close()
        self.connection.close()


@dataclass(frozen=True)
class Server:
    """A server at `url`, asked with these headers."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def open(
        self,
        path: str,
        body: object,
        headers: Mapping[str, str] | None = None,
        method: str = "POST",
    ) -> Open:
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
        raw = (
            None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        kind = {"Content-Type": "application/json"} if raw is not None else {}
        connection.request(method, path, raw, {**kind, **self.headers, **(headers or {})})
        return Open(connection)

    def ask(
        self, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Answered:
        """The whole answer; GET without a body."""
        opened = self.open(path, body, headers, "GET" if body is None else "POST")
        try:
            return opened.whole()
        finally:
            opened.leave()

    def chat(self, **body: Any) -> list[dict[str, Any]]:
        """The choices of an answer, whose messages are the same whole and streamed."""
        answer = self.ask("/v1/chat/completions", body)
        assert answer.status == 200, answer.raw
        choices: list[dict[str, Any]] = answer.body["choices"]
        streamed = [{"reasoning": "", "content": "", "calls": []} for _ in choices]
        for event in self.ask("/v1/chat/completions", {**body, "stream": True}).events[:-1]:
            for choice in event["choices"]:
                parts: dict[str, Any] = streamed[choice["index"]]
                for name in ("reasoning", "content"):
                    parts[name] += choice["delta"].get(name) or ""
                calls = choice["delta"].get("tool_calls") or []
                parts["calls"] += [call["function"] for call in calls]
        for parts, choice in zip(streamed, choices, strict=True):
            message = choice["message"]
            calls = [call["function"] for call in message.get("tool_calls") or []]
            whole = {name: message.get(name) or "" for name in ("reasoning", "content")}
            assert parts == whole | {"calls": calls}
            assert message.get("reasoning_content") == message.get("reasoning")
        return choices

    @contextlib.contextmanager
    def streaming(self, body: Mapping[str, Any], path: str = "/v1/completions") -> Iterator[Open]:
        """A stream that has begun, left at exit."""
        opened = self.open(path, {**body, "stream": True})
        try:
            opened.first_event()
            yield opened
        finally:
            opened.leave()

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all samples of that name that have these labels."""
        return self._found(self.ask("/metrics").raw.decode(), name, labels)

    @staticmethod
    def _found(text: str, name: str, labels: Mapping[str, str]) -> float:
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = [
            float(value)
            for one, given, value in _SAMPLE.findall(text)
            if one == name and all(label in given for label in wanted)
        ]
        assert found, f"there is no metric {name} {labels}"
        return sum(found)

    def steps(self) -> int:
        return int(self.metric("vllm:iteration_tokens_total_count"))

    def load(self) -> tuple[int, int, int]:
        """Running, waiting, tokens held."""
        names = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "freight:cache_held_tokens",
        )
        text = self.ask("/metrics").raw.decode()
        running, waiting, held = (int(self._found(text, name, {})) for name in names)
        return running, waiting, held

    def wait_for(self, running: int, waiting: int = 0, seconds: float = 300.0) -> None:
        """Until so many run and wait, and nothing is held where nothing runs."""
        end = time.monotonic() + seconds
        while (found := self.load())[:2] != (running, waiting) or (running == 0 and found[2] != 0):
            assert time.monotonic() < end, (
                f"running, waiting, held: {found}; expected {running}, {waiting}"
            )
            time.sleep(0.03)
