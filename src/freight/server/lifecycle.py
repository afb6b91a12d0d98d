"""The server as a process: binds, loads, serves, drains, exits. `run` is `freight serve` without
its option parsing.

It listens from the first moment, so that /health answers 503 while the model loads. SIGTERM and
Ctrl-C stop admission and let running answers finish, up to a time limit; a second signal ends them
at once. While the model loads, either signal ends the server at once. When the engine's process
exits by itself, so does this one, with a nonzero exit status, unless --restart-engine starts
another engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import uvicorn

from freight.errors import ConfigError
from freight.files import read_text
from freight.outputs import EngineStats
from freight.processes.client import EngineClient, EngineState, WorkerOptions
from freight.processes.log import set_up_logging
from freight.processes.supervisor import Supervisor
from freight.processes.wire import EngineFacts
from freight.server.answers.answer_format import AnswerFormat, answer_format
from freight.server.app import make_app
from freight.server.call import Served
from freight.server.limits import ServingLimits
from freight.server.observe.metrics import Metrics
from freight.server.observe.monitor import Monitor
from freight.server.processes.renderer import Renderer
from freight.server.service import Service
from freight.server.settings import ServerSettings
from freight.server.transport.auth import Keys, check_binding
from freight.server.transport.errors import ApiError
from freight.server.transport.http import HttpLimits, loop_factory, server_config
from freight.server.transport.tls import Server, tls_context
from freight.text.tokenizer import Tokenizer

logger = logging.getLogger("freight")

_FIRST_PASSED = 3  # the descriptor of systemd's first socket (SD_LISTEN_FDS_START)
_FLUSH = 1.0  # seconds for the last events of streams that a shutdown ends


def run(settings: ServerSettings, options: WorkerOptions) -> int:
    """Serve until a signal or a failure; returns the exit status. Raises ConfigError before
    anything starts.
    """
    keys = _read_keys(settings)
    passed = _passed()
    check_binding(settings.host if passed is None else _address(passed)[0], keys, settings.insecure)
    template = read_template(settings.chat_template)
    tls = tls_context(settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_keyfile_password)
    set_up_logging(settings.log_format)
    with (
        passed or _bound(settings) as listener,
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        return runner.run(Lifecycle(settings, options, keys, template).serve(listener, tls))


class Lifecycle:
    """One run of the server, which owns a supervised engine."""

    def __init__(
        self, settings: ServerSettings, options: WorkerOptions, keys: Keys, template: str | None
    ) -> None:
        self._settings = settings
        self._options = options
        self._template = template
        model = str(options.engine_args["model"])
        self._names = settings.names or (options.random_weights or Path(model).name or model,)
        self._metrics = Metrics(self._names[0], keys=keys.names, old_names=settings.old_metrics)
        self._status: asyncio.Future[int]
        most = int(options.engine_args["max_num_seqs"]) + settings.max_queue
        self._engine = Supervisor(options, self, settings.restart_engine)
        self._service = Service(
            self._engine.client,
            ServingLimits(),
            keys,
            self._metrics,
            most,
            settings.request_timeout,
        )
        self._monitor = Monitor(self._service, self._metrics)

    async def serve(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> int:
        """Serve on a bound socket; returns the exit status."""
        loop = asyncio.get_running_loop()
        self._status = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._read_keys_again)
        settings = self._settings
        limits = HttpLimits(
            max_connections=settings.max_connections, write_seconds=settings.write_timeout
        )
        app = make_app(self._service, self._monitor, settings, limits)
        server = Server(server_config(app, limits, drain_seconds=1), limits, tls)
        host, port = _address(listener)
        scheme, shown = "http" if tls is None else "https", f"[{host}]" if ":" in host else host
        sys.stderr.write(f"freight: listening on {scheme}://{shown}:{port}\n")
        sys.stderr.flush()
        serving = loop.create_task(server.serve(sockets=[listener]))
        tasks = [
            loop.create_task(one)
            for one in (self._engine.load(), self._monitor.run(), self._engine.watch())
        ]
        try:
            status = await self._status
            await self._drain(status)
        finally:
            for task in tasks:
                task.cancel()
            await self._end(server, serving)
        return status

    async def compute(
        self, job: Callable[[Service], Awaitable[None]], ended_by: Sequence[signal.Signals]
    ) -> int:
        """Load the model and run `job` with it, without listening; returns the exit status."""
        loop = asyncio.get_running_loop()
        self._status = loop.create_future()
        for number in ended_by:
            loop.add_signal_handler(number, self._finish, 128 + number)

        async def work() -> None:
            await self._engine.load()
            if self._service.served is not None:
                await job(self._service)
                self._finish(0)

        working = loop.create_task(work())
        try:
            await asyncio.wait((working, self._status), return_when=asyncio.FIRST_COMPLETED)
            if working.done() and self._service.client.state is EngineState.READY:
                working.result()
            # If the engine has ended, its exit says more than the error that followed in `job`.
            return await self._status
        finally:
            working.cancel()
            await asyncio.wait((working,))
            await self._close_all()

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
        renderers: tuple[Renderer | None, Renderer | None] = None, None
        form: AnswerFormat | None = None
        if tokenizer is not None:
            renderers = self._new_renderer(facts), self._new_renderer(facts)
            form = await asyncio.to_thread(self._answer_format, tokenizer)
        facts = await client.ready
        old = self._service.renderer, self._service.grammars
        self._service.renderer, self._service.grammars = renderers
        await _close(old)
        if renderers[0] is not None and tokenizer is not None and tokenizer.has_chat_template:
            await renderers[0].start()  # here, so that the first conversation does not wait for it
        self._service.facts = facts
        self._service.served = self._served(facts, tokenizer, form)
        self._monitor.set_facts(facts, self._names[0])
        gc.collect()
        gc.freeze()
        # A full collection over the millions of values of a large answer takes a second and stalls
        # every stream. Little of a server is in cycles, so the oldest generation is collected
        # rarely.
        gc.set_threshold(700, 10, 1000)
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

    def _answer_format(self, tokenizer: Tokenizer) -> AnswerFormat | None:
        """Return the format of the model's answers. Raises ConfigError for parsers that do not fit
        this model.
        """
        settings = self._settings
        form = answer_format(tokenizer, settings.tool_call_parser, settings.reasoning_parser)
        if (form is None or not form.reads_calls) and "tools" in tokenizer.chat_template_source:
            logger.warning(
                "the chat template takes tools, and the form of this model's tool calls is not known: calls stay text; "
                "--tool-call-parser selects a form"
            )
        return form

    def _served(
        self, facts: EngineFacts, tokenizer: Tokenizer | None, form: AnswerFormat | None
    ) -> Served:
        return Served(
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
            parser_of=None if form is None else form.parser,
            forced_call=None if form is None else form.call_to,
            after_reasoning=None if form is None or not form.reads_reasoning else form.form_to,
        )

    def replaced(self, client: EngineClient) -> None:
        self._metrics.set_stats(None)
        self._service.served = None
        self._service.client = client

    def failed(self, status: int, reason: str) -> None:
        self._finish(status, reason)

    def _read_keys_again(self) -> None:
        """Reload the keys on SIGHUP, after --api-key-file was edited. Streams go on."""
        keys = self._service.keys
        try:
            keys.take(_read_keys(self._settings))
        except ConfigError as error:
            logger.error("SIGHUP: the keys stay as they were: %s", error)
            return
        self._metrics.add_keys(keys.names)
        logger.info("SIGHUP: keys were read again; there are %d", len(keys.names))

    def _finish(self, status: int, reason: str | None = None) -> None:
        if reason is not None:
            logger.error("%s", reason)
        if not self._status.done():
            self._engine.expect_end()
            self._status.set_result(status)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._status.done():
            for answer in list(self._service.answers):
                answer.inbox.fail(_ENDING)
        elif self._service.served is None:
            self._finish(128 + number, f"ended by {number.name} while the model was loading")
        else:
            self._finish(0 if number == signal.SIGTERM else 130)

    async def _drain(self, status: int) -> None:
        """Accept no more requests; wait for those that run."""
        service = self._service
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
        for answer in list(service.answers):
            answer.inbox.fail(_ENDING)
        flushed = time.monotonic() + _FLUSH
        while service.answers and time.monotonic() < flushed:
            await asyncio.sleep(0.02)

    async def _end(self, server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
        server.should_exit = True
        with contextlib.suppress(Exception):
            await serving
        await self._close_all()

    async def _close_all(self) -> None:
        await self._engine.stop()
        await _close((self._service.renderer, self._service.grammars))


async def _close(renderers: Sequence[Renderer | None]) -> None:
    for renderer in renderers:
        if renderer is not None:
            await renderer.close()


_ENDING = ApiError(503, "the server is shutting down", code="draining")


def _read_keys(settings: ServerSettings) -> Keys:
    files = () if settings.api_key_file is None else (settings.api_key_file,)
    return Keys.read(settings.api_keys, files, settings.shared_prefix_cache)


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


def _passed() -> socket.socket | None:
    """Return the listening socket that systemd passed to this process (sd_listen_fds(3)), or None.

    Raises ConfigError for several sockets, and for one that is not a listening TCP socket.
    """
    count = os.environ.pop("LISTEN_FDS", "0")
    if os.environ.pop("LISTEN_PID", "") != str(os.getpid()) or count == "0":
        return None
    if count != "1":
        raise ConfigError(
            f"LISTEN_FDS is {count}: one socket is served; give the unit one ListenStream="
        )
    try:
        listener = socket.socket(fileno=_FIRST_PASSED)
        listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(
            f"LISTEN_FDS is 1, and descriptor {_FIRST_PASSED} is not a socket: {error.strerror}"
        ) from None
    if not listening or listener.family not in (socket.AF_INET, socket.AF_INET6):
        raise ConfigError(
            "the socket that was passed does not listen on TCP: write ListenStream=ADDRESS:PORT"
        )
    listener.set_inheritable(False)
    return listener


def _address(listener: socket.socket) -> tuple[str, int]:
    host, port = listener.getsockname()[:2]
    return str(host), int(port)


@contextlib.contextmanager
def _bound(settings: ServerSettings) -> Iterator[socket.socket]:
    """Yield a listening socket. Raises ConfigError if the address cannot be bound."""
    host, port = settings.host, settings.port
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"--host {host!r} is not an address of this machine: {error.strerror}"
        ) from None
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(1024)
        except OSError as error:
            way_out = "; choose another --port, or 0 for a free one" if port else ""
            raise ConfigError(
                f"cannot listen on port {port} of {host}: {error.strerror}{way_out}"
            ) from None
        yield listener
