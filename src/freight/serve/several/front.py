"""Front: what clients of several models talk to. It reads which model a request is for, waits until
that is loaded, and passes the request on to its routes. A body is read and parsed once, here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from urllib.parse import parse_qs

from prometheus_client.metrics_core import Metric

from freight.base.fields import JsonDict
from freight.errors import shown
from freight.serve.app import LARGE, UNTRACED, ReadBody, guarded_app
from freight.serve.documented import with_several
from freight.serve.observe.metrics import Metrics, merged, render
from freight.serve.observe.traces import Traces
from freight.serve.openai.fields import ANY_MODEL
from freight.serve.page import PAGE
from freight.serve.processes.log import current_model, current_request
from freight.serve.service import count_refusal, refused_request
from freight.serve.settings import ServerSettings
from freight.serve.several.models import Model, Models, ModelState
from freight.serve.tgi.request import as_tgi_error
from freight.serve.transport.body import Receive, parse_object, read_body
from freight.serve.transport.errors import ApiError, took_too_long
from freight.serve.transport.http_limits import HttpLimits
from freight.serve.transport.middleware import TGI_PATHS, App, Scope, Send, header
from freight.serve.transport.shares import BodyShares
from freight.serve.transport.slices import json_bytes

HEADER = b"x-freight-model"
_COMMANDS = frozenset({"/models/load", "/models/unload"})
_TAKES = {"/models": "GET, HEAD", **dict.fromkeys(_COMMANDS, "POST")}  # those that no model has
_HEALTH = frozenset({"/health", "/ping"})
_STATE = frozenset({"/state", "/state/stream"})  # nothing is loaded to be looked at
_DOCUMENT = "/openapi.json"
_OWN = frozenset({"/v1/models", "/models", "/metrics", _DOCUMENT, *_HEALTH})


def front(
    models: Models,
    settings: ServerSettings,
    limits: HttpLimits,
    metrics: Metrics,
    traces: Traces | None = None,
) -> App:
    """Build the server as an ASGI application. `metrics` and `traces`: of what no model has answered."""
    made = Front(models, settings, limits, metrics, traces)
    return guarded_app(made, made.keys, metrics, settings, limits, made.paths)


class Front:
    """An ASGI application before those of the models."""

    def __init__(
        self,
        models: Models,
        settings: ServerSettings,
        limits: HttpLimits,
        metrics: Metrics,
        traces: Traces | None = None,
    ) -> None:
        self._models = models
        self._traces = traces
        self._settings = settings
        self._limits = limits
        self._metrics = metrics
        self.keys = models.models[0].serving.keys
        self._bodies = BodyShares(self.keys, limits.held_bytes)
        first = models.models[0]
        app, self._posts, gets = first.serving.routes(limits)
        self._apps: dict[Model, App] = {first: app}
        self._document = app.openapi
        self._gets = gets - _OWN - {"/version"}
        self.paths = frozenset({*self._posts, *gets, *_OWN, *_COMMANDS})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._any(scope, receive, send)
            return
        state = scope["state"]
        current_request.set(state["request_id"])
        arrival = time.monotonic()
        try:
            await self._route(scope, receive, send)
        except ApiError as error:
            path = scope["path"]
            shaped = as_tgi_error(error) if path in TGI_PATHS else error
            if "is_counted" not in state:  # by the routes of its model
                self._count(scope, shaped, time.monotonic() - arrival)
            raise shaped from None

    def _count(self, scope: Scope, error: ApiError, seconds: float) -> None:
        """Count a refusal, and make its span where an answer of a model was asked for."""
        path = scope["path"]
        state = scope["state"]
        request_id = state["request_id"]
        route = path if path in self.paths else "other"
        count_refusal(self._metrics, error, request_id, state["key_name"], route)
        if self._traces is not None and path in self._posts - UNTRACED:
            self._traces.record(refused_request(error, request_id, route, seconds))

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        method = scope["method"]
        if path in self.paths:
            scope["route"] = SimpleNamespace(path=path)  # for the count of answers by route
        if method == "POST" and path in _COMMANDS:
            await self._command(scope, receive, send)
        elif method == "POST" and path in self._posts:
            await self._pass_body(scope, receive, send)
        elif method in ("GET", "HEAD") and (path in _OWN or path.startswith("/v1/models/")):
            await self._own(scope, send)
        elif method in ("GET", "HEAD") and path in _STATE:
            model = self._model_of(scope, None)
            if model.state is not ModelState.LOADED:
                raise _not_loaded(model)
            await self._app_of(model)(scope, receive, send)
        elif method in ("GET", "HEAD") and path in self._gets and path not in PAGE:
            await self._pass(scope, receive, send, self._model_of(scope, None))
        elif path in _TAKES:
            takes = _TAKES[path]
            raise ApiError(
                405,
                f"this path does not take {method}; it takes {takes}",
                headers={"Allow": takes},
            )
        else:
            await self._any(scope, receive, send)

    def _app_of(self, model: Model) -> App:
        if model not in self._apps:
            self._apps[model] = model.serving.routes(self._limits)[0]
        return self._apps[model]

    async def _any(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is the same for all models: the page, and paths that there are not."""
        await self._app_of(self._models.models[0])(scope, receive, send)

    async def _pass_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._bodies.place(scope["state"]["key_name"]) as hold:
            body = await self._read(scope, receive, hold)
            model = self._model_of(scope, body.content.get("model"))
            current_model.set(model.name)
            place = await self._entered(model, scope, receive)
        if not place:
            return
        scope["state"]["body"] = body
        try:
            await self._app_of(model)(scope, receive, send)
        finally:
            self._models.leave(model)

    async def _pass(self, scope: Scope, receive: Receive, send: Send, model: Model) -> None:
        current_model.set(model.name)
        if await self._entered(model, scope, receive):
            try:
                await self._app_of(model)(scope, receive, send)
            finally:
                self._models.leave(model)

    async def _read(self, scope: Scope, receive: Receive, hold: Callable[[int], None]) -> ReadBody:
        raw = await read_body(receive, scope["headers"], self._limits, hold)
        if len(raw) <= LARGE:
            return ReadBody(parse_object(raw, self._limits), len(raw))
        return ReadBody(await asyncio.to_thread(parse_object, raw, self._limits), len(raw))

    async def _entered(self, model: Model, scope: Scope, receive: Receive) -> bool:
        """Wait until a model takes a request; False if its client has left. Raises ApiError."""
        place = self._models.enter(model, scope["state"]["key_name"])
        if place.done():
            return True
        leaving = asyncio.ensure_future(_left(receive))
        is_taken = False
        try:
            seconds = self._settings.request_timeout
            await asyncio.wait(
                (place, leaving), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if not place.done() and not leaving.done():
                raise took_too_long()
            if leaving.done():
                return False
            place.result()
            is_taken = True
            return True
        finally:
            leaving.cancel()
            if not is_taken:
                self._models.withdraw(model, place)

    def _model_of(self, scope: Scope, name: object) -> Model:
        """Return the model that the body's field, the query or the header names, else the default
        one. Raises ApiError.
        """
        if name is not None and not isinstance(name, str):
            raise ApiError(400, f"model is {shown(name)}; it must be a string", param="model")
        if self._is_any(name):
            name = named_outside(scope)
        if name is None or self._is_any(name):
            return self._models.default()
        return self._models.find(name)

    def _is_any(self, name: str | None) -> bool:
        """Return whether a name stands for any model: a placeholder that no model is called."""
        return name is None or (name in ANY_MODEL and not self._models.has(name))

    async def _command(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._bodies.place(scope["state"]["key_name"]) as hold:
            body = (await self._read(scope, receive, hold)).content
        name = body.get("model")
        others = sorted(set(body) - {"model"})
        if not isinstance(name, str) or others:
            raise ApiError(400, 'send {"model": NAME}', param=others[0] if others else "model")
        model = self._models.find(name)
        if scope["path"] == "/models/load":
            self._models.load(model)
        else:
            self._models.unload(model, self._settings.drain_timeout)
        await _send(send, {"success": True})

    async def _own(self, scope: Scope, send: Send) -> None:
        path = scope["path"]
        if path == "/metrics":
            accept = header(scope, b"accept")
            text, kind = render(
                _All(self._models, self._metrics), (accept or b"").decode("latin-1")
            )
            await _send_bytes(send, 200, text, kind.encode())
        elif path == _DOCUMENT:
            await _send(send, with_several(self._document(), bool(self.keys)))
        elif path in _HEALTH:
            await _send(send, *self._health(scope))
        elif path in ("/v1/models", "/models"):
            rows = [row for model in self._models.models for row in model.rows()]
            await _send(send, {"object": "list", "data": rows})
        else:
            name = path.removeprefix("/v1/models/")
            rows = self._models.find(name).rows()
            await _send(send, next((row for row in rows if row["id"] == name), rows[0]))

    def _health(self, scope: Scope) -> tuple[JsonDict, int]:
        """Return the answer of /health: of a model that is named, else of the server."""
        if self._models.draining:
            return {"status": "draining", "message": "the server is shutting down"}, 503
        if named_outside(scope):
            model = self._model_of(scope, None)
            if model.state is not ModelState.LOADED or not model.is_ready:
                error = _not_loaded(model)
                return {"status": error.code, "message": error.message}, 503
        return {"status": "ok"}, 200


class _All:
    """The series of all models, and of what none has answered."""

    def __init__(self, models: Models, metrics: Metrics) -> None:
        self._models = models
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        of_front = (
            metric
            for metric in self._metrics.collect()
            if metric.name in ("http_requests", "vllm:admission_rejections")
        )
        return merged([*self._models.collect(), *of_front])


def named_outside(scope: Scope) -> str | None:
    """Return the name of a model in the query, else in the header; None: neither has one."""
    query: bytes = scope["query_string"]
    names = parse_qs(query.decode("utf-8", "replace")).get("model")
    if names:
        return names[-1]
    named = header(scope, HEADER)
    return None if named is None else named.decode("utf-8", "replace")


def _not_loaded(model: Model) -> ApiError:
    words = f"the model {model.name!r:.100} is not loaded: {model.failure or model.state}"
    return ApiError(503, words, code=f"model_{model.state}", headers={"Retry-After": "5"})


async def _left(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, value: object, status: int = 200) -> None:
    await _send_bytes(send, status, json_bytes(value), b"application/json")


async def _send_bytes(send: Send, status: int, body: bytes, kind: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
