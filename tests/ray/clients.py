"""Clients that ask all the time, and count what became of each request."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

SECONDS = 300.0


@dataclass(frozen=True)
class Case:
    """A request, and the answer that one server gave to it."""

    path: str
    body: Mapping[str, Any]
    text: str

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


def post(url: str, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
    """Ask; returns status and body. A stream that breaks off has what came of it."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=SECONDS)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        try:
            return answer.status, answer.read()
        except http.client.IncompleteRead as error:
            return answer.status, error.partial
    finally:
        connection.close()


def text_of(path: str, content: bytes, stream: bool) -> str:
    """The text of an answer of OpenAI's two older APIs."""
    if stream:
        events = [line[6:] for line in content.decode().split("\n\n") if line.startswith("data: {")]
        choices = [one for event in events for one in json.loads(event).get("choices", ())]
    else:
        choices = json.loads(content)["choices"]
    if path.endswith("/chat/completions"):
        field = "delta" if stream else "message"
        return "".join(one[field].get("content") or "" for one in choices)
    return "".join(one["text"] for one in choices)


def cases(url: str, count: int, max_tokens: int = 48) -> list[Case]:
    """Requests with the answers of the server at `url`: both APIs, streamed and whole."""
    found = []
    for number in range(count):
        question = f"def f{number}(x):\n    return x + {number} * "
        is_chat, stream = number % 2 == 1, number % 4 >= 2
        prompt: dict[str, Any] = (
            {"messages": [{"role": "user", "content": question}]}
            if is_chat
            else {"prompt": question}
        )
        body = prompt | {"max_tokens": max_tokens * (4 if stream else 1), "temperature": 0}
        body |= {"ignore_eos": True}
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        status, content = post(url, path, body)
        assert status == 200, content
        found.append(Case(path, body | {"stream": stream}, text_of(path, content, False)))
    return found


class Clients:
    """So many threads, each with one request after another. `outcomes` counts:

    ok      the answer of one server, to the letter
    cut     a stream that had begun and ended with an error event
    silent  a stream that had begun and ended without one
    wrong   another answer
    lost …  a request that got an error before anything of its answer
    """

    def __init__(self, url: str, asked: Sequence[Case], count: int = 10) -> None:
        self.outcomes: Counter[str] = Counter()
        self.slowest = 0.0  # seconds
        self._url, self._asked = url, asked
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(count)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(2 * SECONDS)
            assert not thread.is_alive()

    @property
    def total(self) -> int:
        return sum(self.outcomes.values())

    @property
    def failed(self) -> dict[str, int]:
        """All outcomes but good ones and cut streams."""
        return {name: n for name, n in self.outcomes.items() if name not in ("ok", "cut")}

    def _run(self, seed: int) -> None:
        chosen = random.Random(seed)
        while not self._ending.is_set():
            began = time.monotonic()
            outcome = self._ask(chosen.choice(self._asked))
            with self._lock:
                self.outcomes[outcome] += 1
                self.slowest = max(self.slowest, time.monotonic() - began)

    def _ask(self, case: Case) -> str:
        try:
            status, content = post(self._url, case.path, case.body)
        except (OSError, http.client.HTTPException) as error:
            return f"lost {type(error).__name__}"
        if status != 200:
            return f"lost {status}"
        if case.stream and b'"error"' in content:
            return "cut" if content.endswith(b"data: [DONE]\n\n") else "silent"
        if case.stream and not content.endswith(b"data: [DONE]\n\n"):
            return "silent" if content else "lost empty"
        return "ok" if text_of(case.path, content, case.stream) == case.text else "wrong"
