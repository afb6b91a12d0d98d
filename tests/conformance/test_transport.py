"""What HTTP itself allows a client to do wrong: long headers, half requests, two framings, early
ends.
"""

from __future__ import annotations

import json
import socket
import time

import pytest
from tests.conformance.wire import Api, status_of

pytestmark = pytest.mark.clock

# seconds within which a server has given up on half a request: more than 10 for headers, 30 for a
# body
SLOW = 45.0


def head(api: Api, *lines: str, method: str = "POST", path: str = "/v1/completions") -> bytes:
    fields = ["Host: test", *(f"{name}: {value}" for name, value in api.headers().items()), *lines]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *fields, "", ""]).encode()


def test_a_header_of_64_kilobytes_is_431(api: Api) -> None:
    assert (
        status_of(api.raw(head(api, "X-Long: " + "x" * 2**16, method="GET", path="/v1/models")))
        == 431
    )


def test_two_thousand_headers_are_431(api: Api) -> None:
    assert (
        status_of(
            api.raw(head(api, *(f"X-{i}: 1" for i in range(2000)), method="GET", path="/v1/models"))
        )
        == 431
    )


def test_a_declared_body_over_the_limit_is_413_before_it_comes(api: Api) -> None:
    lines = ("Content-Type: application/json", "Content-Length: 1000000000")
    assert status_of(api.raw(head(api, *lines), 20)) == 413


def test_a_chunked_body_without_end_is_413_at_the_limit(api: Api) -> None:
    begin = head(api, "Content-Type: application/json", "Transfer-Encoding: chunked")
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    assert status_of(api.raw(begin + chunk * 100, 20)) == 413


def test_two_framings_are_400(api: Api) -> None:
    lines = ("Content-Type: application/json", "Content-Length: 5", "Transfer-Encoding: chunked")
    assert status_of(api.raw(head(api, *lines) + b"0\r\n\r\n", 20)) == 400


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0\0\0\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
    ],
)
def test_what_is_no_http_is_400_or_closed(api: Api, data: bytes) -> None:
    assert status_of(api.raw(data, 20)) in (0, 400, 505)


@pytest.mark.slow
def test_half_a_header_is_408_or_closed(api: Api) -> None:
    assert status_of(api.raw(b"POST /v1/completions HTTP/1.1\r\nHost: te", SLOW)) in (0, 408)


@pytest.mark.slow
def test_half_a_body_is_408(api: Api) -> None:
    lines = ("Content-Type: application/json", "Content-Length: 100")
    assert status_of(api.raw(head(api, *lines) + b'{"prompt": ', SLOW)) == 408


def test_two_hundred_idle_connections_harm_nobody(api: Api) -> None:
    idle = [socket.create_connection(api.place, timeout=300) for _ in range(200)]
    try:
        assert api.complete(max_tokens=1).status == 200
    finally:
        for one in idle:
            one.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("wait", [0.0, 0.2], ids=["at-once", "later"])
def test_a_client_that_leaves_ends_its_request(api: Api, stream: bool, wait: float) -> None:
    """The next request is served at once, and no request runs any longer where the server counts
    them.
    """
    fields = {
        "model": api.model,
        "prompt": "x",
        "max_tokens": 500,
        "ignore_eos": True,
        "n": 4,
        "stream": stream,
    }
    body = json.dumps(fields).encode()
    request = head(api, "Content-Type: application/json", f"Content-Length: {len(body)}") + body
    with socket.create_connection(api.place, timeout=300) as connection:
        connection.sendall(request)
        time.sleep(wait)
    began = idle_since = time.monotonic()
    while (
        time.monotonic() - idle_since < 0.5
    ):  # the request may not be counted yet when the client has left
        assert time.monotonic() - began < 300, "the request runs on"
        time.sleep(0.05)
        if _running(api):
            idle_since = time.monotonic()


def _running(api: Api) -> float:
    """Requests that run or wait, of all labels, as /metrics counts them."""
    lines = [
        line for line in api.get("/metrics").body.decode().splitlines() if not line.startswith("#")
    ]
    names = ("num_requests_running", "num_requests_waiting{", "num_requests_waiting ")
    return sum(float(line.split()[-1]) for line in lines if any(name in line for name in names))
