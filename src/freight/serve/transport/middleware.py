"""Middleware around every route: request ids, other origins, unexpected errors, and the API key.

Plain ASGI, from outside to inside in this order (`guarded`). Denied by default: a path is open only
if it is listed. Decisions use `scope["path"]`, which is also what is routed, never a URL built from
headers.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping, Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from freight.errors import ConfigError
from freight.serve.anthropic import errors as anthropic
from freight.serve.observe.log import request_id_of, trace_id_of
from freight.serve.observe.traces import trace_headers
from freight.serve.processes.log import current_trace
from freight.serve.tgi import reply as tgi_reply
from freight.serve.transport.auth import Keys
from freight.serve.transport.body import DisconnectedError, Receive
from freight.serve.transport.errors import ApiError
from freight.serve.transport.shares import Shares

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# TEI's beside them
TGI_PATHS = frozenset({"/", "/generate", "/generate_stream", "/info", "/embed", "/predict"})
# Served to GET and HEAD without a key: the page itself holds nothing secret.
OPEN_PATHS = frozenset({"/", "/health", "/ping"})
FAILED = "the server failed on this request; its log has the cause under the request's id"

EXPOSED = (  # headers of answers that a page of another origin may read
    "x-request-id",
    "x-freight-ignored",
    "x-freight-reproducible",
    "x-should-retry",
    "retry-after",
)

_log = logging.getLogger(__name__)
_ORIGIN = re.compile(r"https?://[A-Za-z0-9._\[\]:-]+")
_SHORT = 1 << 16  # bytes, more than any error of this server: a longer body is passed through


def guarded(
    app: App,
    keys: Keys,
    *,
    open_paths: Collection[str] = OPEN_PATHS,
    allow_origins: Sequence[str] = (),
    places: int | None = None,
) -> App:
    """Wrap `app` in all middleware of this module. `places`: connections that may be open, which keys
    share; None: as many as they like.
    """
    shared = app if places is None else Shares(app, keys, places)
    inner: App = Errors(RequireKey(shared, keys, open_paths))
    if allow_origins:
        inner = allowing(inner, allow_origins)
    return RequestIds(inner)


def error_body(path: str, error: ApiError) -> dict[str, object]:
    """Return the body of an error in the shape that clients of this path expect."""
    if path in anthropic.PATHS:
        return anthropic.error_body(error)
    if path not in TGI_PATHS:
        return error.openai_body()
    return tgi_reply.error_body(error)


async def send_error(scope: Scope, send: Send, error: ApiError) -> None:
    """Send a complete error answer."""
    body = json.dumps(error_body(scope["path"], error)).encode()
    headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in error.headers.items()
    ]
    headers += [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return the value of a header that occurs once, or None if it is absent or repeated."""
    values = [value for key, value in scope["headers"] if key == name]
    return values[0] if len(values) == 1 else None


class RequestIds:
    """Gives each request an id: the client's `x-request-id` if it is valid, else a new one.

    It is in `scope["state"]["request_id"]`, in the answer's headers and in the log.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(_text(header(scope, b"x-request-id")))
        scope.setdefault("state", {})["request_id"] = request_id
        parent = _text(header(scope, b"traceparent"))
        trace_id = trace_id_of(parent)
        current_trace.set(trace_id)
        trace_headers.set(None if trace_id is None else _trace_headers(scope, parent))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [
                    pair
                    for pair in message.get("headers", [])
                    if pair[0].lower() != b"x-request-id"
                ]
                message = {**message, "headers": [*headers, (b"x-request-id", request_id.encode())]}
            await send(message)

        await self._app(scope, receive, send_with_id)


class Errors:
    """Turns exceptions into answers: an ApiError into its status, any other into an opaque 500.

    The framework's own 404, 405 and 500 get the shape of the path's API too. An exception after the
    answer began ends the connection.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        shaped = _ShapedSend(scope, send)
        try:
            await self._app(scope, receive, shaped)
            await shaped.finish()
        except DisconnectedError:
            return
        except Exception as raised:
            error = raised if isinstance(raised, ApiError) else self._unexpected(scope)
            if not shaped.started:
                await send_error(scope, send, error)

    @staticmethod
    def _unexpected(scope: Scope) -> ApiError:
        request_id = scope.get("state", {}).get("request_id", "")
        _log.exception("request %s failed: %s %s", request_id, scope["method"], scope["path"][:200])
        return ApiError(500, FAILED)


class _ShapedSend:
    """A `send` that holds back a 404, 405 or 500 until it is clear whether it has an API's shape.

    The framework's own errors do not have it, and are replaced.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._held: Message | None = None
        self._body = b""
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] in (404, 405, 500):
            self._held = message
        elif self._held is None or len(self._body) > _SHORT:
            self.started = True
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if len(self._body) > _SHORT:
                await self._pass(message.get("more_body", False))

    async def finish(self) -> None:
        """Send the answer that was held back, once the app has returned."""
        if self._held is None or self.started:
            return
        if _has_error(self._body):
            await self._pass(False)
            return
        self.started = True
        await send_error(self._scope, self._send, self._error(self._held))

    async def _pass(self, more: bool) -> None:
        assert self._held is not None
        self.started = True
        await self._send(self._held)
        await self._send({"type": "http.response.body", "body": self._body, "more_body": more})

    def _error(self, message: Message) -> ApiError:
        if message["status"] == 500:
            return ApiError(500, FAILED)
        if message["status"] == 404:
            return ApiError(
                404, "there is nothing at this path; docs/server.md lists what there is"
            )
        values = [value for name, value in message.get("headers", []) if name.lower() == b"allow"]
        allowed = b", ".join(values).decode("latin-1")
        method = self._scope["method"]
        if not allowed:
            return ApiError(405, f"this path does not take {method}")
        return ApiError(
            405,
            f"this path does not take {method}; it takes {allowed}",
            headers={"Allow": allowed},
        )


def _has_error(body: bytes) -> bool:
    try:
        value = json.loads(body)
    except ValueError:
        return False
    return isinstance(value, dict) and "error" in value


def allowing(app: App, origins: Sequence[str]) -> App:
    """Wrap `app` so that pages of these origins may call it (CORS).

    Exact origins only, such as https://chat.example.com. A page may send any header, because
    clients in JavaScript send many; none of them replaces the key. Raises ConfigError for a value
    that is not an origin: a path, a pattern, `*`.
    """
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--allow-origin {origin}: give one origin, such as https://chat.example.com"
            )
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST"),
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=EXPOSED,
    )


class RequireKey:
    """Answers 401 to requests without a known key, except GET and HEAD of open paths.

    Also closes connections that are neither HTTP nor lifespan. The key's name is in
    `scope["state"]["key_name"]`; None without a key.
    """

    def __init__(self, app: App, keys: Keys, open_paths: Collection[str] = OPEN_PATHS) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        name = self._keys.check(
            *(_text(header(scope, h)) for h in (b"authorization", b"x-api-key"))
        )
        is_open = scope["method"] in ("GET", "HEAD") and scope["path"] in self._open_paths
        if self._keys and name is None and not is_open:
            message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
            error = ApiError(
                401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
            await send_error(scope, send, error)
            return
        scope.setdefault("state", {})["key_name"] = name
        await self._app(scope, receive, send)


def _trace_headers(scope: Scope, parent: str | None) -> dict[str, str]:
    """Return a valid `traceparent` and the `tracestate` beside it, which may be in several headers."""
    assert parent is not None
    states = [value.decode("latin-1") for key, value in scope["headers"] if key == b"tracestate"]
    headers = {"traceparent": parent}
    if states:
        headers["tracestate"] = ",".join(states)
    return headers


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
