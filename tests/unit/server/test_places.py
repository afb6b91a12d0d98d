"""Who has a place among the connections when there are more clients than places: nobody is kept out
for long.
"""

from __future__ import annotations

import contextlib
import resource
import select
from typing import Any

import pytest
from tests.refusals import assert_names
from tests.unit.server.raw_http import GET, Echo, post, running, until_disconnect, wait_for

from freight.serve.transport.http_limits import HttpLimits
from freight.serve.transport.places import asks_for_health, fitted

pytestmark = pytest.mark.clock


def test_idle_connections_over_the_cap_make_room() -> None:
    with running(Echo(), HttpLimits(max_connections=200, idle_seconds=600.0)) as server:
        clients = [server.client() for _ in range(400)]
        assert server.ask(GET).status == 200  # and not when those have been idle for too long
        assert len(server.server.server_state.connections) <= 201
        assert clients[0].ended()  # the longest idle ones went
        assert clients[-1].ask(GET).status == 200
        for client in clients:
            client.__exit__()


@pytest.mark.parametrize("begun", [b"GET /x HT", b"GET /x HTTP/1.1\r\nHost: a\r\nX: "])
def test_a_thousand_half_requests_harm_nobody(begun: bytes) -> None:
    with running(Echo(), HttpLimits(max_connections=300)) as server:
        clients = [server.client() for _ in range(1000)]
        for client in clients:
            client.send(begun)
        assert server.ask(GET).status == 200
        for client in clients:
            client.__exit__()


def test_when_every_connection_works_the_next_is_refused() -> None:
    begun, ends = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(True)
        while (await receive())["type"] != "http.disconnect":
            pass
        ends.append(True)

    with running(app, HttpLimits(max_connections=2)) as server:
        busy = [server.client(), server.client()]
        for client in busy:
            client.send(GET)
        wait_for(lambda: len(begun) == 2)
        with server.client() as third:
            answer = third.ask(GET)
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert answer.error()["type"] == "service_unavailable_error"
            assert third.ended()
        busy[0].__exit__()
        wait_for(lambda: len(ends) == 1)
        with server.client(timeout=0.3) as fourth:
            fourth.send(GET)
            assert not fourth.ended()
        busy[1].__exit__()


@pytest.mark.parametrize("path", ["/health", "/ping", "/metrics", "/health?x"])
def test_health_has_a_place_where_every_connection_works(path: str) -> None:
    echo, begun = Echo(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/x":
            return await echo(scope, receive, send)
        begun.append(True)
        return await until_disconnect(receive)

    health = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with running(app, HttpLimits(max_connections=2)) as server, contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(server.client()).send(GET)
        wait_for(lambda: len(begun) == 2)
        with server.client() as third:
            for _ in range(3):  # on one connection, as a prober does it
                assert third.ask(health).status == 200
            assert third.ask(GET).status == 503
            assert third.ended()
        for _ in range(40):  # those that ask for nothing hold no place
            stack.enter_context(server.client())
        assert server.ask(health).status == 200
        assert server.ask(post(b"{}", path=path)).status == 503
        assert len(server.server.server_state.connections) < 2 + 17


def test_the_slowest_bodies_make_room() -> None:
    echo = Echo()
    with (
        running(
            echo, HttpLimits(max_connections=20, body_seconds=600.0, body_total=600.0)
        ) as server,
        contextlib.ExitStack() as stack,
    ):
        quick = stack.enter_context(server.client())
        quick.send(post(b"a" * 200_000, "Content-Length: 200001"))
        wait_for(lambda: echo.received == 200_000)
        slow = [stack.enter_context(server.client()) for _ in range(19)]
        for client in slow:
            client.send(post(b"a", "Content-Length: 1000"))
        wait_for(lambda: echo.received == 200_000 + 19)
        assert server.ask(GET).status == 200
        told = select.select([client.socket for client in slow], [], [], 300)[0]
        (answer,) = (client.read() for client in slow if client.socket in told)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "slowest" in answer.error()["message"]
        for _ in range(60):
            stack.enter_context(server.client()).send(post(b"a", "Content-Length: 1000"))
        assert server.ask(GET).status == 200
        assert len(server.server.server_state.connections) <= 21
        assert quick.ask(b"a").status == 200  # it was not chosen


def test_a_limit_that_is_lowered_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert fitted(HttpLimits(max_connections=944)) == HttpLimits(max_connections=944)
    assert not caplog.records
    assert fitted(HttpLimits(max_connections=945)).max_connections == 944
    assert_names(caplog.text, "944", "945", "--max-connections", "1024 open files", "ulimit -n")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_connections_that_have_their_last_answer_make_room(loop: str) -> None:
    """A refusal is followed by a time in which the client can read it."""
    places, spare = 4, 16
    with running(Echo(), HttpLimits(max_connections=places, linger_seconds=600.0), loop) as server:
        clients = [server.client() for _ in range(places + spare)]
        for client in clients:
            client.send(b"GET / HTTP/9.9\r\n\r\n")
            assert select.select([client.socket], [], [], 300)[0]
        for _ in range(3):
            assert server.ask(GET).status == 200
        for client in clients:
            client.__exit__()


def test_a_question_for_health_has_no_body() -> None:
    head = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    assert asks_for_health(head, has_body=False)
    assert not asks_for_health(head, has_body=True)  # its end may never come
