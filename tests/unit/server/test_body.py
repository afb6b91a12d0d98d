"""Bodies: what is refused, with which status and words, and that nothing hostile takes long."""

from __future__ import annotations

import asyncio
import http.client
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.clock import takes_less
from tests.refusals import refuses
from tests.unit.server.raw_http import Client, post, running

from freight.serve.transport.body import DisconnectedError, parse_object, read_body
from freight.serve.transport.errors import ApiError
from freight.serve.transport.http_limits import HttpLimits
from freight.serve.transport.middleware import Errors

pytestmark = pytest.mark.clock

LIMITS = HttpLimits()
MB = 1 << 20


def parsed(body: bytes) -> dict[str, Any] | ApiError:
    try:
        return parse_object(body, LIMITS)
    except ApiError as error:
        return error


def names(number: int) -> bytes:
    return json.dumps({str(name): 1 for name in range(number)}).encode()


REFUSED = {
    "nothing": (b"", "not valid JSON at byte 0"),
    "cut": (b'{"a": [1, 2', "not valid JSON at byte 11"),
    "text": (b"hello", "not valid JSON at byte 0"),
    "after what is not ASCII": ('{"é": x}'.encode(), "not valid JSON at byte 7"),
    "two": (b"{} {}", "not valid JSON at byte 3"),
    "byte order mark": (b"\xef\xbb\xbf{}", "not valid JSON at byte 0"),
    "Latin-1": (b'{"a": "\xe9"}', "not valid UTF-8 at byte 7"),
    "surrogate in UTF-8": (b'{"a": "\xed\xa0\x80"}', "not valid UTF-8 at byte 7"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not valid UTF-8 at byte 0"),
    "100,000 open arrays": (b"[" * 100_000, "more than 64 deep"),
    "65 arrays": (b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "more than 64 deep"),
    "65 objects": (b'{"a":' * 65 + b"1" + b"}" * 65, "more than 64 deep"),
    "deep after a string with a quote": (
        b'{"\\"":"\\\\","a":' + b"[" * 64 + b"]" * 64 + b"}",
        "more than 64 deep",
    ),
    "200,000 arrays": (
        b'{"a":[' + b"[]," * 200_000 + b"1]}",
        "more than 100000 arrays and objects",
    ),
    "16,385 names": (names(16_385), "an object of 16385 names; at most 16384"),
    "a name twice": (b'{"a": 1, "b": 2, "a": 1}', "'a' twice"),
    "a name twice within": (b'{"c": [{"a": {"\\u00e9": 1, "\xc3\xa9": 2}}]}', "'é' twice"),
    "NaN": (b'{"a": NaN}', "NaN is not a JSON number"),
    "infinity": (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
    "float over the range": (b'{"a": 1e999}', "too large: 1e999"),
    "100,000 digits": (b'{"a": ' + b"1" * 100_000 + b"}", "more than 100 digits"),
    "100,000 digits after the point": (b'{"a": 0.' + b"1" * 100_000 + b"}", "more than 100 digits"),
    "half a pair": (b'{"a": "\\ud83d"}', "half of a surrogate pair"),
    "half a pair as key": (b'{"\\uDE00": 1}', "half of a surrogate pair"),
    "array": (b"[]", "body is an array"),
    "string": (b'"a"', "body is a string"),
    "number": (b"1", "a number or a boolean"),
    "null": (b"null", "body is null"),
}


def test_an_object_may_have_as_many_names_as_are_allowed() -> None:
    assert parse_object(names(16_384), LIMITS)["16383"] == 1


@pytest.mark.parametrize(("body", "says"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_json_object_is_refused(body: bytes, says: str) -> None:
    assert takes_less(0.5, lambda: parsed(body))
    error = parsed(body)
    assert isinstance(error, ApiError)
    assert error.status == 400
    assert says in error.message
    assert len(error.message) < 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":' + b"[" * 63 + b"]" * 63 + b"}",
        b'{"a": "' + b"[" * 1000 + b'"}',
        b'{"a": "' + b"1" * 1000 + b'"}',
        b'{"a": "\\\\", "b": "[[\\"[["}',
        b'{"a": "\\ud83d\\ude00", "b": "\\u0000"}',
        b'{"a": "\\\\ud83d"}',
        b'{"a": 18446744073709551616, "b": 1e308, "c": -0.0}',
    ],
)
def test_what_is_fine(body: bytes) -> None:
    assert parsed(body) == json.loads(body)


NUMBER = st.integers(-(2**64), 2**64) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.none() | st.booleans() | NUMBER | st.text(max_size=20)
OBJECT = st.dictionaries(st.text(max_size=5), JSON | st.lists(JSON, max_size=4), max_size=4)


@given(OBJECT, OBJECT, st.booleans())
def test_every_object_is_read_as_it_was_written(
    outer: dict[str, Any], inner: dict[str, Any], ascii_only: bool
) -> None:
    value = {**outer, "inner": [inner, [inner]]}
    assert parsed(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary() | st.lists(st.sampled_from(list(b'[]{}":,\\u12dDeE.-'))).map(bytes))
@example(b'{"\\')
def test_any_bytes_are_an_object_or_refused(body: bytes) -> None:
    value = parsed(body)
    if isinstance(value, ApiError):
        assert value.status == 400
    else:
        assert json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


HOSTILE = {
    "escaped quotes without end": b'{"' + b'\\"' * (2 * MB - 8),
    "quotes": b'"' * (4 * MB),
    "backslashes": b'{"' + b"\\" * (4 * MB - 8),
    "pairs": b'{"a":[' + b"[]," * (MB + MB // 3 - 8) + b"[]]}",
    "closing": b"]" * (4 * MB),
    "digits": b"1" * (4 * MB),
    "floats": b'{"a":[' + b"1.5," * (MB - 8) + b"1]}",
    "blanks": b" " * (4 * MB),
    "keys": b"{" + b'"a":1,' * (MB // 2) + b'"a":1}',
    "surrogates": b'{"a":"' + b"\\ud800" * (MB // 2) + b'"}',
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_four_megabytes_take_little_time(body: bytes) -> None:
    assert len(body) <= LIMITS.body_bytes
    assert takes_less(2.5, lambda: parsed(body))  # what is not linear takes minutes


def read(
    body: bytes, limits: HttpLimits = LIMITS, *, piece: int = 1000, **headers: str
) -> dict[str, Any]:
    given_headers = {
        "content-type": "application/json",
        **{k.replace("_", "-"): v for k, v in headers.items()},
    }
    pieces = [body[i : i + piece] for i in range(0, len(body), piece)] or [b""]
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in pieces]
    messages[-1]["more_body"] = False

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    pairs = [
        (name.encode(), value.encode())
        for name, value in given_headers.items()
        if value != "absent"
    ]
    return parse_object(asyncio.run(read_body(receive, pairs, limits)), limits)


@pytest.mark.parametrize(
    "kind",
    ["application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"'],
)
def test_json_is_read_from_pieces(kind: str) -> None:
    assert read(b'{"a": "\xc3\xa9"}', piece=1, content_type=kind) == {"a": "é"}


@pytest.mark.parametrize(
    "kind",
    [
        "absent",
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/jsonp",
        "application/json; charset=latin-1",
    ],
)
def test_another_content_type_is_415_with_the_way_out(kind: str) -> None:
    with refuses(ApiError, "Content-Type: application/json") as caught:
        read(b"{}", content_type=kind)
    assert caught.value.status == 415


def test_a_compressed_body_is_415() -> None:
    with pytest.raises(ApiError, match="gzip") as caught:
        read(b"{}", content_encoding="gzip")
    assert caught.value.status == 415


def test_a_body_at_the_limit_is_read_and_one_byte_more_is_not() -> None:
    limits = HttpLimits(body_bytes=5000)
    body = b'{"a": "' + b"x" * (5000 - 9) + b'"}'
    assert len(read(body, limits)["a"]) == 4991
    for more in (body + b" ", body * 100):
        with pytest.raises(ApiError) as caught:
            read(more, limits)
        assert caught.value.status == 413
    with pytest.raises(ApiError) as caught:
        read(b"", limits, content_length="5001")
    assert (caught.value.status, caught.value.headers["Connection"]) == (413, "close")


def test_a_client_that_leaves_is_not_answered() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(DisconnectedError):
        asyncio.run(read_body(receive, [(b"content-type", b"application/json")], LIMITS))


def send_often(client: Client, chunk: bytes, times: int) -> None:
    for _ in range(times):
        client.socket.sendall(chunk)


def test_chunks_without_end_are_read_to_the_limit_and_no_further() -> None:
    taken: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def counted() -> Any:
            message = await receive()
            taken.append(len(message.get("body", b"")))
            return message

        await read_body(counted, scope["headers"], LIMITS)

    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    with running(Errors(app), HttpLimits(linger_seconds=0.3)) as server, server.client() as client:
        client.send(post(b"", "Transfer-Encoding: chunked"))
        client.socket.settimeout(2)
        # what arrives in linger_seconds is dropped unread, however much that is
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            send_often(client, chunk, 65536)  # 4 GB
        assert 4 * MB < sum(taken) < 5 * MB
    with running(Errors(app), HttpLimits(linger_seconds=0.3)) as server, server.client() as client:
        client.send(post(b"", "Transfer-Encoding: chunked"))
        client.send(chunk * 65)
        answer = client.read()
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        assert answer.error()["code"] == "body_too_large"
        assert client.ended()


@pytest.mark.parametrize("size", [5 * MB, 16 * MB])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_all_before_it_reads_sees_that_it_was_too_much(
    size: int, chunked: bool
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await read_body(receive, scope["headers"], LIMITS)

    body = b"x" * size
    with running(Errors(app), HttpLimits(linger_seconds=0.5)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        content = iter([body[: size // 2], body[size // 2 :]]) if chunked else body
        connection.request("POST", "/v1/completions", content, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 413
        assert json.loads(answer.read())["error"]["code"] == "body_too_large"
        connection.close()


def test_a_name_that_comes_twice_is_the_param_of_the_error() -> None:
    error = parsed(b'{"temperature": 0, "temperature": 1}')
    assert isinstance(error, ApiError)
    assert (error.status, error.param) == (400, "temperature")
    long = json.dumps("n" * 100_000)
    error = parsed(f"{{{long}: 0, {long}: 1}}".encode())
    assert isinstance(error, ApiError)
    assert error.param is None
    assert len(error.message) < 400
