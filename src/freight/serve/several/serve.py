"""`freight serve --models`: several models as what `lifecycle.listen` serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace

from freight.serve.lifecycle import listen
from freight.serve.observe.metrics import Metrics
from freight.serve.observe.traces import Traces
from freight.serve.processes.client import WorkerOptions
from freight.serve.serving import Serving, first_keys, read_template
from freight.serve.settings import ServerSettings
from freight.serve.several.declared import DeclaredModel, ModelLimits
from freight.serve.several.front import front
from freight.serve.several.models import MIB, Model, Models
from freight.serve.several.sizes import SHARE, Size, measure, with_cache
from freight.serve.transport.auth import Keys
from freight.serve.transport.http_limits import HttpLimits
from freight.serve.transport.middleware import App

logger = logging.getLogger("freight")


def run_several(
    settings: ServerSettings, declared: Sequence[DeclaredModel], limits: ModelLimits
) -> int:
    """Serve models until a signal; returns the exit status. Raises ConfigError before anything is
    loaded.
    """
    templates = [read_template(model.chat_template) for model in declared]
    options = [_options(model, settings, Size()) for model in declared]
    stored = (of for of in options if of.engine_args["kv_store"] is not None)
    keys = first_keys(settings, next(stored, options[0]))
    sizes = measure([model.args for model in declared])
    if limits.memory is None:
        limits = replace(limits, memory=int(SHARE * sizes.free))

    def make() -> SeveralServing:
        traces = None
        if settings.otlp_traces_endpoint is not None:
            traces = Traces(settings.otlp_traces_endpoint)
        models = []
        for model, size, template in zip(declared, sizes.models, templates, strict=True):
            options = _options(model, settings, size)
            serving = Serving(model.settings(settings), options, keys, template, traces)
            models.append(Model(model, size, serving))
        return SeveralServing(settings, Models(models, limits), keys, traces)

    return listen(settings, keys, make)


def _options(model: DeclaredModel, settings: ServerSettings, size: Size) -> WorkerOptions:
    args = with_cache(model.args, size) if size.cache else model.args
    return WorkerOptions(
        asdict(args),
        log_format=settings.log_format,
        log_model=model.name,
        events_per_second=settings.max_events_per_second,
        stall_timeout=settings.stall_timeout,
    )


class SeveralServing:
    """Several models, as `lifecycle.Listening`."""

    is_loading = False  # those that are loaded have clients who wait for their answers

    def __init__(
        self, settings: ServerSettings, models: Models, keys: Keys, traces: Traces | None = None
    ) -> None:
        self.ended: asyncio.Future[int]
        self.keys = keys
        self._settings = settings
        self._models = models
        self._metrics = Metrics("", keys=keys.names)
        self._traces = traces

    def app(self, limits: HttpLimits) -> App:
        return front(self._models, self._settings, limits, self._metrics, self._traces)

    def begin(self) -> None:
        """Log what there is. The first requests load the models."""
        self.ended = asyncio.get_running_loop().create_future()
        for model in self._models.models:
            size = model.size
            if not model.failure:
                logger.info(
                    "model %s: %s MiB of weights, %s MiB of cache",
                    model.name,
                    f"{size.weights / MIB:,.0f}",
                    f"{size.cache / MIB:,.0f}",
                )
        logger.info("%s", self._models.describe_limits())

    def finish(self, status: int, reason: str | None = None) -> None:
        if not self.ended.done():
            self.ended.set_result(status)

    def end_answers(self) -> None:
        self._models.end_answers()

    async def drain(self) -> None:
        await self._models.drain(self._settings.drain_timeout)

    def stop_watching(self) -> None:
        self._models.stop_watching()

    async def close(self) -> None:
        """End what a `drain` that was broken off has left."""
        await self._models.drain(0.0)
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)

    def add_keys(self, names: Sequence[str]) -> None:
        for model in self._models.models:
            model.serving.add_keys(names)
        self._metrics.add_keys(names)
