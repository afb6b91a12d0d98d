"""Clients that do not read what they asked for: they are dropped in time, and cost little memory
until then.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from tests.unit.server.raw_http import (
    GET,
    QUICK,
    Running,
    in_time,
    running,
    until_disconnect,
    wait_for,
)

pytestmark = pytest.mark.clock


async def stream(scope: Any, receive: Any, send: Any) -> None:
    """Sends 64 MB in pieces, for as long as the client is there; counts them in the state that all
    requests share.
    """
    scope["app"]["sent"] = 0
    await send({"type": "http.response.start", "status": 200, "headers": []})
    gone = asyncio.ensure_future(until_disconnect(receive))
    for _ in range(1024):
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        await asyncio.sleep(0)
        if gone.done():
            scope["app"]["gone"] = time.monotonic()
            return
        scope["app"]["sent"] += 1
    gone.cancel()
    await send({"type": "http.response.body", "body": b""})


def is_served_slowly(server: Running, facts: dict[str, Any]) -> bool:
    """Whether a client that reads a little at a time still has its answer after a second."""
    facts.clear()
    with server.client() as slow:
        slow.send(GET)
        begun = time.monotonic()
        while time.monotonic() - begun < 1:
            try:
                if not slow.socket.recv(1 << 20):
                    return False
            except ConnectionResetError:
                return False
            time.sleep(0.05)
        return "gone" not in facts


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_client_that_does_not_read_is_dropped_and_costs_no_memory(loop: str) -> None:
    facts: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await stream({**scope, "app": facts}, receive, send)

    with running(app, QUICK, loop) as server:
        with server.client() as client:
            begun = time.monotonic()
            client.send(GET)
            wait_for(lambda: "gone" in facts)
            assert facts["gone"] - begun > 0.25
            assert facts["sent"] < 200  # what the system's buffers took
        assert in_time(lambda: is_served_slowly(server, facts))


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_rest_that_never_filled_the_buffer_does_not_keep_the_connection_either(loop: str) -> None:
    unsent: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        (connection,) = server.server.server_state.connections
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]}
        )
        while not connection.transport.get_write_buffer_size():
            await send({"type": "http.response.body", "body": b"x" * 16384, "more_body": True})
            await asyncio.sleep(0.001)
        await send({"type": "http.response.body", "body": b"x"})
        unsent.append(connection.transport.get_write_buffer_size())

    with running(app, QUICK, loop) as server, server.client() as client:
        client.send(GET)
        wait_for(lambda: bool(unsent))
        assert 0 < unsent[0] < 65536
        wait_for(lambda: not server.server.server_state.connections)


def test_the_rest_of_an_answer_that_nobody_reads_does_not_keep_the_connection() -> None:
    size, begun = 8 << 20, []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(True)
        headers = [(b"content-length", str(size).encode()), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x" * size})

    with running(app, QUICK) as server, server.client() as client:
        client.send(GET)
        wait_for(lambda: bool(begun))
        wait_for(lambda: not server.server.server_state.connections)
