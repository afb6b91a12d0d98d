"""The endpoints of a server whose weights may change: vLLM's and SGLang's names for them. Their options
are in the query, as vLLM has them, or in a JSON body.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from freight.base.fields import JsonDict
from freight.engine.messages import level_of_tags
from freight.serve.bodies import Body, Unread, read_closed
from freight.serve.service import Service
from freight.serve.transport.body import parse_object, read_body
from freight.serve.transport.errors import ApiError
from freight.serve.transport.http_limits import HttpLimits
from freight.serve.weights import PauseMode

B = TypeVar("B", bound=Body)
Endpoint = Callable[[Request], Awaitable[Response]]
Mode = Literal["abort", "wait", "keep"]

_TEXTS = "model_path", "weight_version"  # options that are text, also "100"
_DIGITS = 18  # more are no number that an option takes


class NoOptions(Body):
    """The body of an endpoint without options."""


class PauseBody(Body):
    """The options of /pause."""

    mode: Mode = "abort"
    clear_cache: bool = True


class SleepBody(Body):
    """The options of /sleep."""

    level: int = 1
    mode: Literal["abort", "wait"] = "abort"


class WakeBody(Body):
    """The options of /wake_up. tags: ["weights"] takes the weights' memory alone."""

    tags: list[Literal["weights", "kv_cache"]] | None = None


class ResetBody(Body):
    """The options of /reset_prefix_cache."""

    unread = {  # noqa: RUF012, a ClassVar annotation is on the base class
        "reset_running_requests": Unread((False,), "running requests keep their blocks"),
        "reset_external": Unread((False,), "a store is emptied by removing its folder"),
    }


class UpdateBody(Body):
    """The body of /update_weights_from_disk."""

    unread = {  # noqa: RUF012, as above
        "load_format": Unread(("auto", "safetensors"), "safetensors and GGUF are read"),
        "is_async": Unread((False,), "an update is answered once it is done"),
        "torch_empty_cache": Unread(None),
        "recapture_cuda_graph": Unread(None),
        "flush_cache": Unread((True,), "no block is found again with other weights"),
        "keep_pause": Unread((False,), "POST /pause first, which an update does not end"),
    }

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False


class WeightRoutes:
    """The endpoints. They raise ApiError."""

    def __init__(self, service: Service, limits: HttpLimits) -> None:
        self._service = service
        self._limits = limits

    @property
    def posts(self) -> tuple[tuple[str, Endpoint, type[Body]], ...]:
        """Path, endpoint and body of what changes something."""
        return (
            ("/pause", self.pause, PauseBody),
            ("/resume", self.resume, NoOptions),
            ("/update_weights_from_disk", self.update, UpdateBody),
            ("/reset_prefix_cache", self.reset, ResetBody),
            ("/sleep", self.sleep, SleepBody),
            ("/wake_up", self.wake_up, WakeBody),
        )

    @property
    def gets(self) -> tuple[tuple[str, Callable[[], Awaitable[Response]]], ...]:
        """Path and endpoint of what says something."""
        return (
            ("/is_paused", self.is_paused),
            ("/is_sleeping", self.is_sleeping),
            ("/get_weight_version", self.weight_version),
        )

    async def pause(self, request: Request) -> Response:
        asked = await self._options(request, PauseBody)
        await self._service.weights.pause(PauseMode(asked.mode), asked.clear_cache)
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        await self._options(request, NoOptions)
        await self._service.weights.resume()
        return JSONResponse({"status": "resumed"})

    async def update(self, request: Request) -> Response:
        asked = await self._options(request, UpdateBody)
        weights = self._service.weights
        if not asked.model_path.strip():
            raise ApiError(
                400,
                "model_path is empty; give a folder of the server's machine, or a hub id",
                param="model_path",
            )
        await weights.update(asked.model_path, asked.weight_version, asked.abort_all_requests)
        return JSONResponse(
            {
                "success": True,
                "message": f"the weights are version {weights.version}",
                "num_paused_requests": 0,
            }
        )

    async def reset(self, request: Request) -> Response:
        await self._options(request, ResetBody)
        await self._service.weights.reset_prefix_cache()
        return Response()

    async def sleep(self, request: Request) -> Response:
        asked = await self._options(request, SleepBody)
        await self._service.weights.sleep(asked.level, PauseMode(asked.mode))
        return Response()

    async def wake_up(self, request: Request) -> Response:
        asked = await self._options(request, WakeBody)
        await self._service.weights.wake_up(level_of_tags(asked.tags))
        return Response()

    async def is_paused(self) -> Response:
        return JSONResponse({"is_paused": self._service.weights.paused is not None})

    async def is_sleeping(self) -> Response:
        return JSONResponse({"is_sleeping": self._service.weights.sleep_level > 0})

    async def weight_version(self) -> Response:
        served = self._service.require_served()
        return JSONResponse(
            {
                "weight_version": self._service.weights.version,
                "fingerprint": served.fingerprint,
            }
        )

    async def _options(self, request: Request, model: type[B]) -> B:
        """Read the options of a request. Raises ApiError (400) for those that it does not have."""
        self._service.require_served()
        headers = request.headers
        body: JsonDict = {}
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            raw = await read_body(request.receive, request.scope["headers"], self._limits)
            body = parse_object(raw, self._limits)
        elif "origin" in headers:  # any page may send this; a body declared as JSON it may not
            raise ApiError(403, "a web page cannot do this without a body of JSON; send {}")
        for name in request.query_params:
            body[name] = _value(name, request.query_params.getlist(name))
        return read_closed(model, body)


def _value(name: str, texts: list[str]) -> object:
    """Return the value of an option in the query: 'true' and '2' as JSON has them, other text as it
    is.
    """
    if name == "tags":
        return texts
    text = texts[-1]
    if name in _TEXTS:
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.isdecimal() and len(text) <= _DIGITS:
        return int(text)
    return text
