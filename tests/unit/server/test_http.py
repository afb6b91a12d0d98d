"""The HTTP floor against real sockets: each fault of a client has its status and its time, and
harms nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.server.raw_http import (
    GET,
    QUICK,
    Client,
    Echo,
    in_time,
    post,
    running,
    until_disconnect,
    wait_for,
)

from freight.serve.transport.http import server_config
from freight.serve.transport.http_limits import HttpLimits

pytestmark = pytest.mark.clock

CHUNKED = "Transfer-Encoding: chunked"


def get(*headers: str) -> bytes:
    return (
        "\r\n".join(["GET /x HTTP/1.1", "Host: localhost", *headers]).encode("latin-1")
        + b"\r\n\r\n"
    )


FAULTS = {
    "header of 64 KB": (get("X-Long: " + "a" * 65536), 431),
    "header of 64 KB without end": (GET[:-2] + b"X-Long: " + b"a" * 65536, 431),
    "header of 17 KB without end": (GET[:-2] + b"X-Long: " + b"a" * 17_000, 431),
    "2,000 headers": (get(*[f"X-{i}: 1" for i in range(2000)]), 431),
    "101 headers": (get(*[f"X-{i}: 1" for i in range(100)]), 431),
    "path of 64 KB": (b"GET /" + b"a" * 65536, 431),
    "folded header": (get("X-A: 1\r\n 2"), 400),
    "bare line feeds": (GET.replace(b"\r\n", b"\n"), 400),
    "NUL in a header": (get("X-A: \0"), 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /x\r\n\r\n", 400),
    "no colon": (get("X-A"), 400),
    "space before the colon": (get("X-A : 1"), 400),
    "Host with a path": (GET.replace(b"localhost", b"x/health?"), 400),
    "Host with a user": (GET.replace(b"localhost", b"a@b"), 400),
    "empty Host": (GET.replace(b"localhost", b""), 400),
    "no Host": (GET.replace(b"Host: localhost\r\n", b""), 400),
    "two Hosts": (get("Host: localhost"), 400),
    "another server's address": (GET.replace(b"/x", b"http://example.com/"), 400),
    "CONNECT": (GET.replace(b"GET /x", b"CONNECT example.com:443"), 400),
    "both lengths": (post(b"0\r\n\r\n", "Content-Length: 5", CHUNKED), 400),
    "both lengths, the other way": (post(b"0\r\n\r\n", CHUNKED, "Content-Length: 5"), 400),
    "two equal lengths": (post(b"ab", "Content-Length: 2", "Content-Length: 2"), 400),
    "negative length": (post(b"", "Content-Length: -1"), 400),
    "length with a sign": (post(b"ab", "Content-Length: +2"), 400),
    "list of lengths": (post(b"ab", "Content-Length: 2, 2"), 400),
    "chunks in gzip": (post(b"0\r\n\r\n", "Transfer-Encoding: gzip, chunked"), 400),
    "chunks twice": (post(b"0\r\n\r\n", CHUNKED, CHUNKED), 400),
    "chunks in HTTP/1.0": (post(b"0\r\n\r\n", CHUNKED).replace(b"HTTP/1.1", b"HTTP/1.0"), 400),
    "chunk of no size": (post(b"zz\r\n", CHUNKED), 400),
    "chunk extension of 64 KB": (post(b"1;" + b"a" * 65536, CHUNKED), 400),
    "trailer of 64 KB": (post(b"1\r\na\r\n0\r\nX-A: " + b"a" * 65536, CHUNKED), 400),
    "length over the limit": (post(b"", "Content-Length: 4194305"), 413),
    "length of 18 digits": (post(b"", "Content-Length: " + "9" * 18), 413),
    "half a request line": (b"GET /", 408),
    "half a header": (GET[:-6], 408),
    "half a body": (post(b"abc", "Content-Length: 10"), 408),
    "no body": (post(b"", "Content-Length: 10"), 408),
    "half a chunk": (post(b"5\r\nab", CHUNKED), 408),
    "no last chunk": (post(b"1\r\na\r\n", CHUNKED), 408),
}


@pytest.fixture(scope="module")
def quick() -> Any:
    app = Echo()
    with running(app, QUICK) as server:
        yield server, app


@pytest.fixture(scope="module")
def patient() -> Any:
    """For requests that a machine which stands still may not make late."""
    app = Echo()
    with running(app) as server:
        yield server, app


@pytest.mark.parametrize(("request_bytes", "status"), FAULTS.values(), ids=FAULTS)
def test_a_fault_has_its_status_and_ends_the_connection(
    quick: Any, request_bytes: bytes, status: int
) -> None:
    server, _ = quick
    with server.client() as client:
        answer = client.ask(request_bytes)
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert set(answer.error()) == {"message", "type", "param", "code"}
        assert answer.error()["type"] in ("invalid_request_error", "timeout_error")
        assert client.ended()
    assert server.ask(GET).status == 200


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_faults_on_both_event_loops(loop: str) -> None:
    with running(Echo(), QUICK, loop) as server:
        for name in (
            "header of 64 KB",
            "header of 17 KB without end",
            "half a header",
            "half a body",
            "length over the limit",
        ):
            request_bytes, status = FAULTS[name]
            assert server.ask(request_bytes).status == status
    with running(Echo(), loop=loop) as server:
        assert server.ask(post(b"x" * 300_000)).status == 200


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8000", "127.0.0.1", "[::1]:80", "my_box.lan", "xn--bcher-kva.de"],
)
def test_hosts_that_are_fine(patient: Any, host: str) -> None:
    assert patient[0].ask(GET.replace(b"localhost", host.encode())).status == 200


def test_requests_that_are_fine(patient: Any) -> None:
    server, app = patient
    assert server.ask(get(*[f"X-{i}: 1" for i in range(99)])).status == 200
    assert server.ask(get("X-Long: " + "a" * 16000)).status == 200
    assert server.ask(b"\r\n" + GET).status == 200
    assert server.ask(b"GET /x HTTP/1.0\r\n\r\n").status == 200
    upgrade = "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQA"
    app.received = 0
    assert (
        b'"received": 3' in server.ask(post(b"abc", *upgrade)).body
    )  # Java's client asks this of every server
    app.received = 0
    assert b'"received": 3' in server.ask(post(b"1\r\na\r\n2\r\nbc\r\n0\r\n\r\n", CHUNKED)).body
    with server.client() as client:
        client.send(post(b"abc", "Expect: 100-continue")[:-3])
        assert client.file.readline() == b"HTTP/1.1 100 Continue\r\n"
        client.file.readline()
        assert client.ask(b"abc").status == 200


def test_what_follows_a_body_in_chunks_is_no_header(patient: Any) -> None:
    server, app = patient
    with server.client() as client:
        client.send(post(b"1\r\na\r\n0\r\nAuthorization: Bearer x\r\n\r\n", CHUNKED))
        assert client.read().status == 200
    assert b"authorization" not in dict(app.seen[-1]["headers"])


def test_a_request_hidden_behind_a_body_in_chunks_is_not_served(patient: Any) -> None:
    server, app = patient
    with server.client() as client:
        client.send(
            post(
                b"0\r\n\r\n" + GET.replace(b"/x", b"/hidden").replace(b"localhost", b"x/?"), CHUNKED
            )
        )
        assert client.file.read().count(b"HTTP/1.1 ") == 1
    assert "/hidden" not in [scope["path"] for scope in app.seen]


def test_requests_in_one_packet_are_answered_in_order(patient: Any) -> None:
    with patient[0].client() as client:
        client.send(b"".join(post(b"abc", path=f"/{i}") for i in range(50)))
        assert [client.read().body.split(b'"')[3].decode() for _ in range(50)] == [
            f"/{i}" for i in range(50)
        ]


def test_a_body_may_come_in_small_pieces() -> None:
    def attempt() -> bool:
        with server.client() as client:
            for piece in (GET[i : i + 1] for i in range(len(GET))):
                client.send(piece)
            assert client.read().status == 200
            client.send(post(b"", "Content-Length: 8"))
            for _ in range(8):  # longer in all than the time without a byte
                time.sleep(0.08)
                client.send(b"x")
            return client.read().status == 200

    with running(Echo(), HttpLimits(body_seconds=0.5)) as server:
        assert in_time(attempt)


def test_a_body_that_never_ends_has_an_end() -> None:
    def attempt() -> bool:
        begun = time.monotonic()
        with server.client() as client:
            client.send(post(b"", "Content-Length: 100000"))
            client.socket.settimeout(0.05)
            while time.monotonic() - begun < 300:
                client.send(b"x")
                with contextlib.suppress(TimeoutError):
                    assert client.socket.recv(12) == b"HTTP/1.1 408"
                    return time.monotonic() - begun > 0.3  # or nothing came for too long
        return False

    with running(Echo(), HttpLimits(body_seconds=0.2, body_total=0.4)) as server:
        assert in_time(attempt)


def test_an_idle_connection_is_closed() -> None:
    def attempt(first: bytes) -> bool:
        begun = time.monotonic()
        with server.client() as client:
            if first == GET:
                try:
                    assert client.ask(first).status == 200
                except (EOFError, ConnectionResetError):  # it was idle for too long before
                    return False
            else:
                client.send(first)
            assert client.ended()
            assert time.monotonic() - begun > 0.2
            return True

    with running(Echo(), HttpLimits(idle_seconds=0.3)) as server:
        for first in (b"", GET, b"\r\n"):
            assert in_time(lambda first=first: attempt(first))  # type: ignore[misc]


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_an_end_closes_the_connections_that_linger(loop: str) -> None:
    with running(Echo(), HttpLimits(linger_seconds=60), loop) as server, server.client() as client:
        assert client.ask(FAULTS["header of 64 KB without end"][0]).status == 431
        (lingers,) = server.server.server_state.connections
        assert not lingers.transport.is_closing()
        server.server.should_exit = True
        deadline = time.monotonic() + 300
        while not lingers.transport.is_closing() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lingers.transport.is_closing()


def test_a_client_that_leaves_with_a_second_request_waiting_ends_the_first() -> None:
    gone: list[float] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await until_disconnect(receive)
        gone.append(time.monotonic())

    with running(app, QUICK) as server:
        with server.client() as client:
            client.send(GET + GET)
            client.file.readline()
        wait_for(lambda: len(gone) == 1)
        with server.client() as client:  # one that sends requests without end while one runs
            client.send(GET * 2000)
            assert client.file.read().count(b"HTTP/1.1 200") <= 1
        wait_for(lambda: len(gone) == 2)


async def refuses(scope: Any, receive: Any, send: Any) -> None:
    """Answers without reading the body."""
    await send(
        {"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]}
    )
    await send({"type": "http.response.body", "body": b"no"})


def test_an_answer_to_a_client_that_waits_to_send_its_body_is_the_last() -> None:
    with running(refuses) as server, server.client() as client:
        assert client.ask(post(b"", "Content-Length: 3", "Expect: 100-continue")).status == 401
        assert (
            client.ended()
        )  # whether the body comes is unknown, so where the next request begins is too


def test_a_client_can_read_a_refusal_while_it_still_sends() -> None:
    with running(Echo(), HttpLimits(linger_seconds=300)) as server, server.client() as client:
        client.send(post(b"", "Content-Length: 4194305") + b"x" * 100_000)
        for _ in range(3):
            time.sleep(0.05)
            client.socket.sendall(
                b"x" * 1000
            )  # no reset, which would take the answer away on some systems
        assert client.read().status == 413
        client.socket.shutdown(socket.SHUT_WR)
        assert client.file.read(1) == b""


def test_no_refusal_is_written_into_an_answer_that_began() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await until_disconnect(receive)

    def attempt() -> bool:
        with server.client() as client:
            client.send(post(b"abc", "Content-Length: 10"))
            if client.file.readline() != b"HTTP/1.1 200 OK\r\n":  # it was refused before it began
                return False
            try:
                rest = client.file.read()
            except ConnectionResetError:
                rest = b""
            assert b"408" not in rest
            return True

    with running(app, QUICK) as server:
        assert in_time(attempt)


def test_an_answer_before_the_body_keeps_the_connection_where_the_body_has_an_end() -> None:
    with running(refuses) as server, server.client() as client:
        assert client.ask(post(b"x" * 100_000)).status == 401
        assert client.ask(post(b"abc")).status == 401

    def attempt() -> bool:
        with server.client() as client:  # answered, and the body stalls
            status = client.ask(post(b"", "Content-Length: 3")).status
            assert client.ended()
            return status == 401

    with running(refuses, QUICK) as server:
        assert in_time(attempt)
    with running(refuses) as server, server.client() as client:
        client.send(post(b"", CHUNKED))
        assert client.read().status == 401
        for _ in range(128):
            client.send(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        assert client.ended()


PARTS = [b"GET", b" ", b"/x", b"HTTP/1.1", b"\r\n", b"\n", b"Host: a", b":", b"\0", b"5"]


@settings(max_examples=150)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.lists(
            st.sampled_from(
                [b"GET", b" ", b"/x", b"HTTP/1.1", b"\r\n", b"\n", b"Host: a", b":", b"\0", b"5"]
            )
        ).map(b"".join),
        st.binary(max_size=50).map(lambda junk: post(junk, CHUNKED)),
        st.binary(max_size=50).map(lambda junk: GET[:-2] + junk + b"\r\n\r\n"),
    )
)
def test_no_bytes_crash_the_server(quick: Any, data: bytes) -> None:
    server, _ = quick
    with Client(server.port) as client:
        client.send(data)
        client.socket.shutdown(1)
        try:
            while client.socket.recv(4096):
                pass
        except ConnectionResetError:
            pass
    assert server.ask(GET).status == 200


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_the_system_looks_for_clients_that_are_gone(loop: str) -> None:
    found: list[tuple[int, int]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        (connection,) = server.server.server_state.connections
        options = connection.transport.get_extra_info("socket")
        keep = options.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        found.append((keep, options.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)))
        await refuses(scope, receive, send)

    with running(app, HttpLimits(write_seconds=7), loop) as server:
        assert server.ask(GET).status == 401
    assert found == [(1, 7000)]


def test_a_server_that_ends_finishes_what_runs_and_closes_what_is_idle() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        await asyncio.sleep(0.4)
        await send({"type": "http.response.body", "body": b"ended"})

    with running(app) as server, server.client() as client, server.client() as idle:
        client.send(GET)
        assert b"200" in client.file.readline()
        server.server.should_exit = True
        assert idle.ended()
        assert b"ended" in client.file.read()


def test_the_configuration_trusts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
    config = server_config(Echo(), HttpLimits(max_connections=10**6))
    assert (config.proxy_headers, config.server_header, config.access_log, config.ws) == (
        False,
        False,
        False,
        "none",
    )
    assert config.http.limits.max_connections == 920  # type: ignore[union-attr]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (-1, -1))
    assert server_config(Echo(), HttpLimits()).http.limits == HttpLimits()  # type: ignore[union-attr]
    with running(Echo()) as server:
        answer = server.ask(get("X-Forwarded-For: 1.2.3.4"))
    assert "server" not in answer.headers
