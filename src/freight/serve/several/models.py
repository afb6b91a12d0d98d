"""Models: several models, which of them are loaded, and which requests wait for one.

Each is a `Serving` of its own, with an engine in a process of its own. The first request for a model
loads it. Where there is no room, the idle model that was used least recently gives way, and where
none is idle one that is busy: it takes no further request, those that run end, and it is unloaded.
A busy one keeps its place for a turn, so that loading does not take all the time. Models that wait
are loaded in the order in which they were first asked for, and none overtakes another. So each waits
no longer than for the turns, the last answers and the loading of those before it.

Only `Models` writes the state of a model. It belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from enum import StrEnum

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from freight.base.fields import JsonDict
from freight.errors import nearest, shown
from freight.serve.app import model_list
from freight.serve.processes.client import EngineState
from freight.serve.processes.log import current_model
from freight.serve.serving import Serving
from freight.serve.several.declared import DeclaredModel, ModelLimits
from freight.serve.several.sizes import Size, measure
from freight.serve.transport.errors import ApiError

logger = logging.getLogger("freight")

_PAUSE = 10.0  # seconds after a model could not be loaded, until a request tries again
_LOOK_EVERY = 0.02  # seconds between looks at a model that drains
MIB = 1 << 20


class ModelState(StrEnum):
    """llama.cpp's words for the state of a model."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"  # its last answers run, and it takes no further request
    FAILED = "failed"


class Model:
    """One of the models. Written by `Models` alone.

    failure     why it could not be loaded, in words; '' if it could, or was not tried
    num_active  requests that were passed to it and have not ended
    waiting     requests that wait for it, in order, each with the name of its key
    """

    def __init__(self, declared: DeclaredModel, size: Size, serving: Serving) -> None:
        self.declared = declared
        self.size = size
        self.serving = serving
        self.created = int(time.time())
        self.state = ModelState.UNLOADED
        self.failure = ""
        self.num_active = 0
        self.num_loads = 0
        self.waiting: dict[asyncio.Future[None], str | None] = {}
        self.failed_at = 0.0
        self.loaded_at = 0.0
        self.used_at = 0.0
        self.drain_seconds: float | None = None  # of an unloading model; None: as long as it takes
        self.closing = asyncio.Event()

    @property
    def name(self) -> str:
        return self.declared.name

    @property
    def is_ready(self) -> bool:
        return self.serving.service.client.state is EngineState.READY

    def has(self, name: str) -> bool:
        """Return whether it, or one of its adapters, has this name."""
        loaded = self.serving.service.adapters.loaded
        return name in self.declared.all_names or any(name == adapter.name for adapter in loaded)

    def rows(self) -> list[JsonDict]:
        """Return its objects of /v1/models."""
        status: JsonDict = {"value": str(self.state)}
        if self.failure:
            status |= {"failed": True, "error": self.failure}
        served = self.serving.service.served
        if served is not None:
            rows = model_list(served)
        else:
            about = {"object": "model", "created": self.created, "owned_by": "freight"}
            rows = [{"id": name, **about, "root": self.name} for name in self.declared.names]
        return [row | {"status": status} for row in rows]


class Models:
    """The models of a server. All methods but `ended`'s callers are those of the event loop."""

    def __init__(
        self,
        models: Sequence[Model],
        limits: ModelLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """limits: `memory` is a number of bytes"""
        assert limits.memory is not None
        self.models = tuple(models)
        self.draining = False
        self._limits = limits
        self._memory = limits.memory
        self._clock = clock
        self._by_name = {name: model for model in models for name in model.declared.all_names}
        # models that are to be loaded, in order, and whether a person asked for that
        self._queue: dict[Model, bool] = {}
        self._lives: dict[Model, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        for model in models:
            reason = model.size.failure or self._too_large(model)
            if reason:
                self._set_failure(model, reason)

    def has(self, name: str) -> bool:
        """Return whether a model or an adapter that was there at start has this name."""
        return name in self._by_name

    def find(self, name: str) -> Model:
        """Return the model with this name. Raises ApiError 404."""
        model = self._by_name.get(name)
        if model is None:
            model = next((model for model in self.models if model.has(name)), None)
        if model is None:
            names = list(self._by_name)
            offered = ", ".join(map(shown, names))
            raise ApiError(
                404,
                f"the model {name[:100]!r} is not served here{nearest(name[:100], names)}; served are {offered}",
                param="model",
                code="model_not_found",
            )
        return model

    def default(self) -> Model:
        """Return the model of requests that name none. Raises ApiError 400 where there is none."""
        if len(self.models) == 1:
            return self.models[0]
        for model in self.models:
            if model.declared.is_default:
                return model
        names = ", ".join(shown(model.name) for model in self.models)
        raise ApiError(
            400,
            f"the request names no model, and this server has several: put one of {names} into the field model, or "
            "into the query, as ?model=NAME",
            param="model",
            code="model_required",
        )

    def describe_limits(self) -> str:
        """Return the line at start."""
        return (
            f"{len(self.models)} models; at once {self._limits.most} of them, in {self._memory // MIB:,} MiB; none is "
            "loaded before it is asked for"
        )

    # -------------------------------------------------------------------------------------------
    # requests

    def enter(self, model: Model, key_name: str | None) -> asyncio.Future[None]:
        """Return a place for a request of this model: it is done once the model can be asked, and
        from then on `leave` must be called once. `withdraw` it if the client leaves before.

        The place raises ApiError 503 where the model cannot be loaded. Raises ApiError: 503 while
        the server drains, 429 where too many wait.
        """
        if self.draining:
            raise _draining()
        self._require_loadable(model)
        model.used_at = self._clock()
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if model.state is ModelState.LOADED:
            model.num_active += 1
            place.set_result(None)
            return place
        self._check_room(model, key_name)
        model.waiting[place] = key_name
        self._want(model)
        return place

    def withdraw(self, model: Model, place: asyncio.Future[None]) -> None:
        """Give up a place, whether it is done or not."""
        if model.waiting.pop(place, 0) != 0:
            place.cancel()
            if not model.waiting and self._queue.get(model) is False:
                del self._queue[model]
                self._arrange()  # the next one is first now
        elif place.exception() is None:
            self.leave(model)

    def leave(self, model: Model) -> None:
        """End a request that had a place."""
        model.num_active -= 1
        model.used_at = self._clock()
        if not model.num_active:
            self._arrange()

    def load(self, model: Model) -> None:
        """Load a model that nobody has asked yet. Raises ApiError."""
        if self.draining:
            raise _draining()
        model.failed_at = -_PAUSE  # whoever asks for this tries again at once
        self._require_loadable(model)
        model.used_at = self._clock()
        if model.state is not ModelState.LOADED:
            self._want(model, by_command=True)

    def unload(self, model: Model, drain_seconds: float) -> None:
        """Unload a model. Its running answers have so many seconds; requests that wait fail."""
        self._queue.pop(model, False)
        self._fail_waiting(
            model,
            ApiError(503, f"the model {shown(model.name)} is being unloaded", code="unloading"),
        )
        if model in self._lives:
            self._close(model, drain_seconds)
        self._arrange()

    def _require_loadable(self, model: Model) -> None:
        """Raise ApiError for a model that cannot be loaded, or could not a moment ago."""
        too_large = self._too_large(model)
        if model.state is not ModelState.FAILED and not too_large:
            return
        left = model.failed_at + _PAUSE - self._clock()
        if left > 0 or too_large:
            raise _failed(model, max(1, round(left)))

    def _check_room(self, model: Model, key_name: str | None) -> None:
        """Raise ApiError 429 where too many requests wait for a model."""
        most = model.serving.service.max_sequences
        waiting = len(model.waiting)
        of_key = sum(name == key_name for name in model.waiting.values())
        is_shared = key_name is not None and len(model.serving.keys.names) > 1
        if waiting >= most or (is_shared and of_key and of_key >= most - waiting):
            raise ApiError(
                429,
                f"{waiting} requests wait for the model {shown(model.name)}, and {most} may; try again in 5 s",
                code="queue_full",
                headers={"Retry-After": "5"},
            )

    def _fail_waiting(self, model: Model, error: ApiError) -> None:
        waiting = list(model.waiting)
        model.waiting.clear()
        for place in waiting:
            if not place.done():
                place.set_exception(error)
                place.exception()  # marks it as retrieved

    # -------------------------------------------------------------------------------------------
    # room

    def _want(self, model: Model, by_command: bool = False) -> None:
        if model.state is not ModelState.LOADING:
            self._queue[model] = by_command or self._queue.get(model, False)
            self._arrange()

    def _arrange(self) -> None:
        """Load what can be loaded, and make room for the first model that cannot."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._queue and not self.draining:
            model = next(iter(self._queue))
            if model in self._lives or not self._make_room(model):
                return
            del self._queue[model]
            self._begin(model)

    def _make_room(self, model: Model) -> bool:
        """Return whether there is room for a model now. If not, close others until there will be,
        and look again when the next one may be closed.
        """
        held = [other for other in self._lives if not other.size.failure]
        if model.size.failure or self._fits(model, held):  # what is measured again needs no room
            return True
        staying = [other for other in held if not other.closing.is_set()]
        loaded = [other for other in staying if other.state is ModelState.LOADED]
        now = self._clock()
        for other in sorted(
            loaded, key=lambda other: (self._seconds_left(other, now), other.used_at)
        ):
            if self._fits(model, staying):
                break
            left = self._seconds_left(other, now)
            if left > 0:
                self._timer = asyncio.get_running_loop().call_later(left, self._arrange)
                break
            staying.remove(other)
            self._close(other, None)
        return False

    def _seconds_left(self, model: Model, now: float) -> float:
        """Return the seconds for which a loaded model keeps its place: none if it is idle."""
        if not model.num_active or not model.is_ready:
            return 0.0
        return max(0.0, model.loaded_at + self._limits.turn - now)

    def _fits(self, model: Model, others: Sequence[Model]) -> bool:
        held = sum(other.size.total for other in others)
        return len(others) < self._limits.most and held + model.size.total <= self._memory

    def _too_large(self, model: Model) -> str:
        """Say why a model can never be loaded; '' if it can."""
        if model.size.total <= self._memory:
            return ""
        needed = -(-model.size.total // MIB)
        return f"it needs {needed:,} MiB, and all models may have {self._memory // MIB:,} MiB (--models-memory)"

    # -------------------------------------------------------------------------------------------
    # the life of a model, from its loading to its end

    def _begin(self, model: Model) -> None:
        model.state = ModelState.LOADING
        model.failure = ""
        model.drain_seconds = None
        model.closing.clear()
        model.num_loads += 1
        apart = Context()  # its log lines are not those of the request that wants it
        loop = asyncio.get_running_loop()
        self._lives[model] = loop.create_task(self._live(model), context=apart)

    def _close(self, model: Model, drain_seconds: float | None) -> None:
        """Have a model end its life once its answers have ended, or after so many seconds."""
        model.state = ModelState.UNLOADING
        model.drain_seconds = drain_seconds
        model.closing.set()

    async def _live(self, model: Model) -> None:
        current_model.set(model.name)
        logger.info("model %s: loading", shown(model.name))
        try:
            if model.size.failure:
                failure = await self._measure(model)
            else:
                failure = await self._serve(model)
        except Exception as error:
            logger.exception("model %s", shown(model.name))
            failure = str(error)
        del self._lives[model]
        self._ended(model, failure)

    async def _measure(self, model: Model) -> str | None:
        """Try again what failed at start; returns why it fails still, None if it does not."""
        sizes = await asyncio.to_thread(measure, [model.declared.args])
        model.size = sizes.models[0]
        if model.size.failure:
            return model.size.failure
        model.serving.change_cache(model.size.cache)
        return self._too_large(model) or None

    async def _serve(self, model: Model) -> str | None:
        """Load a model, serve it until its end, and end its processes; returns why it could not be
        loaded, None if it could.
        """
        serving = model.serving
        failure: str | None = None
        loading = serving.begin()
        closing = asyncio.ensure_future(model.closing.wait())
        ends = (serving.ended, closing)
        try:
            await asyncio.wait((loading, *ends), return_when=asyncio.FIRST_COMPLETED)
            if not serving.is_loading and not serving.ended.done() and not closing.done():
                self._loaded(model)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if model.state is ModelState.LOADING:
                failure = serving.reason or "its engine has ended"
            if closing.done():
                await self._drain(model)
            else:  # the engine has ended, and its requests with it
                self._close(model, 0.0)
        finally:
            closing.cancel()
            await serving.close()
        return failure

    def _loaded(self, model: Model) -> None:
        model.state = ModelState.LOADED
        model.loaded_at = model.used_at = self._clock()
        for place in model.waiting:
            model.num_active += 1
            place.set_result(None)
        model.waiting.clear()
        self._arrange()

    async def _drain(self, model: Model) -> None:
        """Wait for the answers of a model that is unloaded. A stalled engine finishes nothing."""
        seconds = model.drain_seconds
        begin = self._clock()
        while model.num_active and model.is_ready:
            seconds = model.drain_seconds  # a person may be less patient than another model
            if seconds is not None and self._clock() - begin > seconds:
                break
            await asyncio.sleep(_LOOK_EVERY)
        await model.serving.flush(_draining() if self.draining else _unloaded(model))

    def _ended(self, model: Model, failure: str | None) -> None:
        if failure is None:
            model.state = ModelState.UNLOADED
            logger.info("model %s: unloaded", shown(model.name))
        else:
            self._set_failure(model, failure)
            self._fail_waiting(model, _failed(model, round(_PAUSE)))
        if model.waiting and not self.draining:
            self._queue.setdefault(model, False)
        self._arrange()

    def _set_failure(self, model: Model, reason: str) -> None:
        model.state = ModelState.FAILED
        model.failed_at = self._clock()
        # no path of this machine is told
        model.failure = reason.replace(model.declared.args.model, model.name)
        logger.error("model %s cannot be loaded: %s", shown(model.name), reason)

    # -------------------------------------------------------------------------------------------
    # the end of the server

    def end_answers(self) -> None:
        """End the running answers of all models with an error."""
        for model in self._lives:
            model.drain_seconds = 0.0
            model.serving.end_answers()

    async def drain(self, seconds: float) -> None:
        """Accept no more requests, and unload all models; answers have so many seconds."""
        self.draining = True
        self._queue.clear()
        for model in self.models:
            self._fail_waiting(model, _draining())
        for model in self._lives:
            self._close(model, seconds)
        while self._lives:
            await asyncio.wait(list(self._lives.values()))

    def stop_watching(self) -> None:
        """Load nothing any more."""
        self.draining = True
        if self._timer is not None:
            self._timer.cancel()

    # -------------------------------------------------------------------------------------------
    # metrics

    def collect(self) -> Iterator[Metric]:
        """Yield the series of all models that are loaded, and those about all models."""
        for model in self.models:
            if model.state in (ModelState.LOADED, ModelState.UNLOADING):
                yield from model.serving.collect()
        state = GaugeMetricFamily(
            "freight:model_state",
            "1 for the state that a model is in.",
            labels=("model_name", "state"),
        )
        loads = CounterMetricFamily(
            "freight:model_loads", "Times that a model was loaded.", labels=("model_name",)
        )
        waiting = GaugeMetricFamily(
            "freight:model_requests_waiting",
            "Requests that wait for a model.",
            labels=("model_name",),
        )
        size = GaugeMetricFamily(
            "freight:model_memory_bytes",
            "Bytes of weights and cache that a model holds while it is loaded.",
            labels=("model_name",),
        )
        for model in self.models:
            for one in ModelState:
                state.add_metric((model.name, str(one)), int(one is model.state))
            loads.add_metric((model.name,), model.num_loads)
            waiting.add_metric((model.name,), len(model.waiting))
            size.add_metric((model.name,), model.size.total if model in self._lives else 0)
        yield from (state, loads, waiting, size)


def _failed(model: Model, retry: int) -> ApiError:
    return ApiError(
        503,
        f"the model {shown(model.name)} cannot be loaded: {model.failure}",
        code="model_failed",
        headers={"Retry-After": str(retry)},
    )


def _unloaded(model: Model) -> ApiError:
    return ApiError(503, f"the model {shown(model.name)} was unloaded", code="unloading")


def _draining() -> ApiError:
    return ApiError(
        503, "the server is shutting down", code="draining", headers={"Connection": "close"}
    )
