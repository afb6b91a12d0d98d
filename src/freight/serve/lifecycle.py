"""The server as a process: binds, loads, serves, drains, exits. `run` is `freight serve` without
its option parsing.

It listens from the first moment, so that /health answers 503 while the model loads. SIGTERM and
Ctrl-C stop admission and let running answers finish, up to a time limit; a second signal ends them
at once. While the model loads, either signal ends the server at once. SIGHUP reads the keys again,
and ends nothing at any moment (`__main__.py` has it wait until here). When the engine's process
exits by itself, so does this one, with a nonzero exit status, unless --restart-engine starts
another engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol

import uvicorn

from freight.base.descent import ENDING
from freight.errors import ConfigError
from freight.serve.processes.client import EngineState, WorkerOptions
from freight.serve.processes.log import set_up_logging
from freight.serve.service import Service
from freight.serve.serving import Serving, first_keys, read_keys, read_template
from freight.serve.settings import ServerSettings
from freight.serve.transport.auth import Keys, check_binding
from freight.serve.transport.http import HttpLimits, loop_factory, server_config
from freight.serve.transport.middleware import App
from freight.serve.transport.places import fitted
from freight.serve.transport.tls import Server, tls_context

logger = logging.getLogger("freight")

_FIRST_PASSED = 3  # the descriptor of systemd's first socket (SD_LISTEN_FDS_START)


def run(settings: ServerSettings, options: WorkerOptions) -> int:
    """Serve until a signal or a failure; returns the exit status. Raises ConfigError before
    anything starts.
    """
    keys = first_keys(settings, options)
    template = read_template(settings.chat_template)
    return listen(settings, keys, lambda: Serving(settings, options, keys, template))


def listen(settings: ServerSettings, keys: Keys, make: Callable[[], Listening]) -> int:
    """Serve what `make` returns, as `run`."""
    passed = _passed()
    check_binding(settings.host if passed is None else _address(passed)[0], keys, settings.insecure)
    tls = tls_context(settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_keyfile_password)
    set_up_logging(settings.log_format)
    with (
        passed or _bound(settings) as listener,
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        status = runner.run(Lifecycle(settings, make()).serve(listener, tls))
        # The handlers go with the event loop, and nothing is left that a signal could end
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        return status


class Listening(Protocol):
    """What is served on a socket: a model (`Serving`), or several (`several.models`)."""

    ended: asyncio.Future[int]

    @property
    def keys(self) -> Keys: ...

    @property
    def is_loading(self) -> bool:
        """Whether it has not been loaded yet, so that nobody waits for its end."""

    def app(self, limits: HttpLimits) -> App: ...

    def begin(self) -> object: ...

    def finish(self, status: int, reason: str | None = None) -> None: ...

    def end_answers(self) -> None: ...

    async def drain(self) -> None: ...

    def stop_watching(self) -> None: ...

    async def close(self) -> None: ...

    def add_keys(self, names: Sequence[str]) -> None: ...


class Lifecycle:
    """One run of the server: a socket and signals around what is served."""

    def __init__(self, settings: ServerSettings, serving: Listening) -> None:
        self._settings = settings
        self._serving = serving

    async def serve(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> int:
        """Serve on a bound socket; returns the exit status."""
        loop = asyncio.get_running_loop()
        serving = self._serving
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._read_keys_again)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGHUP,))  # one that came is handled now
        settings = self._settings
        limits = fitted(
            HttpLimits(
                max_connections=settings.max_connections, write_seconds=settings.write_timeout
            )
        )
        server = Server(server_config(serving.app(limits), limits, drain_seconds=1), limits, tls)
        host, port = _address(listener)
        scheme = "http" if tls is None else "https"
        address = f"[{host}]" if ":" in host else host
        sys.stderr.write(f"freight: listening on {scheme}://{address}:{port}\n")
        sys.stderr.flush()
        listening = loop.create_task(server.serve(sockets=[listener]))
        serving.begin()
        try:
            status = await serving.ended
            await serving.drain()
        finally:
            serving.stop_watching()
            await _end(server, listening)
            await serving.close()
        return status

    async def compute(
        self, job: Callable[[Service], Awaitable[None]], ended_by: Sequence[signal.Signals]
    ) -> int:
        """Load the model and run `job` with it, without listening; returns the exit status."""
        loop = asyncio.get_running_loop()
        serving = self._serving
        assert isinstance(serving, Serving)
        loading = serving.begin(watched=False)
        for number in ended_by:
            loop.add_signal_handler(number, serving.finish, 128 + number)

        async def work() -> None:
            await loading
            if serving.service.served is not None:
                await job(serving.service)
                serving.finish(0)

        working = loop.create_task(work())
        try:
            await asyncio.wait((working, serving.ended), return_when=asyncio.FIRST_COMPLETED)
            if working.done() and serving.service.client.state is EngineState.READY:
                working.result()
            # If the engine has ended, its exit says more than the error that followed in `job`.
            return await serving.ended
        finally:
            working.cancel()
            await asyncio.wait((working,))
            await serving.close()

    def _read_keys_again(self) -> None:
        """Reload the keys on SIGHUP, after --api-key-file was edited. Streams go on."""
        keys = self._serving.keys
        try:
            keys.take(read_keys(self._settings, keys.secret))
        except ConfigError as error:
            logger.error("SIGHUP: the keys stay as they were: %s", error)
            return
        self._serving.add_keys(keys.names)
        logger.info("SIGHUP: keys were read again; there are %d", len(keys.names))

    def _on_signal(self, number: signal.Signals) -> None:
        serving = self._serving
        if serving.ended.done():
            serving.end_answers()
        elif serving.is_loading:
            serving.finish(128 + number, f"ended by {number.name} while the model was loading")
        else:
            serving.finish(0 if number == signal.SIGTERM else 130)


async def _end(server: uvicorn.Server, listening: asyncio.Task[None]) -> None:
    server.should_exit = True
    with contextlib.suppress(Exception):
        await listening


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
    host = settings.host
    port = settings.port
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
