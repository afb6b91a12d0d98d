"""Monitor: the engine's state once a second, for the page's live view and the log."""

from __future__ import annotations

import asyncio
import time

from freight import __version__
from freight.base.fields import JsonDict
from freight.outputs import EngineStats
from freight.serve.observe.log import SECONDS_BETWEEN_SUMMARIES, log_summary
from freight.serve.observe.metrics import Metrics, ModelFacts
from freight.serve.observe.state import CacheFacts, engine_state
from freight.serve.processes.client import EngineState
from freight.serve.processes.wire import EngineFacts
from freight.serve.service import KEEP_ALIVE, Service

_EVERY = 1.0  # seconds


class Monitor:
    """`state` is the latest; `next_state` waits for the next one."""

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self.state: JsonDict = {}
        self._service = service
        self._metrics = metrics
        self._cache: CacheFacts | None = None
        self._model = ""
        self._since = time.monotonic()
        self._tick = asyncio.Event()

    def set_facts(self, facts: EngineFacts, model: str) -> None:
        """Set the facts of the loaded model."""
        kv = facts.kv_cache
        self._cache = CacheFacts(
            format=kv["dtype"],
            granularity=kv["granularity"],
            scale_source=kv["scale_source"],
            block_size=kv["block_size"],
            num_blocks=kv["num_blocks"],
            capacity_tokens=kv["capacity_tokens"],
            equivalent_16bit_tokens=kv["tokens_at_16_bits"],
        )
        self._since = time.monotonic()
        self._model = model
        self._metrics.set_info(
            ModelFacts(self._cache, facts.max_model_len, __version__, facts.fingerprint)
        )

    async def next_state(self) -> JsonDict:
        await self._tick.wait()
        return self.state

    async def _next_second(self) -> None:
        try:
            await asyncio.sleep(_EVERY)
        except asyncio.CancelledError:
            self._tick.set()  # whoever waits sees that the model is not served any more
            raise

    async def run(self) -> None:
        """Update `state` every second, until cancelled."""
        previous: EngineStats | None = None
        at = summarised_at = time.monotonic()
        summarised: EngineStats | None = None
        while True:
            await self._next_second()
            now = time.monotonic()
            stats = self._service.client.stats
            if stats is not None and self._cache is not None:
                self.state = engine_state(stats, previous, now - at, self._cache) | {
                    "model": self._model,
                    "uptime_s": round(now - self._since, 1),
                }
                if now - summarised_at >= SECONDS_BETWEEN_SUMMARIES:
                    log_summary(stats, summarised, now - summarised_at)
                    summarised = stats
                    summarised_at = now
            previous = stats
            at = now
            for answer in list(self._service.answers):
                answer.nudge_if_quiet(KEEP_ALIVE)
                if self._service.client.state is EngineState.STALLED:
                    answer.end_if_late()
            self._tick.set()
            self._tick = asyncio.Event()
