"""The routes. Each API parses a body into a Call; everything behind that is the same for all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from freight import __version__
from freight.base.fields import JsonDict
from freight.engine.adapters import LoadedAdapter
from freight.serve.adapters import (
    LoadBody,
    UnloadBody,
    parse_load,
    parse_unload,
    require_changeable,
)
from freight.serve.anthropic.messages_request import (
    CountBody,
    MessagesBody,
    parse_count,
    parse_messages,
)
from freight.serve.call import Call, Conversation, Served
from freight.serve.documented import NOT_JSON, PLAIN_TEXT, SUMMARIES, answers, document
from freight.serve.limits import ServingLimits
from freight.serve.observe.log import RequestLine, log_request
from freight.serve.observe.metrics import Metrics
from freight.serve.observe.monitor import Monitor
from freight.serve.openai.chat_request import ChatRequest, parse_chat
from freight.serve.openai.completion_request import CompletionRequest, parse_completion
from freight.serve.openai.responses_request import ResponsesBody, parse_responses
from freight.serve.page import PAGE, page_response
from freight.serve.pooling.classify_request import (
    ClassifyBody,
    PoolingBody,
    parse_classify,
    parse_pooling,
)
from freight.serve.pooling.embedding_request import EmbeddingBody, parse_embeddings
from freight.serve.pooling.rerank_request import (
    RerankBody,
    RerankRequest,
    parse_any_rerank,
    parse_rerank,
)
from freight.serve.pooling.score_request import ScoreBody, parse_score
from freight.serve.pooling.tasks import info_of, require_generating, tasks_of
from freight.serve.pooling.tei_request import (
    EmbedBody,
    PredictBody,
    TeiRerankBody,
    parse_embed,
    parse_predict,
    parse_root,
)
from freight.serve.processes.log import current_request
from freight.serve.service import Service
from freight.serve.settings import ServerSettings
from freight.serve.tgi import request as tgi
from freight.serve.tokens import (
    DetokenizeBody,
    TokenizeBody,
    detokenize,
    parse_tokenize,
    tokenizer_info,
)
from freight.serve.transport.auth import Keys
from freight.serve.transport.body import parse_object, read_body
from freight.serve.transport.errors import ApiError
from freight.serve.transport.http_limits import HttpLimits
from freight.serve.transport.middleware import App, guarded
from freight.serve.transport.shares import BodyShares
from freight.serve.transport.slices import json_bytes, json_in_slices
from freight.serve.transport.stream import AnswerResponse
from freight.serve.weight_routes import WeightRoutes

T = TypeVar("T")
Body = JsonDict
Endpoint = Callable[[Request], Awaitable[Response]]
AsError = Callable[[ApiError], ApiError]
Parse = Callable[[Body, Served, ServingLimits], Call]
ROOT = tgi.GenerateBody | EmbedBody | PredictBody | TeiRerankBody
INVOCATION = (
    ChatRequest | CompletionRequest | EmbeddingBody | RerankBody | tgi.GenerateBody | EmbedBody
)
LARGE = 1 << 16  # bytes: parsing a larger body takes longer than a step of the engine
# Served to GET without a key: nothing in them is secret.
OPEN_PATHS = frozenset({*PAGE, "/health", "/ping"})
# Served to POST without an answer of the model: they have no spans.
UNTRACED = frozenset(
    {
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)


def make_app(
    service: Service, monitor: Monitor, settings: ServerSettings, limits: HttpLimits
) -> App:
    """Build the server as an ASGI application."""
    app, posts, gets = make_routes(service, monitor, settings, limits)
    return guarded_app(app, service.keys, service.metrics, settings, limits, posts | gets)


def guarded_app(
    app: App,
    keys: Keys,
    metrics: Metrics,
    settings: ServerSettings,
    limits: HttpLimits,
    paths: Collection[str],
) -> App:
    """Wrap `app`, whose routes are `paths`, in what stands before every route."""
    inner = guarded(
        app,
        keys,
        open_paths=OPEN_PATHS,
        allow_origins=settings.allow_origins,
        places=limits.max_connections,
    )
    return _counted(inner, metrics, paths)


def make_routes(
    service: Service, monitor: Monitor, settings: ServerSettings, limits: HttpLimits
) -> tuple[FastAPI, frozenset[str], frozenset[str]]:
    """Build the routes, which nothing guards yet; returns them with the paths of POST and of GET."""
    app = FastAPI(
        title="Freight", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    routes = Routes(service, monitor, limits, service.max_sequences - settings.max_queue)
    posts: tuple[tuple[str, Endpoint, Any], ...] = (
        ("/v1/chat/completions", routes.answers(generating(parse_chat)), ChatRequest),
        ("/v1/completions", routes.answers(generating(parse_completion)), CompletionRequest),
        ("/v1/responses", routes.answers(generating(parse_responses)), ResponsesBody),
        ("/v1/messages", routes.answers(generating(parse_messages)), MessagesBody),
        ("/v1/messages/count_tokens", routes.logged(routes.count_tokens), CountBody),
        ("/generate", routes.answers(_generate(False), tgi.as_tgi_error), tgi.GenerateBody),
        ("/generate_stream", routes.answers(_generate(True), tgi.as_tgi_error), tgi.GenerateBody),
        ("/", routes.answers(_root, tgi.as_tgi_error), ROOT),
        ("/v1/embeddings", routes.answers(parse_embeddings), EmbeddingBody),
        ("/rerank", routes.answers(parse_any_rerank), RerankBody),
        ("/v1/rerank", routes.answers(parse_rerank), RerankRequest),
        ("/v2/rerank", routes.answers(parse_rerank), RerankRequest),
        ("/score", routes.answers(parse_score), ScoreBody),
        ("/v1/score", routes.answers(parse_score), ScoreBody),
        ("/classify", routes.answers(parse_classify), ClassifyBody),
        ("/pooling", routes.answers(parse_pooling), PoolingBody),
        ("/embed", routes.answers(parse_embed, tgi.as_tgi_error), EmbedBody),
        ("/predict", routes.answers(parse_predict, tgi.as_tgi_error), PredictBody),
        ("/invocations", routes.answers(_invocation), INVOCATION),
        ("/tokenize", routes.logged(routes.tokenize), TokenizeBody),
        ("/detokenize", routes.logged(routes.detokenize), DetokenizeBody),
        ("/v1/load_lora_adapter", routes.logged(routes.load_adapter), LoadBody),
        ("/v1/unload_lora_adapter", routes.logged(routes.unload_adapter), UnloadBody),
    )
    if settings.enable_weight_updates:
        changing = WeightRoutes(service, limits)
        posts += tuple(
            (path, routes.logged(endpoint), body) for path, endpoint, body in changing.posts
        )
    for path, endpoint, _ in posts:
        app.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            summary=SUMMARIES[path],
            responses=answers(path),
            response_class=Response if path in PLAIN_TEXT else JSONResponse,
            response_model=None,
        )
    gets: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("/v1/models", routes.models),
        ("/v1/models/{model_id:path}", routes.model),
        ("/info", routes.info),
        *((("/tokenizer_info", routes.tokenizer_info),) if settings.tokenizer_info else ()),
        ("/model_info", routes.model_info),
        ("/get_model_info", routes.model_info),
        ("/server_info", routes.server_info),
        ("/get_server_info", routes.server_info),
        ("/health", routes.health),
        ("/ping", routes.health),
        ("/version", routes.version),
        ("/metrics", routes.metrics),
        ("/state", routes.state),
        ("/state/stream", routes.state_stream),
    )
    if settings.enable_weight_updates:
        gets += changing.gets
    for path, endpoint in gets:
        kind = Response if path in NOT_JSON else JSONResponse
        app.add_api_route(
            path,
            endpoint,
            methods=["GET"],
            summary=SUMMARIES[path],
            responses=answers(path),
            response_class=kind,
            response_model=None,
        )
        app.add_api_route(
            path, endpoint, methods=["HEAD"], include_in_schema=False, response_model=None
        )
    for path in PAGE:
        app.add_api_route(
            path, routes.page, methods=["GET", "HEAD"], include_in_schema=False, response_model=None
        )
    bodies = {path: body for path, _, body in posts}
    document(app, bodies, settings.unknown_fields, OPEN_PATHS, bool(service.keys))
    return app, frozenset(bodies), frozenset(path for path, _ in gets)


@dataclass(frozen=True)
class ReadBody:
    """A body that was read before its route is known, in `scope["state"]["body"]`; its bytes."""

    content: Body
    size: int

    async def parsed(self, parse: Callable[[Body], T]) -> T:
        """Parse it with `parse`, a large one in a thread."""
        if self.size <= LARGE:
            return parse(self.content)
        return await asyncio.to_thread(parse, self.content)


class Routes:
    """The endpoints. They raise ApiError, which `guarded` renders in the shape of the path."""

    def __init__(
        self, service: Service, monitor: Monitor, limits: HttpLimits, max_running: int
    ) -> None:
        """Keep what the endpoints read. max_running: completions that run at once."""
        self._service = service
        self._max_running = max_running
        self._monitor = monitor
        self._limits = limits
        self._bodies = BodyShares(service.keys, limits.held_bytes)

    def answers(self, parse: Parse, as_error: AsError = lambda error: error) -> Endpoint:
        """Build the endpoint of an API that generates. `as_error` maps an error to the status that
        this API uses for it.
        """

        async def endpoint(request: Request) -> Response:
            service = self._service
            state = request.scope["state"]
            arrival = service.clock()
            try:
                call = await self._understood(
                    request, lambda body: parse(body, service.require_served(), service.limits)
                )
                answer = await service.begin(call, state["request_id"], state["key_name"])
            except ApiError as error:
                route = request.scope["route"].path
                service.trace_refusal(as_error(error), state["request_id"], route, arrival)
                raise
            return AnswerResponse(answer, call, self._headers(call), as_error)

        return self.logged(endpoint, as_error)

    def logged(self, endpoint: Endpoint, as_error: AsError = lambda error: error) -> Endpoint:
        """Wrap `endpoint` so that its refusals are counted and logged, with the status from
        `as_error`.
        """

        async def refusing(request: Request) -> Response:
            state = request.scope["state"]
            current_request.set(state["request_id"])
            try:
                return await endpoint(request)
            except ApiError as error:
                route = request.scope["route"].path
                state["is_counted"] = True
                self._service.refused(
                    as_error(error), state["request_id"], state["key_name"], route
                )
                raise as_error(error) from None

        return refusing

    async def tokenize(self, request: Request) -> Response:
        service = self._service
        served = service.require_served()
        asked = await self._understood(
            request, lambda body: parse_tokenize(body, served, service.limits)
        )
        return _json_parts(await service.tokenized(asked, request.scope["state"]["key_name"]))

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a conversation, even of one that is too long for this model."""
        service = self._service
        key_name = request.scope["state"]["key_name"]
        served = service.require_served()
        call = await self._understood(
            request, lambda body: parse_count(body, served, service.limits)
        )
        prompt = call.work[0].prompt
        assert isinstance(prompt, Conversation)
        chat = await service.render(prompt, key_name)
        _, count = await service.encode(chat, False, 0, key_name)
        return _json({"input_tokens": count}, headers=self._headers(call))

    async def detokenize(self, request: Request) -> Response:
        served = self._service.require_served()
        answer = await self._understood(request, lambda body: detokenize(body, served))
        return _json_parts(await asyncio.to_thread(json_in_slices, answer))

    async def tokenizer_info(self) -> Response:
        return _json(tokenizer_info(self._service.require_served()))

    async def models(self) -> Response:
        served = self._service.require_served()
        return _json({"object": "list", "data": model_list(served)})

    async def model(self, model_id: str) -> Response:
        served = self._service.require_served()
        if model_id in served.names:
            return _json(_model(model_id, served))
        adapter = served.adapter(model_id)
        if adapter is None:
            raise ApiError(
                404,
                f"there is no model {model_id!r:.80}; {served.offered}",
                code="model_not_found",
            )
        return _json(_adapter(adapter, served))

    async def load_adapter(self, request: Request) -> Response:
        service = self._service
        served = service.require_served()
        require_changeable(served, bool(service.keys))
        asked = await self._understood(request, lambda body: parse_load(body, served))
        await service.adapters.load(service.client, asked.name, asked.path)
        return _text(f"Success: LoRA adapter '{asked.name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        service = self._service
        require_changeable(service.require_served(), bool(service.keys))
        name = await self._understood(
            request, lambda body: parse_unload(body, service.require_served())
        )
        await service.adapters.unload(service.client, name)
        return _text(f"Success: LoRA adapter '{name}' removed successfully.")

    async def info(self) -> Response:
        service = self._service
        served = service.require_served()
        facts = service.facts
        assert facts is not None
        about = tgi.ServerFacts(
            version=__version__,
            max_concurrent_requests=service.max_sequences,
            max_prompts=service.limits.prompts if served.generates else service.limits.inputs,
            kv_cache=facts.kv_cache,
            kernels=facts.kernels,
        )
        info = tgi.info(served, service.limits.sampling, about)
        info |= {"tasks": tasks_of(served), "pooling": info_of(served.pooling)}
        if not served.generates:  # nothing has to fit behind an input
            info["max_input_tokens"] = served.max_model_len
        return _json(info)

    async def model_info(self) -> Response:
        """Answer SGLang's gateway, which asks this of a worker. Gives names, and no paths of this
        machine.
        """
        served = self._service.require_served()
        name = served.names[0]
        return _json(
            {"model_path": name, "tokenizer_path": name, "is_generation": served.generates}
        )

    async def server_info(self) -> Response:
        """Return the limits under SGLang's names, for its gateway and its benchmarks."""
        service = self._service
        served = service.require_served()
        facts = service.facts
        assert facts is not None
        capacity = facts.kv_cache["capacity_tokens"]
        return _json(
            {
                "model_path": served.names[0],
                "tokenizer_path": served.names[0],
                "served_model_name": served.names[0],
                "version": __version__,
                "tp_size": facts.ranks,
                "dp_size": 1,
                "context_length": served.max_model_len,
                "max_running_requests": self._max_running,
                "max_total_tokens": capacity,
                "max_total_num_tokens": capacity,
            }
        )

    async def health(self) -> Response:
        try:
            self._service.require_served()
        except ApiError as error:
            return _json({"status": error.code, "message": error.message}, 503, error.headers)
        return _json({"status": "ok"})

    async def version(self) -> Response:
        return _json({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        text, kind = self._service.metrics.render(request.headers.get("accept"))
        return Response(text, headers={"content-type": kind})

    async def state(self) -> Response:
        self._service.require_served()
        return _json(self._monitor.state)

    async def state_stream(self, request: Request) -> Response:
        self._service.require_served()

        async def events() -> AsyncIterator[bytes]:
            while not self._service.draining:
                yield b"data: " + json.dumps(self._monitor.state).encode() + b"\n\n"
                await self._monitor.next_state()

        return StreamingResponse(
            events(), media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )

    async def page(self, request: Request) -> Response:
        page = page_response(request.url.path, request.headers.get("if-none-match"))
        assert page is not None
        return Response(page.body, page.status, page.headers)

    async def _understood(self, request: Request, parse: Callable[[Body], T]) -> T:
        """Parse the body with `parse`. A large body is parsed in a thread, so that streams go on
        meanwhile.
        """
        body: ReadBody | None = request.scope["state"].get("body")
        if body is not None:  # by what chose this model
            return await body.parsed(parse)
        with self._bodies.place(request.scope["state"]["key_name"]) as hold:
            raw = await read_body(request.receive, request.scope["headers"], self._limits, hold)
            if len(raw) <= LARGE:
                return parse(parse_object(raw, self._limits))
            return await asyncio.to_thread(lambda: parse(parse_object(raw, self._limits)))

    def _headers(self, call: Call) -> dict[str, str]:
        facts = self._service.facts
        reproducible = facts is not None and facts.reproducible
        headers = {"x-freight-reproducible": "true" if reproducible else "false"}
        if call.ignored:
            headers["x-freight-ignored"] = ", ".join(call.ignored)
        return headers


def generating(parse: Parse) -> Parse:
    """Wrap the parser of an API that generates: a model that only pools is refused before its body
    is read.
    """

    def checked(body: Body, served: Served, limits: ServingLimits) -> Call:
        require_generating(served)
        return parse(body, served, limits)

    return checked


def _invocation(body: Body, served: Served, limits: ServingLimits) -> Call:
    """Parse a body of /invocations, SageMaker's single path, by the field that has the text."""
    for name, parse in _of_invocation(served):
        if body.get(name) is not None:
            return parse(body, served, limits)
    raise ApiError(
        400,
        "the body has none of messages, prompt, input, query and inputs; /invocations needs one of them",
    )


def _of_invocation(served: Served) -> Sequence[tuple[str, Parse]]:
    if served.generates:
        return (
            ("messages", parse_chat),
            ("prompt", parse_completion),
            ("input", parse_embeddings),
            ("query", parse_any_rerank),
            ("inputs", _generate(None)),
        )
    return (
        ("messages", parse_embeddings),
        ("input", parse_embeddings),
        ("query", parse_any_rerank),
        ("inputs", parse_root),
        ("prompt", generating(parse_completion)),
    )


def _root(body: Body, served: Served, limits: ServingLimits) -> Call:
    """Parse a body of `POST /`: TGI's, or of a model that only pools TEI's."""
    if served.generates:
        return _generate(None)(body, served, limits)
    return parse_root(body, served, limits)


def _generate(stream: bool | None) -> Parse:
    def parse(body: Body, served: Served, limits: ServingLimits) -> Call:
        require_generating(served)
        return tgi.parse_generate(body, served, limits.sampling, stream)

    return parse


def model_list(served: Served) -> list[JsonDict]:
    """Return the objects of /v1/models: a model's names, then its adapters."""
    models = [_model(name, served) for name in served.names]
    return models + [_adapter(adapter, served) for adapter in served.adapters]


def _model(name: str, served: Served) -> JsonDict:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "freight",
        "root": served.names[0],
        "max_model_len": served.max_model_len,
        "tasks": tasks_of(served),
    }


def _adapter(adapter: LoadedAdapter, served: Served) -> JsonDict:
    return _model(adapter.name, served) | {"root": adapter.asked, "parent": served.names[0]}


def _text(text: str) -> Response:
    return Response(text, headers={"content-type": "text/plain; charset=utf-8"})


def _json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        json_bytes(value), status, {**(headers or {}), "content-type": "application/json"}
    )


def _json_parts(parts: Sequence[bytes]) -> Response:
    """Return an answer whose JSON is in parts."""

    async def sent() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    size = str(sum(map(len, parts)))
    return StreamingResponse(
        sent(), headers={"content-type": "application/json", "content-length": size}
    )


def _counted(app: App, metrics: Metrics, paths: Collection[str]) -> App:
    """Count every request under its route: labels must be bounded, and clients choose paths. Also
    log refused keys.
    """

    async def counted(scope: Any, receive: Any, send: Any) -> None:
        async def count(message: Any) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                metrics.http_request(route, scope["method"], message["status"])
                if message["status"] == 401:  # refused before routing
                    metrics.rejected("unauthorized")
                    path = scope["path"]
                    request_id = scope["state"]["request_id"]
                    route = path if path in paths else "other"
                    log_request(
                        RequestLine(request_id, 401, 0.0, route=route, code="invalid_api_key")
                    )
            await send(message)

        await app(scope, receive, count)

    return counted
