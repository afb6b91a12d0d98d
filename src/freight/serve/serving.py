"""Serving: a model that is served, apart from sockets and signals.

`freight serve` puts it behind a socket (`lifecycle.py`), `freight batch` runs a file through it, and a
replica of `freight.ray` hands it requests that came to another process. It starts the engine, loads
the model, and drains. When the engine's process exits by itself, so does the serving, with a nonzero
exit status, unless `restart_engine` is set.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fastapi import FastAPI
from prometheus_client.metrics_core import Metric

from freight.base.files import read_text
from freight.cache.events import CacheChanged
from freight.cache.store.secret import kept_secret
from freight.errors import ConfigError, shown
from freight.outputs import EngineStats
from freight.serve.answers.answer_format import AnswerFormat, answer_format
from freight.serve.app import make_app, make_routes
from freight.serve.call import Served
from freight.serve.limits import ServingLimits
from freight.serve.observe.kv_events import KVEventPublisher
from freight.serve.observe.metrics import Metrics
from freight.serve.observe.monitor import Monitor
from freight.serve.observe.traces import Traces
from freight.serve.processes.client import EngineClient, EngineState, WorkerOptions
from freight.serve.processes.supervisor import Supervisor
from freight.serve.processes.wire import EngineFacts
from freight.serve.rendering.renderer import Renderer
from freight.serve.service import Service
from freight.serve.settings import ServerSettings
from freight.serve.transport.auth import Keys
from freight.serve.transport.errors import ApiError
from freight.serve.transport.http_limits import HttpLimits
from freight.serve.transport.middleware import App
from freight.settings.engine import EngineArgs
from freight.settings.lora import listed_adapters, named_adapters
from freight.settings.resolve import parse_memory
from freight.settings.store import store_config
from freight.text.tokenizer import Tokenizer

logger = logging.getLogger("freight")

_TOKENIZING = 300.0  # seconds for one text: 4 MB take 10 s of a slow core, if nothing else wants it
_NICE = 5  # of the process for long texts: steps and short requests go first
_TOKENIZING_MEMORY = 6 << 30  # bytes of address space: a token takes 200 while it is read
_FLUSH = 1.0  # seconds for the last events of streams that a shutdown ends


class Serving:
    """One model that is served, with a supervised engine. It belongs to the event loop in which it is
    begun.

    service  answers requests; `service.served` is None until the model is loaded
    ended    the exit status, once nothing is served any more: the engine has ended or could not be
             loaded, or `finish` was called. There is one once `begin` was called
    reason   why it has ended, in words; None where there is nothing to say
    """

    def __init__(
        self,
        settings: ServerSettings,
        options: WorkerOptions,
        keys: Keys,
        template: str | None,
        traces: Traces | None = None,
    ) -> None:
        """traces: those of all models, which outlive this one; None: its own, where there are any"""
        self.ended: asyncio.Future[int]
        self.reason: str | None = None
        self._needs_client = False  # the one that there is has ended, or has other options
        self._settings = settings
        self._template = template
        model = str(options.engine_args["model"])
        self._priorities = EngineArgs(**options.engine_args).has_priorities
        self._names = settings.names or (options.random_weights or Path(model).name or model,)
        for module in named_adapters(listed_adapters(options.engine_args["lora_modules"])):
            if module.name in self._names:
                raise ConfigError(
                    f"--lora-modules names an adapter {shown(module.name)}, which is a name of the model here; choose "
                    "another one"
                )
        self._metrics = Metrics(self._names[0], keys=keys.names, old_names=settings.old_metrics)
        most = int(options.engine_args["max_num_seqs"]) + settings.max_queue
        self._engine = Supervisor(
            options, self, settings.restart_engine, on_changed=self._cache_changed
        )
        self.service = Service(
            self._engine.client,
            ServingLimits(),
            keys,
            self._metrics,
            most,
            settings.request_timeout,
            max_queue=settings.max_queue,
        )
        self.service.weights.on_update = self._load_from
        self._monitor = Monitor(self.service, self._metrics)
        self._kv_events: KVEventPublisher | None = None
        if settings.kv_events is not None:
            self._kv_events = KVEventPublisher(settings.kv_events)
            self._metrics.set_kv_events(self._kv_events.counts)
        self._traces: Traces | None = None  # its own
        if traces is None and settings.otlp_traces_endpoint is not None:
            self._traces = Traces(settings.otlp_traces_endpoint)
        self.service.traces = traces or self._traces
        self._tasks: list[asyncio.Task[None]] = []

    def app(self, limits: HttpLimits) -> App:
        """Build the server as an ASGI application. It answers 503 while the model loads."""
        return make_app(self.service, self._monitor, self._settings, limits)

    def routes(self, limits: HttpLimits) -> tuple[FastAPI, frozenset[str], frozenset[str]]:
        """`make_routes`, for what stands before several models."""
        return make_routes(self.service, self._monitor, self._settings, limits)

    @property
    def keys(self) -> Keys:
        return self.service.keys

    @property
    def is_loading(self) -> bool:
        return self.service.served is None

    def change_cache(self, memory: int) -> None:
        """Have a cache of so many bytes from the next `begin` on."""
        self._engine.change_args({"kv_cache_memory": memory})
        self._needs_client = True

    def begin(self, watched: bool = True) -> asyncio.Task[None]:
        """Start the engine, also again after `close`; returns the task that loads the model, which raises
        nothing.

        watched: update the state, log it, and look for an engine that gives no sign of life
        """
        loop = asyncio.get_running_loop()
        self.ended = loop.create_future()
        self.reason = None
        if self._needs_client:
            self._needs_client = False
            self.service.draining = False
            self._engine.begin_again()
        loading = loop.create_task(self._engine.load())
        self._tasks = [loading]
        if watched:
            self._tasks += [
                loop.create_task(self._monitor.run()),
                loop.create_task(self._engine.watch()),
            ]
        return loading

    def finish(self, status: int, reason: str | None = None) -> None:
        """End with this exit status, unless it has ended already; `reason` is logged."""
        if reason is not None:
            logger.error("%s", reason)
        if not self.ended.done():
            self._engine.expect_end()
            self.reason = reason
            self.ended.set_result(status)

    def end_answers(self, error: ApiError | None = None) -> None:
        """End the running answers with an error, after what they have."""
        for answer in list(self.service.answers):
            answer.inbox.fail(error or _ENDING)

    async def drain(self) -> None:
        """Accept no more requests; wait for those that run, up to `drain_timeout`."""
        service = self.service
        service.draining = True
        deadline = time.monotonic() + self._settings.drain_timeout
        if service.answers:
            logger.info(
                "waiting up to %g s for %d answers",
                self._settings.drain_timeout,
                len(service.answers),
            )
        while (
            service.answers
            and time.monotonic() < deadline
            and service.client.state is EngineState.READY
        ):
            await asyncio.sleep(0.02)  # an engine that has ended, or is stalled, finishes nothing
        await self.flush()

    async def flush(self, error: ApiError | None = None) -> None:
        """Accept no more requests, end the running answers, and wait for their last events."""
        service = self.service
        service.draining = True
        self.end_answers(error)
        flushed = time.monotonic() + _FLUSH
        while service.answers and time.monotonic() < flushed:
            await asyncio.sleep(0.02)

    def stop_watching(self) -> None:
        """Stop loading, and looking after the engine."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """End the engine and the other processes, and wait for their ends."""
        self.stop_watching()
        await self._engine.stop()
        service = self.service
        await _close((service.renderer, service.grammars, service.large))
        service.renderer = service.grammars = service.large = None
        service.served = None
        self._needs_client = True
        if self._kv_events is not None:
            await asyncio.to_thread(self._kv_events.close)
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)

    def _cache_changed(self, changed: CacheChanged) -> None:
        if self._kv_events is not None:
            self._kv_events.publish(changed)

    def _load_from(self, model: str) -> None:
        """Have an engine that takes the place of this one load the weights of `model`."""
        self._engine.change_args({"model": model, "revision": None})

    def add_keys(self, names: Sequence[str]) -> None:
        """Count the requests of these keys under their names."""
        self._metrics.add_keys(names)

    def collect(self) -> Iterator[Metric]:
        """Yield the series of this model."""
        return self._metrics.collect()

    def set_stats(self, stats: EngineStats) -> None:
        self._metrics.set_stats(stats)

    def observe_step(self, seconds: float, num_tokens: int) -> None:
        self._metrics.observe_step(seconds, num_tokens)

    def set_stalled(self, is_stalled: bool) -> None:
        self._metrics.set_stalled(is_stalled)

    async def load(self, client: EngineClient) -> None:
        """Serve the model of an engine once it is there."""
        facts = await client.opened
        tokenizer = await asyncio.to_thread(self._read_tokenizer, facts)
        renderer = grammars = large = None
        form: AnswerFormat | None = None
        if tokenizer is not None:
            timeout = self._settings.template_timeout
            renderer = self._new_renderer(facts, timeout)
            grammars = self._new_renderer(facts, timeout)
            large = self._new_renderer(facts, max(timeout, _TOKENIZING), _TOKENIZING_MEMORY, _NICE)
            form = await asyncio.to_thread(self._answer_format, tokenizer)
        facts = await client.ready
        service = self.service
        if not await service.adapters.begin(client):
            return  # the engine has ended meanwhile
        # one that takes its place has room for as many, and loads those of that time
        self._engine.change_args({"lora_modules": (), "max_loras": facts.max_adapters or None})
        old = service.renderer, service.grammars, service.large
        service.renderer = renderer
        service.grammars = grammars
        service.large = large
        await _close(old)
        if renderer is not None and tokenizer is not None and tokenizer.has_chat_template:
            await renderer.start()  # here, so that the first conversation does not wait for it
        self.service.facts = facts
        self._metrics.set_max_adapters(facts.max_adapters)
        self.service.served = self._served(facts, tokenizer, form)
        self._monitor.set_facts(facts, self._names[0])
        gc.unfreeze()  # what was loaded before, and is not any more
        gc.collect()
        gc.freeze()
        # A full collection over the millions of values of a large answer takes a second and stalls
        # every stream. Little of a server is in cycles, so the oldest generation is collected
        # rarely.
        gc.set_threshold(700, 10, 1000)
        logger.info("ready: %s", ", ".join(self._names))

    def _new_renderer(
        self, facts: EngineFacts, deadline_s: float, memory: int = 2 << 30, niceness: int = 0
    ) -> Renderer:
        assert facts.tokenizer is not None
        return Renderer(
            facts.tokenizer,
            facts.vocab_size,
            facts.stop_token_ids,
            deadline_s=deadline_s,
            memory=memory,
            niceness=niceness,
            chat_template=self._template,
        )

    def _read_tokenizer(self, facts: EngineFacts) -> Tokenizer | None:
        if facts.tokenizer is None:
            return None
        tokenizer = Tokenizer.load(facts.tokenizer)
        if self._template is not None:
            tokenizer = tokenizer.with_chat_template(self._template)
        return tokenizer

    def _answer_format(self, tokenizer: Tokenizer) -> AnswerFormat | None:
        """Return the format of the model's answers. Raises ConfigError for parsers that do not fit
        this model.
        """
        settings = self._settings
        form = answer_format(tokenizer, settings.tool_call_parser, settings.reasoning_parser)
        if settings.reasoning_budget is not None:
            check_budget(settings.reasoning_budget, form)
        if (form is None or not form.reads_calls) and "tools" in tokenizer.chat_template_source:
            logger.warning(
                "the chat template takes tools, and the form of this model's tool calls is not known: calls stay text; "
                "--tool-call-parser selects a form"
            )
        return form

    def _served(
        self, facts: EngineFacts, tokenizer: Tokenizer | None, form: AnswerFormat | None
    ) -> Served:
        served = Served(
            names=self._names,
            tokenizer=tokenizer,
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            defaults=facts.defaults,
            fingerprint=facts.fingerprint,
            stop_token_ids=frozenset(facts.stop_token_ids),
            unknown_fields=self._settings.unknown_fields,
            strict_schemas=self._settings.strict_schemas,
            created=int(time.time()),
            drafts=facts.drafts,
            max_adapters=facts.max_adapters,
            adapters=self.service.adapters.loaded,
            changing=self.service.adapters.changing,
            pooling=facts.pooling,
            generates=facts.generates,
            priorities=self._priorities,
        )
        return with_format(served, form, self._settings.reasoning_budget)

    def replaced(self, client: EngineClient) -> None:
        if self._kv_events is not None:
            self._kv_events.cleared()
        self._metrics.set_stats(None)
        self.service.served = None
        self.service.client = client

    def failed(self, status: int, reason: str) -> None:
        self.finish(status, reason)


def check_budget(reasoning_budget: int, form: AnswerFormat | None) -> tuple[str, str]:
    """Return the tags of the thoughts that `--reasoning-budget` limits. Raises ConfigError where they
    are not known.
    """
    if form is None or form.thinking_tags is None:
        raise ConfigError(
            f"--reasoning-budget is {reasoning_budget}, and the tags of this model's thoughts are not known: omit it, "
            "or select them with --reasoning-parser"
        )
    return form.thinking_tags


def with_format(
    served: Served, form: AnswerFormat | None, reasoning_budget: int | None = None
) -> Served:
    """Return the model with what reads and forces its markup; None: it has no known markup.

    reasoning_budget: tokens of thoughts that an answer has at most, unless its request says more or
    less. Raises ConfigError where the tags of thoughts are not known.
    """
    if reasoning_budget is not None:
        tags = check_budget(reasoning_budget, form)
        budget = {"thinking_token_budget": reasoning_budget, "thinking_tags": tags}
        served = replace(served, defaults={**served.defaults, **budget})
    if form is None:
        return served
    return replace(
        served,
        thinking_tags=form.thinking_tags,
        parser_of=form.parser,
        forced_call=form.call_to,
        after_reasoning=form.form_to if form.reads_reasoning else None,
    )


async def _close(renderers: Sequence[Renderer | None]) -> None:
    for renderer in renderers:
        if renderer is not None:
            await renderer.close()


_ENDING = ApiError(503, "the server is shutting down", code="draining")


def read_keys(settings: ServerSettings, secret: bytes | None = None) -> Keys:
    """Return the keys of `settings`; `secret`: as `Keys`. Raises ConfigError if their file cannot be
    used.
    """
    files = () if settings.api_key_file is None else (settings.api_key_file,)
    return Keys.read(settings.api_keys, files, settings.shared_prefix_cache, secret)


def first_keys(settings: ServerSettings, options: WorkerOptions) -> Keys:
    """Return the keys of a server that starts. Where their prompts are stored, its salts are those
    of the last start with this store. Raises ConfigError if a file of keys, or the store, cannot be
    used.
    """
    keys = read_keys(settings)
    if not keys or settings.shared_prefix_cache:
        return keys
    store = store_config(EngineArgs(**options.engine_args), parse_memory)
    if store is None or not store.salted:
        return keys
    return read_keys(settings, kept_secret(store.folder))


def read_template(file: Path | None) -> str | None:
    """Return the text of `--chat-template`, or None without one. Raises ConfigError if it is
    unreadable.
    """
    if file is None:
        return None
    try:
        return read_text(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template {file} cannot be read: {error}") from None
