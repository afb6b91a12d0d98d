"""`freight serve` from start to end: what it says while it loads, how it drains, and what is left
when it is killed.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.asking import ENDLESS, ONE_BY_ONE
from tests.demo_chat import demo_with_chat_template
from tests.openmp_display import given, has_read
from tests.serving import ServeProcess, has_ended, health

pytestmark = pytest.mark.clock

CACHE = ["--kv-cache-dtype", "fp8", "--kv-cache-memory", "16MiB"]


@contextmanager
def server(
    *options: str,
    model: str = "demo",
    forked: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Iterator[ServeProcess]:
    process = ServeProcess(model, [*CACHE, *options], forked=forked, environ=environ)
    try:
        yield process
    finally:
        process.close()


def complete(url: str, **fields: Any) -> tuple[int, Any]:
    """Status and body."""
    with answering(url, {"prompt": "x", "max_tokens": 2, **fields}) as answer:
        return answer.status, json.load(answer)


@contextmanager
def answering(url: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    with closing(connection), connection.getresponse() as answer:
        yield answer


@contextmanager
def stream(url: str, **fields: Any) -> Iterator[http.client.HTTPResponse]:
    """A stream that has begun."""
    body = {**ENDLESS, "stream": True, **fields}
    with answering(url, body) as answer:
        assert answer.status == 200
        assert answer.readline().startswith(b"data: ")
        yield answer


def events_of(answer: http.client.HTTPResponse) -> list[str]:
    """The rest of a stream."""
    return answer.read().decode().strip().split("\n\n")


def ends(pids: dict[str, int]) -> bool:
    deadline = time.monotonic() + 300
    while not all(map(has_ended, pids.values())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return all(map(has_ended, pids.values()))


def test_it_drains_at_sigterm() -> None:
    options = ("--drain-timeout", "300", "--stall-timeout", "300", *ONE_BY_ONE)
    with server(*options, forked=True) as process:
        url = process.wait_until_healthy()
        children = process.children()
        with stream(url, prompt="def main(", n=4, max_tokens=300) as answer:
            os.kill(children["worker"], signal.SIGSTOP)  # so that the stream does not end meanwhile
            process.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 300
            while health(url) == 200 and time.monotonic() < deadline:
                time.sleep(0.01)
            status, body = complete(url)
            assert (status, body["error"]["code"]) == (503, "draining")
            os.kill(children["worker"], signal.SIGCONT)
            events = events_of(answer)
        assert events[-1] == "data: [DONE]"
        assert '"finish_reason": "length"' in events[-2]
        assert process.wait() == 0, process.said
        assert ends(children)


def test_a_drain_that_takes_too_long_ends_streams_with_an_error() -> None:
    with server("--drain-timeout", "0.1", *ONE_BY_ONE, forked=True) as process:
        with stream(process.wait_until_healthy()) as answer:
            assert process.stop() == 0, process.said
            events = events_of(answer)
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "draining"
        assert events[-1] == "data: [DONE]"


def test_a_killed_engine_ends_streams_with_an_error_and_the_server_with_a_status() -> None:
    with server(*ONE_BY_ONE, forked=True) as process:
        url = process.wait_until_healthy()
        children = process.children()
        with stream(url) as answer:
            os.kill(children["worker"], signal.SIGKILL)
            events = events_of(answer)
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "engine_ended"
        assert events[-1] == "data: [DONE]"
        assert process.wait() == 1
        assert "the engine's process ended with signal 9" in process.said
        assert ends(children)


def test_a_killed_engine_is_replaced_where_that_was_asked_for(tmp_path: Path) -> None:
    with server(
        "--restart-engine", *ONE_BY_ONE, model=str(demo_with_chat_template(tmp_path)), forked=True
    ) as process:
        url = process.wait_until_healthy()
        first, renderer = (process.children()[name] for name in ("worker", "render_process"))
        with stream(url) as answer:
            os.kill(first, signal.SIGKILL)
            assert b"engine_ended" in answer.read()
        deadline = time.monotonic() + 300
        while health(url) == 200 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.wait_until_healthy()
        assert process.children()["worker"] != first
        assert not Path(f"/proc/{renderer}").exists()  # as a zombie it would
        assert complete(url)[0] == 200
        assert process.stop() == 0


def test_it_answers_while_it_loads_and_nothing_is_left_of_it_when_it_is_killed() -> None:
    """The server's own process loads no torch, so the spins that are told are the engine's: those
    that Freight sets.
    """
    with server(*ONE_BY_ONE, environ=given()) as process:
        url = process.url
        assert health(url) == 503
        status, body = complete(url)
        assert (status, body["error"]["code"]) == (503, "loading")
        process.wait_until_healthy()
        children = process.children()
        assert "worker" in children
        maps = Path(f"/proc/{process.process.pid}/maps").read_text()
        assert "uvloop" in maps  # a token costs less than with asyncio's own loop
        assert "libtorch" not in maps
        if sys.platform == "linux":  # GNU OpenMP is torch's there alone
            assert has_read(process.said) in ({3_000}, {10_000})  # by architecture
            assert "torch was imported before freight" not in process.said
        with stream(url):
            process.process.kill()
            assert process.wait() == -signal.SIGKILL
        assert ends(children)


def test_faults_at_start_are_one_line_and_a_status(tmp_path: Path) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for options, status, says in (
            (
                ["--port", port],
                2,
                f"cannot listen on port {port} of 127.0.0.1: Address already in use",
            ),
            (["--api-key-file", str(tmp_path / "keys")], 2, "keys: No such file"),
            (["--host", "0.0.0.0"], 2, "--insecure"),
            (["--chat-template", str(tmp_path / "none.jinja")], 2, "none.jinja cannot be read"),
            (["--max-queue", "-1"], 2, "--max-queue is -1"),
            (["--kv-cache-dtype", "bfloat16", "--kv-scales", "dynamic"], 2, "--kv-scales dynamic"),
        ):
            process = ServeProcess("demo", options, forked=options[0] != "--port")
            try:
                assert process.wait() == status, process.said
                assert says in process.said
                assert "Traceback" not in process.said
                assert len(process.said.strip().splitlines()) <= 1 + process.said.count("listening")
            finally:
                process.close()


@pytest.mark.parametrize(("model", "says"), [("./nowhere", "there is no folder './nowhere'")])
def test_a_model_that_is_not_there(model: str, says: str) -> None:
    with server(model=model, forked=True) as process:
        assert process.wait() == 1
        assert says in process.said
        assert "Traceback" not in process.said
