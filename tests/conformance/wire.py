"""HTTP as the conformance suite speaks it: plain requests, streams as lists of events, and bytes as
they are.

Only the standard library, so that what a client library repairs or repeats in silence is seen here.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

SECONDS = 300.0


@dataclass(frozen=True)
class Reply:
    """An answer. `headers` have lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float

    def json(self) -> Any:
        assert self.headers.get("content-type", "").startswith("application/json"), self.headers
        return json.loads(self.body)

    def error(self) -> Mapping[str, Any]:
        """The error of OpenAI's envelope, whose fields are checked."""
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str)
        assert error["message"]
        assert isinstance(error["type"], str)
        return error  # type: ignore[no-any-return]

    def events(self) -> list[Any]:
        """Of a stream: the data of each event as JSON, "[DONE]" as it is. Comments are left out."""
        assert self.headers.get("content-type", "").startswith("text/event-stream"), self.headers
        found: list[Any] = []
        for block in self.body.decode("utf-8").replace("\r\n", "\n").split("\n\n"):
            for line in block.split("\n"):
                if line.startswith("data:"):
                    data = line[5:].strip()
                    found.append(data if data == "[DONE]" else json.loads(data))
        return found


@dataclass(frozen=True)
class Api:
    """A server. `model` is the name that requests give."""

    url: str
    model: str = ""
    api_key: str | None = None
    seen: list[Reply] = field(
        default_factory=list, compare=False
    )  # every answer, to be searched for what leaks

    @property
    def place(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 80

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """One request on a connection of its own; `headers` stand in the place of the key and the
        content type.
        """
        own = self.headers() | ({"Content-Type": "application/json"} if body is not None else {})
        connection = http.client.HTTPConnection(*self.place, timeout=SECONDS)
        begin = time.perf_counter()
        try:
            with suppress(
                BrokenPipeError, ConnectionResetError
            ):  # refused before all of it was sent
                connection.request(method, path, body, dict(own if headers is None else headers))
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        fields = {name.lower(): value for name, value in answer.getheaders()}
        reply = Reply(answer.status, fields, data, time.perf_counter() - begin)
        self.seen.append(reply)
        return reply

    def get(self, path: str) -> Reply:
        return self.send("GET", path)

    def post(self, path: str, body: Any) -> Reply:
        return self.send(
            "POST", path, body if isinstance(body, bytes) else json.dumps(body).encode()
        )

    def chat(self, content: str = "def main(", **fields: Any) -> Reply:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 6,
        }
        return self.post("/v1/chat/completions", body | {"temperature": 0} | fields)

    def complete(self, prompt: Any = "def main(", **fields: Any) -> Reply:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 6, "temperature": 0}
        return self.post("/v1/completions", body | fields)

    def raw(self, data: bytes, seconds: float = SECONDS) -> bytes:
        """Send these bytes, half of a request or none, and return all that comes until the server
        closes.

        Raises TimeoutError where it neither answers nor closes in time.
        """
        with socket.create_connection(self.place, timeout=seconds) as connection:
            with suppress(
                BrokenPipeError, ConnectionResetError
            ):  # it had enough; its answer may still be there
                connection.sendall(data)
            found, end = b"", time.monotonic() + seconds
            while True:
                connection.settimeout(max(0.01, end - time.monotonic()))
                try:
                    part = connection.recv(65536)
                except ConnectionResetError:
                    return found
                if not part:
                    return found
                found += part
                if b"\r\n\r\n" in found and _whole(found):
                    return found


def _whole(answer: bytes) -> bool:
    """Whether an answer with a Content-Length is complete."""
    head, _, body = answer.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.split(b":")[1])
    return False


def status_of(answer: bytes) -> int:
    """Of bytes that `raw` returned; 0 where the server closed without an answer."""
    words = answer.split(b" ", 2)
    return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/1.") else 0
