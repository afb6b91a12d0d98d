"""A router beside `freight serve`: it has the index of the engine by events alone, also after the engine
was killed and another took its place.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from tests.asking import Server
from tests.refusals import assert_names
from tests.router_index import RouterIndex
from tests.serving import ServeProcess

SECONDS = 120.0
# A cache of some 40 blocks, which a few prompts fill
OPTIONS = ["--kv-cache-memory", "2MiB", "--restart-engine", "--drain-timeout", "0"]


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as found:
        port: int = found.getsockname()[1]
    return port


class Router:
    """Reads the events of one server, from the first on."""

    def __init__(self, context: Any, port: int, replay_port: int) -> None:
        import zmq

        self.index = RouterIndex()
        self.expected = 0
        self.sub = context.socket(zmq.SUB)
        self.sub.connect(f"tcp://127.0.0.1:{port}")
        self.sub.subscribe(b"")
        self.ask = context.socket(zmq.DEALER)
        self.ask.connect(f"tcp://127.0.0.1:{replay_port}")

    def catch_up(self) -> None:
        """Ask for all that is lacking, which is all that the live socket may have missed."""
        from tests.vllm_events import decoded

        self.ask.send_multipart([b"", self.expected.to_bytes(8, "big")])
        while True:
            assert self.ask.poll(SECONDS * 1000)
            _, _, number, payload = self.ask.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                return
            assert int.from_bytes(number, "big") == self.expected
            self.index.apply(decoded(payload)[1])
            self.expected += 1

    def close(self) -> None:
        self.sub.close(linger=0)
        self.ask.close(linger=0)


@pytest.fixture
def router_ports() -> Iterator[tuple[Any, int, int]]:
    zmq = pytest.importorskip("zmq")
    pytest.importorskip("msgspec")
    context = zmq.Context()
    yield context, free_port(), free_port()
    context.destroy(linger=0)


def completed(server: Server, ids: list[int], **more: object) -> int:
    """How many tokens of a prompt were found in the cache."""
    body = {"model": "demo", "prompt": ids, "max_tokens": 2, "temperature": 0, **more}
    answer = server.ask("/v1/completions", body)
    assert answer.status == 200, answer.raw
    found: int = answer.body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def hit(router: Router, ids: list[int]) -> int:
    """Tokens of a prompt that the router thinks the server has; the last token is always computed."""
    held = set(router.index.blocks.values())
    count = 0
    while (count + 1) * 16 < len(ids) and tuple(ids[count * 16 : (count + 1) * 16]) in held:
        count += 1
    return count * 16


def test_a_router_knows_what_is_found(router_ports: tuple[Any, int, int]) -> None:
    """Before each request it knows how much of it will be found: with evictions, after a salt, and after
    the engine was killed.
    """
    context, port, replay_port = router_ports
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{replay_port}",
    }
    options = [*OPTIONS, "--kv-events-config", json.dumps(config)]
    # prompts without a block in common, but where one is the beginning of another
    prompts = [[1000 * number + token for token in range(100, 180)] for number in range(3)]
    prompts += [[*prompts[0][:48], *range(3000, 3030)], *prompts]
    with (
        ServeProcess("demo", options) as process,
        closing(Router(context, port, replay_port)) as router,
    ):
        server = Server(process.wait_until_healthy())
        guessed = []
        for turn in range(4):
            for ids in prompts[turn:]:
                router.catch_up()
                guessed.append(hit(router, ids))
                assert completed(server, ids) == guessed[-1]
            for number in range(12):  # evicts
                completed(server, list(range(200 + 50 * number, 280 + 50 * number)))
        router.catch_up()
        assert {0, 48, 64} <= set(guessed)
        assert completed(server, list(range(500, 580)), cache_salt="blue") == 0
        router.catch_up()
        assert router.index.num_cleared == 0
        before = router.expected
        os.kill(process.children()["worker"], signal.SIGKILL)
        end = time.monotonic() + SECONDS
        while router.index.num_cleared == 0:
            assert time.monotonic() < end
            router.catch_up()
            time.sleep(0.01)
        assert router.index.blocks == {}
        assert router.expected == before + 1, "the sequence goes on"
        process.wait_until_healthy()
        assert completed(server, prompts[0]) == 0
        assert completed(server, prompts[0]) == 64
        router.catch_up()
        assert hit(router, prompts[0]) == 64
        assert server.metric("freight:kv_event_batches_total") == router.expected
        assert server.metric("freight:kv_event_batches_dropped_total") == 0
        number = 0
        while router.sub.poll(200):  # and as they happened, from when the subscription had arrived
            number = int.from_bytes(router.sub.recv_multipart()[1], "big")
        assert number == router.expected - 1
        assert process.stop() == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--no-enable-prefix-caching"], ["--kv-events-config", "caches none"]),
        (["--kv-cache-memory", "2MiB"], ["--kv-events-config", "no key 'endpont'"]),
    ],
)
def test_what_cannot_be_told_is_refused(options: list[str], named: list[str]) -> None:
    pytest.importorskip("zmq")
    pytest.importorskip("msgspec")
    key = "endpont" if "endpont" in named[1] else "endpoint"
    config = {"enable_kv_cache_events": True, key: "tcp://127.0.0.1:*"}
    with ServeProcess("demo", [*options, "--kv-events-config", json.dumps(config)]) as process:
        assert process.wait() == 2
        assert_names(process.said, *named)
