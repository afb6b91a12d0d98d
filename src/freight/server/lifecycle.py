"""The server as a process: binds, loads, serves, drains, ends. `run` is all of `freight serve` behind its options.

It listens from the first moment, so that /health says 503 while the model loads. SIGTERM and Ctrl-C stop admission and
let running answers finish, up to a time; a second one ends them at once. When the engine's process ends by itself, so
does this one, with an exit status that is not 0, unless another engine is to be started.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn

from freight.errors import CheckpointError, ConfigError
from freight.server.app import make_app
from freight.server.auth import Keys, check_binding
from freight.server.call import Served
from freight.server.client import EngineClient, EngineState, WorkerOptions, describe_exit
from freight.server.errors import ApiError
from freight.server.harmony_format import answer_format
from freight.server.http import HttpLimits, loop_factory, server_config
from freight.server.limits import ServingLimits
from freight.server.log import set_up_logging
from freight.server.metrics import Metrics
from freight.server.monitor import Monitor
from freight.server.renderer import Renderer
from freight.server.service import Service
from freight.server.settings import ServerSettings
from freight.server.wire import EngineFacts
from freight.tokenizer import Tokenizer

logger = logging.getLogger("freight")

_RESTARTS, _WITHIN = 3, 600.0  # so many new engines in so many seconds; more would fail as well
_FLUSH = 1.0  # seconds for the last events of streams that are ended


def run(settings: ServerSettings, options: WorkerOptions) -> int:
    """Serve until a signal or a failure; returns the exit status. Raises ConfigError before anything is started."""
    files = () if settings.api_key_file is None else (settings.api_key_file,)
    keys = Keys.read(settings.api_keys, files, settings.shared_prefix_cache)
    check_binding(settings.host, keys, settings.insecure)
    template = _read_template(settings.chat_template)
    set_up_logging(settings.log_format)
    with _bound(settings) as listener, asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(Lifecycle(settings, options, keys, template).serve(listener))


class Lifecycle:
    """One run of the server."""

    def __init__(self, settings: ServerSettings, options: WorkerOptions, keys: Keys, template: str | None) -> None:
        self._settings = settings
        self._options = options
        self._template = template
        model = str(options.engine_args["model"])
        self._names = settings.names or (options.random_weights or Path(model).name or model,)
        self._metrics = Metrics(self._names[0], keys=keys.names, old_names=settings.old_metrics)
        self._status: asyncio.Future[int]
        self._restarts: deque[float] = deque(maxlen=_RESTARTS)
        most = int(options.engine_args["max_num_seqs"]) + settings.max_queue
        self._service = Service(
            self._new_client(), ServingLimits(), keys, self._metrics, most, settings.request_timeout
        )
        self._monitor = Monitor(self._service, self._metrics)

    async def serve(self, listener: socket.socket) -> int:
        """Serve on a bound socket; returns the exit status."""
        loop = asyncio.get_running_loop()
        self._status = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        settings = self._settings
        limits = HttpLimits(max_connections=settings.max_connections, write_seconds=settings.write_timeout)
        app = make_app(self._service, self._monitor, settings, limits)
        server = _Server(server_config(app, limits, drain_seconds=1))
        host, port = listener.getsockname()[:2]
        sys.stderr.write(f"freight: listening on http://{f'[{host}]' if ':' in host else host}:{port}\n")
        sys.stderr.flush()
        serving = loop.create_task(server.serve(sockets=[listener]))
        tasks = [loop.create_task(self._load()), loop.create_task(self._monitor.run())]
        try:
            status = await self._status
            await self._drain(status)
        finally:
            for task in tasks:
                task.cancel()
            await self._end(server, serving)
        return status

    def _new_client(self) -> EngineClient:
        return EngineClient(self._options, self._metrics.set_stats, self._metrics.observe_step, self._on_engine_end)

    async def _load(self) -> None:
        """Start an engine, and serve its model once it is there."""
        client = self._service.client
        await client.start()
        try:
            facts = await client.opened
            tokenizer = await asyncio.to_thread(self._read_tokenizer, facts)
            renderers = (None, None) if tokenizer is None else (self._new_renderer(facts), self._new_renderer(facts))
            facts = await client.ready
        except asyncio.CancelledError:
            return  # the engine ended: `_on_engine_end` goes on
        except Exception as error:
            if not isinstance(error, CheckpointError | ConfigError):
                logger.exception("the model cannot be served")
            self._finish(1, str(error))
            return
        old = self._service.renderer, self._service.grammars
        self._service.renderer, self._service.grammars = renderers
        await _close(old)
        if renderers[0] is not None and tokenizer is not None and tokenizer.has_chat_template:
            await renderers[0].start()  # now, and not while the first conversation waits
        self._service.facts = facts
        self._service.served = self._served(facts, tokenizer)
        self._monitor.set_facts(facts, self._names[0])
        gc.collect()
        gc.freeze()
        logger.info("ready: %s", ", ".join(self._names))

    def _new_renderer(self, facts: EngineFacts) -> Renderer:
        assert facts.tokenizer is not None
        return Renderer(
            facts.tokenizer,
            facts.vocab_size,
            facts.stop_token_ids,
            deadline_s=self._settings.template_timeout,
            chat_template=self._template,
        )

    def _read_tokenizer(self, facts: EngineFacts) -> Tokenizer | None:
        if facts.tokenizer is None:
            return None
        tokenizer = Tokenizer.load(facts.tokenizer)
        return tokenizer if self._template is None else tokenizer.with_chat_template(self._template)

    def _served(self, facts: EngineFacts, tokenizer: Tokenizer | None) -> Served:
        form = None if tokenizer is None else answer_format(tokenizer)
        return Served(
            names=self._names,
            tokenizer=tokenizer,
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            defaults=facts.defaults,
            fingerprint=facts.fingerprint,
            stop_token_ids=frozenset(facts.stop_token_ids),
            unknown_fields=self._settings.unknown_fields,
            created=int(time.time()),
            parser_of=None if form is None else form.parser,
            forced_call=None if form is None else form.call_to,
            after_reasoning=None if form is None or not form.reads_reasoning else form.form_to,
        )

    def _on_engine_end(self) -> None:
        """The engine's process has ended."""
        if self._status.done():
            return
        client = self._service.client
        status = client.ended.result()
        if client.failure is not None:
            self._finish(client.failure[1], client.failure[0])
            return
        now = time.monotonic()
        often = len(self._restarts) == _RESTARTS and now - self._restarts[0] < _WITHIN
        if not self._settings.restart_engine or often:
            self._finish(1, f"the engine's process ended with {describe_exit(status)}")
            return
        logger.error("the engine's process ended with %s; another is started", describe_exit(status))
        self._restarts.append(now)
        self._metrics.set_stats(None)
        self._service.served = None
        self._service.client = self._new_client()
        self._restarting = asyncio.get_running_loop().create_task(self._load())

    def _finish(self, status: int, reason: str | None = None) -> None:
        if reason is not None:
            logger.error("%s", reason)
        if not self._status.done():
            self._status.set_result(status)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._status.done():
            for answer in list(self._service.answers):
                answer.inbox.fail(_ENDING)
        self._finish(0 if number == signal.SIGTERM else 130)

    async def _drain(self, status: int) -> None:
        """Take no more requests; wait for those that run."""
        service = self._service
        service.draining = True
        deadline = time.monotonic() + (self._settings.drain_timeout if service.client.state is EngineState.READY else 0)
        if service.answers:
            logger.info("waiting up to %g s for %d answers", self._settings.drain_timeout, len(service.answers))
        while service.answers and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for answer in list(service.answers):
            answer.inbox.fail(_ENDING)
        flushed = time.monotonic() + _FLUSH
        while service.answers and time.monotonic() < flushed:
            await asyncio.sleep(0.02)

    async def _end(self, server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
        server.should_exit = True
        with contextlib.suppress(Exception):
            await serving
        await self._service.client.stop()
        await _close((self._service.renderer, self._service.grammars))


class _Server(uvicorn.Server):
    """Leaves signals to `Lifecycle`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _close(renderers: Sequence[Renderer | None]) -> None:
    for renderer in renderers:
        if renderer is not None:
            await renderer.close()


_ENDING = ApiError(503, "the server is ending", code="draining")


def _read_template(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template {file} cannot be read: {error}") from None


@contextlib.contextmanager
def _bound(settings: ServerSettings) -> Iterator[socket.socket]:
    """A listening socket. Raises ConfigError where the address cannot be had."""
    host, port = settings.host, settings.port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"--host {host!r} is no address of this machine: {error.strerror}") from None
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(1024)
        except OSError as error:
            way_out = "; choose another --port, or 0 for a free one" if port else ""
            raise ConfigError(f"port {port} of {host} cannot be had: {error.strerror}{way_out}") from None
        yield listener
