"""`freight serve` from start to end: what it says while it loads, how it drains, and what is left
when it is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import closing
from pathlib import Path

import pytest
from tests.asking import ENDLESS, ONE_BY_ONE, Server
from tests.demo_chat import demo_with_chat_template
from tests.openmp_display import given, has_read
from tests.serving import ServeProcess, has_ended, health
from tests.unit.server.raw_http import wait_for

pytestmark = pytest.mark.clock

OPTIONS = ["--kv-cache-dtype", "fp8", "--kv-cache-memory", "16MiB", *ONE_BY_ONE]
COMPLETIONS, SHORT = "/v1/completions", {"prompt": "x", "max_tokens": 2}


def wait_for_ends(pids: dict[str, int]) -> None:
    wait_for(lambda: all(map(has_ended, pids.values())))


def test_it_drains_at_sigterm() -> None:
    options = [*OPTIONS, "--drain-timeout", "300", "--stall-timeout", "300"]
    with ServeProcess("demo", options, forked=True) as process:
        server, children = Server(process.wait_until_healthy()), process.children()
        with server.streaming(
            ENDLESS | {"prompt": "def main(", "n": 4, "max_tokens": 100}
        ) as opened:
            os.kill(children["worker"], signal.SIGSTOP)  # so that the stream does not end meanwhile
            process.process.send_signal(signal.SIGTERM)
            wait_for(lambda: health(server.url) != 200)
            refused = server.ask(COMPLETIONS, SHORT)
            assert (refused.status, refused.error["code"]) == (503, "draining")
            os.kill(children["worker"], signal.SIGCONT)
            *_, last, done = opened.whole().events
        assert (done, last["choices"][0]["finish_reason"]) == ("[DONE]", "length")
        assert process.wait() == 0, process.said
        wait_for_ends(children)


def test_a_drain_that_takes_too_long_ends_streams_with_an_error() -> None:
    with ServeProcess("demo", [*OPTIONS, "--drain-timeout", "0.1"], forked=True) as process:
        with Server(process.wait_until_healthy()).streaming(ENDLESS) as opened:
            assert process.stop() == 0, process.said
            *_, last, done = opened.whole().events
        assert (done, last["error"]["code"]) == ("[DONE]", "draining")


def test_a_killed_engine_ends_streams_with_an_error_and_the_server_with_a_status() -> None:
    with ServeProcess("demo", OPTIONS, forked=True) as process:
        url, children = process.wait_until_healthy(), process.children()
        with Server(url).streaming(ENDLESS) as opened:
            os.kill(children["worker"], signal.SIGKILL)
            *_, last, done = opened.whole().events
        assert (done, last["error"]["code"]) == ("[DONE]", "engine_ended")
        assert process.wait() == 1
        assert "the engine's process ended with signal 9" in process.said
        wait_for_ends(children)


def test_a_killed_engine_is_replaced_where_that_was_asked_for(tmp_path: Path) -> None:
    model = demo_with_chat_template(tmp_path)
    with ServeProcess(model, [*OPTIONS, "--restart-engine"], forked=True) as process:
        server = Server(process.wait_until_healthy())
        first, renderer = (process.children()[name] for name in ("worker", "render_process"))
        with server.streaming(ENDLESS) as opened:
            os.kill(first, signal.SIGKILL)
            assert b"engine_ended" in opened.whole().raw
        wait_for(lambda: health(server.url) != 200)
        process.wait_until_healthy()
        assert process.children()["worker"] != first
        assert not Path(f"/proc/{renderer}").exists()  # as a zombie it would
        assert server.ask(COMPLETIONS, SHORT).status == 200
        assert process.stop() == 0


def test_it_answers_while_it_loads_and_nothing_is_left_of_it_when_it_is_killed() -> None:
    """The server's own process loads no torch, so the spins that are told are the engine's: those
    that Freight sets.
    """
    with ServeProcess("demo", OPTIONS, environ=given()) as process:
        server = Server(process.url)
        assert health(server.url) == 503
        refused = server.ask(COMPLETIONS, SHORT)
        assert (refused.status, refused.error["code"]) == (503, "loading")
        process.wait_until_healthy()
        children = process.children()
        assert "worker" in children
        maps = Path(f"/proc/{process.process.pid}/maps").read_text()
        assert "uvloop" in maps  # a token costs less than with asyncio's own loop
        assert "libtorch" not in maps
        if sys.platform == "linux":  # GNU OpenMP is torch's there alone
            assert has_read(process.said) in ({3_000}, {10_000})  # by architecture
            assert "torch was imported before freight" not in process.said
        with server.streaming(ENDLESS):
            process.process.kill()
            assert process.wait() == -signal.SIGKILL
        wait_for_ends(children)


def test_faults_at_start_are_one_line_and_a_status(tmp_path: Path) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        in_use = f"cannot listen on port {port} of 127.0.0.1: Address already in use"
        scales = ["--kv-cache-dtype", "bfloat16", "--kv-scales", "dynamic"]
        for options, says in (
            (["--port", port], in_use),
            (["--api-key-file", str(tmp_path / "keys")], "keys: No such file"),
            (["--host", "0.0.0.0"], "--insecure"),
            (["--chat-template", f"{tmp_path}/none.jinja"], "none.jinja cannot be read"),
            (["--max-queue", "-1"], "--max-queue is -1"),
            (scales, "--kv-scales dynamic"),
        ):
            with ServeProcess("demo", options, forked=True) as process:
                assert process.wait() == 2, process.said
                assert says in process.said
                assert "Traceback" not in process.said
                assert len(process.said.strip().splitlines()) <= 1 + process.said.count("listening")


def test_a_model_that_is_not_there() -> None:
    with ServeProcess("./nowhere", OPTIONS, forked=True) as process:
        assert process.wait() == 1
        assert "there is no folder './nowhere'" in process.said
        assert "Traceback" not in process.said
