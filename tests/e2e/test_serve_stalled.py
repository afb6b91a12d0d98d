"""An engine that gives no sign of life: /health says so, it is noticed when it comes back, or a new
one is started.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.asking import ENDLESS, ONE_BY_ONE, Server
from tests.demo_chat import demo_with_chat_template
from tests.serving import ServeProcess, health
from tests.unit.server.raw_http import wait_for

pytestmark = pytest.mark.clock

OPTIONS = ["--kv-cache-memory", "8MiB", *ONE_BY_ONE, "--stall-timeout", "2"]
SHORT = {"prompt": "def main(", "max_tokens": 2}


def wait_for_health(server: Server, status: int) -> None:
    wait_for(lambda: health(server.url) == status)


@pytest.fixture
def process(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServeProcess]:
    model = demo_with_chat_template(tmp_path / "demo")
    with ServeProcess(model, [*OPTIONS, *getattr(request, "param", [])], forked=True) as served:
        served.wait_until_healthy()
        yield served


def test_a_stopped_engine_is_not_healthy_until_it_goes_on(process: ServeProcess) -> None:
    server, engine = Server(process.url), process.children()["worker"]
    with server.streaming(ENDLESS) as opened:
        os.kill(engine, signal.SIGSTOP)
        begun = time.monotonic()
        try:
            wait_for_health(server, 503)
            assert time.monotonic() - begun >= 1  # of 2, less the time between two looks
            answer = server.ask("/health")
            assert answer.body["status"] == "engine_stalled"
            assert int(answer.headers["retry-after"]) >= 1
            # at once: nobody knows when it would be computed
            refused = server.ask("/v1/completions", SHORT)
            assert (refused.status, refused.error["code"]) == (503, "engine_stalled")
            assert server.metric("freight:engine_stalled") == 1
            before = int(server.metric("vllm:generation_tokens_total"))
        finally:
            os.kill(engine, signal.SIGCONT)
        wait_for_health(server, 200)
        # an event has a token or more
        assert all(event["choices"] for event in opened.events(before + 100))
    assert server.metric("freight:engine_stalled") == 0
    assert server.ask("/v1/completions", SHORT).status == 200
    os.kill(engine, signal.SIGSTOP)
    wait_for_health(server, 503)  # before a request finds out
    assert process.stop() == 0
    assert not Path(f"/proc/{engine}").exists()  # it is not waited for
    told = [line for line in process.said.splitlines() if "of life" in line]
    assert "ERROR" in told[0], told
    assert "4 requests wait" in told[0], told
    assert "signs of life again" in told[1], told


@pytest.mark.parametrize("process", [["--restart-engine"]], indirect=True)
def test_a_stopped_engine_is_replaced_where_that_was_asked_for(process: ServeProcess) -> None:
    server, engine = Server(process.url), process.children()["worker"]
    with server.streaming(ENDLESS) as opened, ThreadPoolExecutor(1) as pool:
        whole = pool.submit(server.ask, "/v1/completions", SHORT)
        wait_for(lambda: sum(server.load()[:2]) == 65)
        os.kill(engine, signal.SIGSTOP)
        rest = opened.whole().raw.decode()
        assert '"engine_ended"' in rest
        assert rest.endswith("data: [DONE]\n\n")
        assert whole.result().status == 503
    wait_for_health(server, 200)
    assert server.ask("/v1/completions", SHORT).status == 200
    assert process.children()["worker"] != engine
    assert process.stop() == 0
    assert "no sign of life" in process.said
    assert "another is started" in process.said


@pytest.mark.parametrize("process", [["--drain-timeout", "600"]], indirect=True)
def test_a_server_that_ends_does_not_wait_for_an_engine_that_stalls(process: ServeProcess) -> None:
    server, engine = Server(process.url), process.children()["worker"]
    with server.streaming(ENDLESS) as opened:
        os.kill(engine, signal.SIGSTOP)
        assert process.stop() == 0
        assert '"draining"' in opened.whole().raw.decode()
    assert not Path(f"/proc/{engine}").exists()
