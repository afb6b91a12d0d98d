"""The head of a request: what passes the check means the same to the parser behind it."""

from __future__ import annotations

from typing import Any

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.serve.transport.errors import ApiError
from freight.serve.transport.head import read_head
from freight.serve.transport.http_limits import HttpLimits

LIMITS = HttpLimits()
LINES = [
    *(b"Host: a", b"host:b:1", b"Host: a/b", b"X: \xe9", b"X:", b" folded", b"\tX: 1", b"X\rY: 1"),
    *(b"Content-Length: 3", b"Content-Length:\t03 ", b"content-length: 0", b"Content-Length : 3"),
    *(b"Transfer-Encoding: chunked", b"transfer-encoding: Chunked", b"Transfer-Encoding: gzip"),
    *(b"Upgrade: h2c", b"Connection: Upgrade, close", b"Expect: 100-continue"),
]
FIRST = [
    b"GET / HTTP/1.1",
    b"POST /x?y#z HTTP/1.1",
    b"GET /x HTTP/1.0",
    b"GET  / HTTP/1.1",
    b"get / HTTP/1.1",
]


class Parsed:
    """What httptools makes of a head."""

    def __init__(self, raw: bytes) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = self.ended = False
        self.body = b""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(raw)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.complete = True

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.ended = True


@settings(max_examples=300)
@given(
    st.sampled_from(FIRST), st.lists(st.sampled_from(LINES) | st.binary(max_size=20), max_size=5)
)
def test_the_parser_agrees_with_the_check(first: bytes, lines: list[bytes]) -> None:
    raw = b"\r\n".join([first, *lines]) + b"\r\n\r\n"
    raw = raw[: raw.index(b"\r\n\r\n") + 4]
    try:
        head = read_head(raw, LIMITS)
    except ApiError:
        return
    parsed = Parsed(head.raw)
    assert parsed.complete
    assert parsed.ended == (head.body_bytes == 0)
    assert len([name for name, _ in parsed.headers if name == b"host"]) <= 1
    if head.body_bytes:
        parsed.parser.feed_data(b"x" * head.body_bytes)
        assert parsed.ended
        assert len(parsed.body) == head.body_bytes
    if head.body_bytes is None:
        parsed.parser.feed_data(b"1\r\na\r\n0\r\n\r\n")
        assert (parsed.ended, parsed.body) == (True, b"a")


@pytest.mark.parametrize(
    ("head", "body_bytes"),
    [
        (b"GET / HTTP/1.0", 0),
        (b"GET / HTTP/1.1\r\nHost: a", 0),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 12", 12),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked", None),
    ],
)
def test_the_length_of_the_body(head: bytes, body_bytes: Any) -> None:
    assert read_head(head + b"\r\n\r\n", LIMITS).body_bytes == body_bytes
