"""`build`: an application of Ray Serve. Replicas that serve, and the front before them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from freight.base.fields import JsonDict, JsonObject
from freight.cli.serve import worker_options
from freight.errors import ConfigError, EngineError, install

try:
    from ray.exceptions import RayActorError
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig
    from ray.serve.exceptions import DeploymentUnavailableError

    from ray import serve
except ModuleNotFoundError as error:
    raise ConfigError(f"Ray Serve is needed ({error}): {install('ray')}") from None

from freight.adapters.ray.front import NoReplicaError, ReplicaLostError, front
from freight.adapters.ray.options import Options, read_options, reserved
from freight.adapters.ray.passing import Request, answer
from freight.serve.processes.client import EngineState
from freight.serve.processes.log import set_up_logging
from freight.serve.serving import Serving, first_keys, read_template
from freight.serve.transport.body import Receive
from freight.serve.transport.http_limits import HttpLimits
from freight.serve.transport.middleware import App, Message, Scope, Send

_REPLICA = "Replica"
_FRONT = "Front"
_SHARE = 0.8  # of the sequences that run at once: beyond it another replica shortens waiting
_BESIDE = 64  # requests of a replica that generate nothing, such as /health, and refused ones
_AT_ONCE = 10_000  # requests of a front: it does little for each
_HEALTH_S = 2.0  # seconds between checks, and until one has failed
_PATIENCE_S = 30.0
_END_S = 15.0  # seconds beyond the drain: the last events, and an engine that does not leave


class Replica:
    """Serves the app of `freight serve` to requests of the front, with an engine of its own."""

    async def __init__(self, options: Options) -> None:  # type: ignore[misc]  # Ray awaits it
        """Returns when the model is loaded. Raises EngineError if it cannot be."""
        settings = options.settings
        set_up_logging(settings.log_format)
        worker = worker_options(options.engine, settings)
        self._serving = Serving(
            settings,
            worker,
            first_keys(settings, worker),
            read_template(settings.chat_template),
        )
        self._app = self._serving.app(HttpLimits())
        await self._serving.begin()
        if self._serving.ended.done():
            await self._serving.close()
            raise EngineError("the model cannot be served; the log of this replica has the cause")
        self._leaving = asyncio.ensure_future(self._leave_with_engine())

    async def answer(self, request: Request) -> AsyncGenerator[list[Message], None]:
        """Yield the answer in groups of ASGI messages (`passing.answer`)."""
        async with aclosing(answer(self._app, request, self._serves)) as groups:
            async for group in groups:
                yield group

    async def processes(self) -> dict[str, int | None]:
        """Return the ids of the replica's process and of its engine's."""
        return {"replica": os.getpid(), "engine": self._serving.service.client.pid}

    async def check_health(self) -> None:
        """Raises EngineError if the engine has ended, or gives no sign of life: Ray then starts
        another replica.
        """
        state = self._serving.service.client.state
        if state is not EngineState.READY:
            raise EngineError(f"the engine is {state}")

    async def __del__(self) -> None:
        """Drain, and end the engine. Ray calls this once no request runs, or its patience ends."""
        if hasattr(self, "_leaving"):
            self._leaving.cancel()
            await self._serving.drain()
            await self._serving.close()

    def _serves(self) -> bool:
        service = self._serving.service
        return (
            service.served is not None
            and not service.draining
            and service.client.state is EngineState.READY
        )

    async def _leave_with_engine(self) -> None:
        """End this process soon after its engine has ended: a replica that answers errors answers
        fast, and would draw all requests.
        """
        await self._serving.ended
        await self._serving.drain()  # the last events of streams
        await self._serving.close()
        os._exit(1)


class _Handle:
    """The replicas, as a handle of Ray Serve reaches them."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(method_name="answer", stream=True)

    async def send(self, request: Request) -> AsyncGenerator[list[Message], None]:
        groups = self._handle.remote(request)
        try:
            async for group in groups:
                yield group
        except RayActorError as error:
            raise ReplicaLostError from error
        except DeploymentUnavailableError as error:
            raise NoReplicaError from error
        finally:
            groups.cancel()


def _without_id(app: App) -> App:
    """Wrap an application so that its answers have no request id: Ray adds the same one to every
    answer.
    """

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def passed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [
                    pair for pair in message.get("headers", ()) if pair[0] != b"x-request-id"
                ]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, passed)

    return wrapped


def build(options: JsonObject | None = None) -> serve.Application:
    """Build the application from options by their names (`options.py`). Raises ConfigError."""
    made = read_options(options or {})
    engine = made.engine
    settings = made.settings
    replicas = made.replicas
    number: JsonDict = {"num_replicas": replicas.num_replicas}
    if replicas.min_replicas is not None:
        target = replicas.target_requests or _SHARE * engine.max_num_seqs
        number = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=replicas.min_replicas,
                max_replicas=replicas.max_replicas,
                target_ongoing_requests=target,
                upscale_delay_s=replicas.upscale_delay,
                downscale_delay_s=replicas.downscale_delay,
            )
        }
    replica = serve.deployment(
        Replica,
        name=_REPLICA,
        **reserved(made),
        # more than a replica takes, so that it is the replica that refuses: 429, as alone
        max_ongoing_requests=engine.max_num_seqs + settings.max_queue + _BESIDE,
        graceful_shutdown_timeout_s=settings.drain_timeout + _END_S,
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=_PATIENCE_S,
        request_router_config=RequestRouterConfig(
            request_router_class="freight.adapters.ray.router:PrefixRouter",
            request_router_kwargs={"slack": replicas.prefix_slack},
        ),
        **number,
    )
    keyed = made.keyed

    def app() -> App:
        return _without_id(
            front(_Handle(serve.get_deployment_handle(_REPLICA)), HttpLimits(), keyed)
        )

    class Front:
        def __init__(self, handle: Any) -> None:
            """Take the handle, which makes the replicas a part of the application."""

    before = serve.deployment(
        serve.ingress(app)(Front),
        name=_FRONT,
        num_replicas=replicas.front_replicas,
        ray_actor_options={"num_cpus": replicas.front_cpus},
        max_ongoing_requests=_AT_ONCE,
        graceful_shutdown_timeout_s=settings.drain_timeout + _END_S,
    )
    return before.bind(replica.bind(made))
