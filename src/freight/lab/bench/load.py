"""Load on a server: so many requests at a time, or so many a second, each streamed and timed.

Guarantees: a rate is kept whether the server answers or not (Poisson arrivals, from a seed), and a
request's time counts from the moment it was due, so a server that falls behind cannot slow its own
load down. A connection carries one request at a time and is used again; one that the server closed
in between is replaced without an error.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from freight.base.fields import JsonDict
from freight.lab.bench.answers import Answer, AnswerStream
from freight.lab.bench.http_stream import Address, Connection, OnBody, StreamError
from freight.lab.bench.prompts import Ask, Prompts

ENDPOINTS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
OnAnswer = Callable[[Answer], None]


@dataclass(frozen=True)
class Target:
    """A server, what is asked of it, and how. `timeout` in seconds for one answer.

    `ignore_eos` and `continuous_usage` are fields that not every server takes: it is found by asking
    once, before anything is measured.
    """

    address: Address
    model: str
    endpoint: str = "completions"
    api_key: str | None = None
    timeout: float = 600.0
    ignore_eos: bool = True
    continuous_usage: bool = True

    def head(self, method: str, path: str, num_bytes: int, headers: dict[str, str]) -> bytes:
        if self.api_key:
            headers = {**headers, "Authorization": f"Bearer {self.api_key}"}
        return self.address.head(method, path, num_bytes, headers)

    def request(self, ask: Ask) -> bytes:
        """Return the bytes of one request."""
        options = {"include_usage": True}
        if self.continuous_usage:
            options["continuous_usage_stats"] = True
        body: JsonDict = {
            "model": self.model,
            "max_tokens": ask.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": options,
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.endpoint != "chat":
            body["prompt"] = ask.content
        elif ask.is_messages:
            body["messages"] = ask.content
        else:
            body["messages"] = [{"role": "user", "content": ask.content}]
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        return self.head("POST", ENDPOINTS[self.endpoint], len(data), headers) + data


@dataclass(frozen=True)
class Level:
    """How hard a server is pressed: `concurrency` requests at a time, or `rate` a second; one of
    them is given.
    """

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        if self.concurrency:
            return f"{self.concurrency} at a time"
        return f"{self.rate:g}/s"


@dataclass(frozen=True)
class Amount:
    """When a run ends: after `requests`, or when none begins any more after `seconds`; whichever
    comes first.
    """

    requests: int | None = None
    seconds: float | None = None


class Connections:
    """Idle connections to one server."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._idle: list[Connection] = []

    async def send(self, request: bytes) -> AnswerStream:
        """Send on an idle connection, or a new one; returns what was read of the stream. Raises
        StreamError.
        """
        while True:
            used = bool(self._idle)
            connection = self._idle.pop() if used else await Connection.open(self.address)
            if not connection.reusable:
                continue
            stream = AnswerStream()
            try:
                await _exchange(connection, request, "status", stream.feed)
            except StreamError as error:
                if used and error.kind == "closed" and not connection.reader.status:
                    # the server closed an idle connection while this request was on its way
                    continue
                raise
            finally:
                if connection.reusable:
                    self._idle.append(connection)
            return stream

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


async def _exchange(connection: Connection, request: bytes, what: str, on_body: OnBody) -> None:
    """Send a request; the body of its answer goes to `on_body`. Raises StreamError, for another
    status than 200 with what the body says.
    """
    refusal = bytearray()

    def take(data: bytes, now: float) -> None:
        if connection.reader.status == 200:
            on_body(data, now)
        elif len(refusal) < 2**16:
            refusal.extend(data)

    reader = await connection.send(request, take)
    if reader.status != 200:
        message = f"{what} {reader.status}: {_message(bytes(refusal))}"
        raise StreamError(f"http_{reader.status}", message)


def _message(body: bytes) -> str:
    """Return the message of an error's body, in OpenAI's shape or another, at most 300 characters."""
    text = body.decode("utf-8", "replace")
    try:
        error = json.loads(text)
        error = error.get("error", error)
        if isinstance(error, Mapping):
            error = error.get("message", error)
        text = str(error)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:300]


async def ask_once(
    target: Target, connections: Connections, ask: Ask, planned: float | None = None
) -> Answer:
    """Send one request, from the moment it is due (now if not given). Errors are in the Answer."""
    sent = time.perf_counter()
    start = sent if planned is None else planned
    try:
        async with asyncio.timeout(target.timeout):
            stream = await connections.send(target.request(ask))
        return stream.answer(start, sent, ask.max_tokens)
    except TimeoutError:
        kind = "timeout"
        message = f"no complete answer within {target.timeout:g} s"
    except StreamError as error:
        kind = error.kind
        message = str(error)
    return Answer(
        start, sent, time.perf_counter(), max_tokens=ask.max_tokens, error=kind, message=message
    )


async def run_level(
    target: Target,
    prompts: Prompts,
    level: Level,
    amount: Amount,
    seed: int,
    on_answer: OnAnswer = lambda answer: None,
) -> list[Answer]:
    """Return all answers of one run. `seed` fixes prompts, lengths and arrivals."""
    drawn = prompts.asks(seed)
    connections = Connections(target.address)
    answers = list[Answer]()
    begin = time.perf_counter()

    def asks() -> Iterator[Ask]:
        done = 0
        while amount.requests is None or done < amount.requests:
            if amount.seconds is not None and time.perf_counter() - begin >= amount.seconds:
                return
            done += 1
            yield next(drawn)

    async def one(ask: Ask, planned: float | None = None) -> None:
        answer = await ask_once(target, connections, ask, planned)
        answers.append(answer)
        on_answer(answer)

    async def worker(source: Iterator[Ask]) -> None:
        for ask in source:
            await one(ask)

    try:
        async with asyncio.TaskGroup() as group:
            if level.concurrency:
                source = asks()
                for _ in range(level.concurrency):
                    group.create_task(worker(source))
            else:
                assert level.rate
                gaps = random.Random(f"arrivals {seed}")
                planned = begin
                for ask in asks():
                    planned += gaps.expovariate(level.rate)
                    if amount.seconds is not None and planned - begin >= amount.seconds:
                        break
                    await asyncio.sleep(max(0.0, planned - time.perf_counter()))
                    group.create_task(one(ask, planned))
    finally:
        connections.close()
    return answers


async def fetch(target: Target, path: str) -> Any:
    """Return the JSON of one GET. Raises StreamError, of kind `http_404` and so on for another
    status than 200.
    """
    connection = await Connection.open(target.address)
    body = bytearray()
    try:
        async with asyncio.timeout(30):
            request = target.head("GET", path, 0, {"Accept": "application/json"})
            what = f"{path} answers with status"
            await _exchange(connection, request, what, lambda data, now: body.extend(data))
    except TimeoutError:
        raise StreamError(
            "timeout", f"{target.address.url} does not answer {path} within 30 s"
        ) from None
    finally:
        connection.close()
    try:
        return json.loads(bytes(body))
    except ValueError:
        raise StreamError("malformed", f"{path} does not answer with JSON") from None


async def find_accepted(target: Target, ask: Ask) -> tuple[Target, Answer]:
    """Return the target with what its server takes, and the first answer. Raises StreamError where
    nothing is answered.
    """
    connections = Connections(target.address)
    try:
        for ignore_eos, usage in itertools.product((True, False), repeat=2):
            target = replace(target, ignore_eos=ignore_eos, continuous_usage=usage)
            answer = await ask_once(target, connections, ask)
            if answer.error not in ("http_400", "http_422"):
                break
    finally:
        connections.close()
    if answer.error:
        raise StreamError(answer.error, answer.message)
    return target, answer
