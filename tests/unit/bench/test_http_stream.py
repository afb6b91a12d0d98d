"""The load's HTTP client: an answer is read the same however the network cut it, and what is broken
has a kind.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.errors import ConfigError
from freight.lab.bench.http_stream import Address, AnswerReader, EventReader, StreamError

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(places)]


@given(
    st.lists(st.binary(min_size=1, max_size=20)),
    st.lists(st.integers(0, 10**6), max_size=30),
    st.booleans(),
)
def test_a_chunked_body_is_read_however_it_is_cut(
    chunks: list[bytes], cuts: list[int], trailer: bool
):
    body = b"".join(b"%x;note=1\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    end = b"0\r\n" + (b"A: b\r\n" if trailer else b"") + b"\r\n"
    reader = AnswerReader()
    found = b"".join(reader.feed(piece) for piece in pieces(HEAD + body + end, cuts))
    assert found == b"".join(chunks)
    assert reader.complete
    assert reader.keeps_alive
    reader.close()


@given(
    st.lists(st.binary(max_size=30).filter(lambda b: not {10, 13} & {*b})),
    st.lists(st.integers(0, 10**6)),
)
def test_events_are_read_however_they_are_cut(events: list[bytes], cuts: list[int]):
    for end in (b"\n", b"\r\n"):
        stream = b"".join(
            b": note" + end * 2 + b"event: x" + end + b"data: " + event + end * 2
            for event in events
        )
        reader = EventReader()
        assert [one for piece in pieces(stream, cuts) for one in reader.feed(piece)] == events


def test_lines_of_data_are_one_event():
    assert EventReader().feed(b"data: a\ndata:b\n\nid: 1\n\n") == [b"a\nb"]


def test_a_body_with_a_length_and_one_that_ends_with_the_connection():
    reader = AnswerReader()
    assert reader.feed(b"HTTP/1.1 404 Not Found\r\ncontent-length: 3\r\n\r\nab") == b"ab"
    assert not reader.complete
    assert reader.feed(b"c") == b"c"
    assert (reader.complete, reader.keeps_alive, reader.status) == (True, True, 404)
    open_end = AnswerReader()
    assert open_end.feed(b"HTTP/1.1 200 OK\r\n\r\nabc") == b"abc"
    open_end.close()
    assert (open_end.complete, open_end.keeps_alive) == (True, False)


def test_an_interim_answer_is_not_the_answer():
    reader = AnswerReader()
    assert (
        reader.feed(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
        == b"x"
    )
    assert reader.status == 200


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000, "malformed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nxy", "malformed"),
        (HEAD + b"zz\r\n", "malformed"),
        (HEAD + b"-1\r\n", "malformed"),
        (HEAD + b"2\r\nabc\r\n", "malformed"),
        (HEAD + b"2\r\nab\r\n", "closed"),
        (HEAD, "closed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nxy", "closed"),
        (b"", "closed"),
    ],
)
def test_what_is_broken_has_a_kind(data: bytes, kind: str):
    def read(reader: AnswerReader) -> None:
        reader.feed(data)
        reader.close()

    with pytest.raises(StreamError) as error:
        read(AnswerReader())
    assert error.value.kind == kind


@pytest.mark.parametrize(
    ("url", "host", "port", "secure", "prefix"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, False, ""),
        ("http://localhost:1/v1", "localhost", 1, False, ""),
        ("https://api.example.com/openai/v1/", "api.example.com", 443, True, "/openai"),
        ("http://[::1]:80", "::1", 80, False, ""),
    ],
)
def test_addresses(url: str, host: str, port: int, secure: bool, prefix: str):
    assert Address.parse(url) == Address(url, host, port, secure, prefix)
    assert f"Host: {'[::1]' if host == '::1' else host}:{port}\r\n".encode() in Address.parse(
        url
    ).head("GET", "/", 0, {})


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:b", "http://a?x=1", "http://u:p@a"]
)
def test_what_is_no_address_is_refused(url: str):
    with pytest.raises(ConfigError, match=r"write http://127\.0\.0\.1:8000"):
        Address.parse(url)
