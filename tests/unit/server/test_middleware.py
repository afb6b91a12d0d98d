"""What stands around every route: no path without a key but the open ones; every answer has its
shape and its id.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Mount, Route
from tests.unit.server.raw_http import Answer, Client, post, running

from freight.errors import ConfigError
from freight.serve.transport.auth import Keys
from freight.serve.transport.errors import ApiError
from freight.serve.transport.middleware import RequireKey, guarded

KEY = "sk-the-key"
PATHS = [
    "/v1/models",
    "/v1/chat/completions",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/tokenize",
    "/info",
    "/generate",
]
PATHS += ["/v1/responses", "/v1/messages", "/v1/messages/count_tokens"]
PATHS += [
    "/mounted/x",
    "/nothing",
    "//health",
    "/health/",
    "/health/../metrics",
    "/Health",
    "/health%00",
    "/ping;x",
]
METHODS = ["GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "PATCH", "TRACE", "PROPFIND"]


class Reached:
    """An app that notes what reaches it."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, Any]] = []

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        await JSONResponse({"ok": True})(scope, receive, send)


def call(app: Any, path: str, method: str = "GET", **headers: str) -> Answer:
    """One request, straight through ASGI."""
    sent: list[dict[str, Any]] = []
    pairs = [
        (name.replace("_", "-").encode(), value.encode("latin-1"))
        for name, value in headers.items()
    ]
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "headers": pairs,
    }
    scope |= {
        "query_string": b"",
        "state": {},
        "client": None,
        "server": ("x", 1),
        "scheme": "http",
        "root_path": "",
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app({**scope, "http_version": "1.1"}, receive, send))
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Answer(
        sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent[1:])
    )


def test_without_a_key_every_path_is_shut_for_every_method() -> None:
    app = Reached()
    shut = guarded(app, Keys.read([KEY]))
    for path, method in product(PATHS, METHODS):
        for headers in (
            {},
            {"authorization": "Bearer x"},
            {"x_api_key": "x"},
            {"authorization": KEY},
        ):
            answer = call(shut, path, method, **headers)
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer"), path
            assert KEY not in answer.body.decode()
    assert app.scopes == []


def test_what_is_open_without_a_key_is_open_for_reading_only() -> None:
    app = Reached()
    for path in ("/", "/health", "/ping"):
        for method in METHODS:
            answer = call(guarded(app, Keys.read([KEY])), path, method)
            assert answer.status == (200 if method in ("GET", "HEAD") else 401)
    assert call(guarded(app, Keys.read([KEY]), open_paths={"/health"}), "/").status == 401
    assert {scope["state"]["key_name"] for scope in app.scopes} == {None}


def test_the_keys_name_reaches_the_app() -> None:
    app = Reached()
    keys = Keys.read(["alice:" + KEY, "bob:other"])
    assert call(guarded(app, keys), "/v1/models", authorization=f"Bearer {KEY}").status == 200
    assert call(guarded(app, keys), "/v1/models", x_api_key="other").status == 200
    assert call(guarded(app, keys), "/health", x_api_key="other").status == 200
    assert (
        call(guarded(app, Keys.read()), "/v1/models", authorization=f"Bearer {KEY}").status == 200
    )
    assert [scope["state"]["key_name"] for scope in app.scopes] == ["alice", "bob", "bob", None]


def test_two_authorizations_are_none() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"authorization", b"Bearer x"), (b"authorization", f"Bearer {KEY}".encode())]
    scope = {"type": "http", "method": "GET", "path": "/x", "headers": headers}
    asyncio.run(RequireKey(Reached(), Keys.read([KEY]))(scope, None, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 401


def test_what_is_not_http_is_refused() -> None:
    sent: list[dict[str, Any]] = []
    app = Reached()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(guarded(app, Keys.read())({"type": "websocket", "path": "/"}, None, send))  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]
    assert app.scopes == []


def test_a_refusal_has_the_shape_that_the_paths_clients_know() -> None:
    app = guarded(Reached(), Keys.read([KEY]))
    error = call(app, "/v1/models").error()
    assert (error["type"], error["code"], error["param"]) == (
        "authentication_error",
        "invalid_api_key",
        None,
    )
    for path in ("/", "/generate", "/generate_stream", "/info"):
        body = json.loads(call(app, path, "POST").body)
        assert set(body) == {"error", "error_type"}
        assert body["error_type"] == "authentication"


async def broken(request: Request) -> None:
    raise RuntimeError("<object at 0x7f0000000000> in /usr/lib/secret.py")


async def refusing(request: Request) -> None:
    raise ApiError(429, "the queue is full", headers={"Retry-After": "3"})


async def breaking(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
    raise RuntimeError("in the middle")


async def missing(request: Request) -> JSONResponse:
    return JSONResponse({"error": {"message": "no such model", "code": "model_not_found"}}, 404)


ROUTES = [
    Route("/broken", broken, methods=["POST"]),
    Route("/generate", broken, methods=["POST"]),
    Route("/refusing", refusing),
    Route("/missing", missing),
    Mount("/breaking", breaking),
    Route("/text", lambda _: PlainTextResponse("no", 404)),
]


def test_an_unexpected_exception_gives_nothing_away(caplog: pytest.LogCaptureFixture) -> None:
    app = guarded(Starlette(routes=ROUTES), Keys.read())
    for path in ("/broken", "/generate"):
        with caplog.at_level(logging.ERROR):
            answer = call(app, path, "POST", x_request_id="r-1")
        assert (answer.status, answer.headers["x-should-retry"]) == (500, "false")
        assert answer.headers["x-request-id"] == "r-1"
        assert answer.headers["content-type"] == "application/json"
        assert not re.search(rb"0x|/usr|secret|Traceback|RuntimeError", answer.body)
        assert f"request r-1 failed: POST {path}" in caplog.text
        assert "secret.py" in caplog.text  # the cause is in the log


def test_an_exception_in_the_middle_of_an_answer_ends_the_connection() -> None:
    with (
        running(guarded(Starlette(routes=ROUTES), Keys.read())) as server,
        server.client() as client,
    ):
        client.send(b"GET /breaking/ HTTP/1.1\r\nHost: x\r\n\r\n")
        received = client.file.read()
        assert b"data: 1" in received
        assert b"middle" not in received
        assert not received.endswith(b"0\r\n\r\n")  # the client sees that it is not whole


def test_an_api_error_is_answered_as_it_says() -> None:
    answer = call(guarded(Starlette(routes=ROUTES), Keys.read()), "/refusing")
    assert (answer.status, answer.headers["retry-after"], answer.error()["type"]) == (
        429,
        "3",
        "rate_limit_error",
    )


def test_what_is_not_there_has_the_envelope() -> None:
    app = guarded(Starlette(routes=ROUTES), Keys.read())
    assert call(app, "/nothing").error()["type"] == "not_found_error"
    assert call(app, "/text").error()["type"] == "not_found_error"
    assert (
        call(app, "/missing").error()["code"] == "model_not_found"
    )  # an error of ours stays as it is
    answer = call(app, "/broken", "GET")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert "POST" in answer.error()["message"]
    assert json.loads(call(app, "/generate", "GET").body)["error_type"] == "validation"


def test_a_plain_request_id_comes_back_and_any_other_is_replaced() -> None:
    """test_log.py has what is plain."""
    app = Reached()
    shut = guarded(app, Keys.read())
    assert call(shut, "/x", x_request_id="Az-0_9.x").headers["x-request-id"] == "Az-0_9.x"
    assert app.scopes[0]["state"]["request_id"] == "Az-0_9.x"
    for other in ("", "a b", "http://127.0.0.1:9/"):
        ids = {call(shut, "/x", x_request_id=other).headers["x-request-id"] for _ in range(2)}
        assert len(ids) == 2
        assert all(re.fullmatch(r"[0-9a-f]{32}", replaced) for replaced in ids)


def test_other_origins_are_refused_unless_listed() -> None:
    origin = "https://chat.example.com"
    asked = {"origin": origin, "access_control_request_method": "POST"}
    shut, opened = (
        guarded(Reached(), Keys.read([KEY]), allow_origins=allowed) for allowed in ([], [origin])
    )
    for app, other in [(shut, origin), (opened, origin + ".evil.com"), (opened, "null")]:
        answer = call(app, "/v1/models", "OPTIONS", **{**asked, "origin": other})
        assert answer.status == (401 if app is shut else 400)
        assert "access-control-allow-origin" not in answer.headers
    wanted = "anthropic-version, authorization, content-type, x-api-key, x-stainless-lang, x-stainless-retry-count"
    answer = call(opened, "/v1/models", "OPTIONS", **asked, access_control_request_headers=wanted)
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, origin)
    assert answer.headers["access-control-allow-headers"] == wanted
    assert {"GET", "POST"} <= {*answer.headers["access-control-allow-methods"].split(", ")}
    answer = call(
        opened, "/v1/models", origin=origin
    )  # a page can read why it was refused; the key is needed all the same
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (401, origin)
    assert "access-control-allow-credentials" not in answer.headers
    readable = answer.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "x-freight-ignored", "x-freight-reproducible", "retry-after"} <= {
        *readable
    }


@pytest.mark.parametrize(
    "error", [ApiError(413, "large"), ApiError(429, "busy"), ZeroDivisionError()], ids=repr
)
def test_a_page_of_a_listed_origin_reads_every_failure(error: Exception) -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise error

    answer = call(
        guarded(failing, Keys.read(), allow_origins=["http://a:1"]),
        "/v1/models",
        origin="http://a:1",
    )
    assert answer.status == getattr(error, "status", 500)
    assert (answer.headers["access-control-allow-origin"], answer.headers["vary"]) == (
        "http://a:1",
        "Origin",
    )


@pytest.mark.parametrize(
    "origin", ["*", "chat.example.com", "https://a.com/", "https://*.a.com", "null"]
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="--allow-origin"):
        guarded(Reached(), Keys.read(), allow_origins=[origin])


@pytest.fixture(scope="module")
def shut() -> Any:
    app = Reached()
    with running(guarded(app, Keys.read([KEY]))) as server:
        yield server, app


@pytest.mark.parametrize("host", ["x/health?", "x/health#", "x?", "/health", "localhost/health"])
def test_a_host_never_opens_a_path(shut: Any, host: str) -> None:
    server, app = shut
    for path in ("/v1/models", "/metrics", "/"):
        assert server.ask(post(b"{}", path=path, host=host)).status == 400
    assert app.scopes == []


REQUESTS = st.one_of(
    st.binary(max_size=300),
    st.tuples(st.sampled_from(METHODS), st.sampled_from(PATHS), st.binary(max_size=80)).map(
        lambda parts: (
            f"{parts[0]} {parts[1]} HTTP/1.1\r\nHost: a\r\n".encode() + parts[2] + b"\r\n\r\n"
        )
    ),
)


@settings(max_examples=100)
@given(REQUESTS)
def test_no_bytes_reach_the_app_without_the_key(shut: Any, data: bytes) -> None:
    server, app = shut
    with Client(server.port) as client:
        client.send(data)
        client.socket.shutdown(1)
        try:
            while client.socket.recv(4096):
                pass
        except ConnectionResetError:
            pass
    assert app.scopes == []
    assert server.ask(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n").status == 401
