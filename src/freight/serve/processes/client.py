"""EngineClient: the engine's process, from its parent's side. Starts it, sends requests, routes the
deltas.

The deltas of a request go to its `Receiver`. When the process exits, every running request fails
with a NotReadyError, `state` is ENDED, and `on_end` is called: `supervisor.py` decides whether to
start another.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Protocol, cast
from weakref import WeakSet

from freight.base.fields import JsonDict, JsonObject
from freight.cache.events import CacheChanged
from freight.engine.adapters import LoadedAdapter, LoRARequest
from freight.engine.intake import AcceptedPrompt
from freight.engine.messages import Action
from freight.errors import EngineError, FreightError, RequestError
from freight.outputs import EngineStats, RequestDelta
from freight.sampling import SamplingParams
from freight.serve.processes import wire
from freight.serve.processes.children import spawn, without_secrets
from freight.serve.processes.frames import Decoder, FrameError, encode
from freight.serve.processes.pulse import Silence

logger = logging.getLogger("freight")

_LOOK_EVERY = 0.01  # seconds between looks at a process that is about to end
_PATIENCE = 10.0  # seconds until it is killed
_SOON = 0.3  # seconds in which its end is waited for, to say how it ended
_READ = 1 << 16  # bytes


class EngineState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    STALLED = "stalled"  # was ready, and gives no sign of life
    ENDED = "ended"


@dataclass(frozen=True)
class WorkerOptions:
    """Options of the engine's process: the fields of EngineArgs, and those of the process.

    log_format         of `log.py`
    log_model          what its lines call the model; None: nothing, as there is one alone
    cache_events       whether it tells what its cache gains and loses
    events_per_second  reports of new tokens per second at most (`engine.loop`)
    stall_timeout      seconds without a sign of life after which the engine counts as stalled; 0:
                       never
    """

    engine_args: JsonObject
    random_weights: str | None = None
    log_level: int = logging.INFO
    log_format: str = "text"
    log_model: str | None = None
    events_per_second: float = 0.0
    stall_timeout: float = 0.0
    cache_events: bool = False


class NotReadyError(EngineError):
    """There is no engine that could serve a request now; `state` says why."""

    def __init__(self, state: EngineState, how: str = "") -> None:
        """how: ' with signal 9', of an engine that has ended."""
        super().__init__(_NOT_READY[state] + how)
        self.state = state


# an engine may be ready before the rest of a server
_NOT_READY = dict.fromkeys(EngineState, "the model is still loading") | {
    EngineState.STALLED: "the engine's process gives no sign of life; try again later",
    EngineState.ENDED: "the engine's process has ended",
}


class TooLongError(RequestError):
    """A request that no message can hold."""


class Receiver(Protocol):
    """Takes what comes of the requests of an answer."""

    def put(self, index: int, delta: RequestDelta) -> None:
        """What is new of the index-th request."""

    def fail(self, error: Exception) -> None:
        """Nothing more comes: the answer fails, after what has come."""


class Running:
    """One request in the engine: the index-th of its answer."""

    def __init__(self, request_id: str, index: int, num_sequences: int, receiver: Receiver) -> None:
        self.request_id = request_id
        self.num_sequences = num_sequences
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.index = index
        self.receiver = receiver

    def fail(self, error: Exception) -> None:
        self.receiver.fail(error)
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # marks it as retrieved: there may be no waiter any more


class EngineClient(asyncio.BufferedProtocol):
    """The engine's process and its connection. For use within one event loop.

    It reads into a buffer of its own: for every read of a `Protocol`, asyncio allocates 256 KiB,
    which costs more than to decode what a step of 32 requests says.
    """

    def __init__(
        self,
        options: WorkerOptions,
        on_stats: Callable[[EngineStats], None],
        on_step: Callable[[float, int], None],
        on_end: Callable[[], None],
        on_told: Callable[[], None] = lambda: None,
        on_changed: Callable[[CacheChanged], None] = lambda _: None,
    ) -> None:
        """on_told: called once what came together has been given to its receivers. on_changed: with
        what the cache gained and lost, where the options ask for it.
        """
        self._options = options
        self._on_stats = on_stats
        self._on_step = on_step
        self._on_end = on_end
        self._on_told = on_told
        self._on_changed = on_changed
        self.state = EngineState.LOADING
        self.failure: FreightError | None = None  # why it could not be loaded
        self.stats: EngineStats | None = None
        self.adapters: tuple[LoadedAdapter, ...] = ()  # those that are loaded
        self._changes: dict[str, asyncio.Future[None]] = {}  # commands that are unanswered
        self.fingerprint = ""  # of the weights of now
        self.sleep_level = 0
        self._num_changes = 0
        self._running: dict[str, Running] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._frames = Decoder(wire.CAP)
        self._buffer = memoryview(bytearray(_READ))
        self.between_ticks = min(1.0, options.stall_timeout / 4)  # seconds
        self._silence = Silence(self.between_ticks)
        self._is_ping_pending = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def num_running(self) -> int:
        """Number of requests that have not ended."""
        return len(self._running)

    @property
    def num_sequences(self) -> int:
        """Number of their completions."""
        return sum(running.num_sequences for running in self._running.values())

    async def start(self) -> None:
        """Start the process, which begins to load the model."""
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[wire.EngineFacts] = loop.create_future()
        self.ready: asyncio.Future[wire.EngineFacts] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()  # the exit status
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        _connections.add(ours)
        with theirs:
            command = [
                sys.executable,
                *_flags(),
                "-m",
                "freight.serve.processes.worker",
                str(theirs.fileno()),
            ]
            environ = without_secrets(os.environ)
            files = (theirs.fileno(),)
            self._process = spawn(command, env=environ, pass_fds=files, stdin=subprocess.DEVNULL)
        await loop.create_unix_connection(lambda: self, sock=ours)
        options = self._options
        values = asdict(options)
        self._send([wire.START, values.pop("engine_args"), values])

    def submit(
        self,
        request_id: str,
        index: int,
        prompt: AcceptedPrompt,
        params: SamplingParams,
        receiver: Receiver,
        adapter: LoRARequest | None = None,
    ) -> Running:
        """Send a request, whose deltas go to `receiver`.

        adapter: by its name, or to be loaded first; None: the model alone.

        Raises NotReadyError while no engine is ready, TooLongError for a request that is too long
        for a message.
        """
        if self.state is not EngineState.READY:
            raise NotReadyError(self.state)
        values = wire.params_to_json(params)
        try:
            named = wire.request_to_json(adapter)
            self._send([wire.ADD, request_id, prompt.text, prompt.token_ids, values, named])
        except FrameError as error:
            raise TooLongError(
                f"the request is too long to be sent to the engine: {error}. Send a shorter prompt"
            ) from None
        running = self._running[request_id] = Running(request_id, index, params.n, receiver)
        return running

    def load_adapter(self, name: str, path: str) -> asyncio.Future[None]:
        """Load an adapter, or replace the one that has the name, for requests that are sent later;
        `adapters` has it once the future is done.

        The future raises what the engine raised, and NotReadyError if that ends. Raises NotReadyError
        while no engine is ready, TooLongError for what no message can hold.
        """
        return self._change(wire.LOAD_ADAPTER, name, path)

    def unload_adapter(self, name: str) -> asyncio.Future[None]:
        """Take an adapter's name away from requests that are sent later; as `load_adapter`."""
        return self._change(wire.UNLOAD_ADAPTER, name)

    def change(self, action: Action, value: str | int = "") -> asyncio.Future[None]:
        """Change the engine between two steps; `fingerprint` and `sleep_level` are those after it once
        the future is done. As `load_adapter`.
        """
        return self._change(wire.CHANGE, action, value)

    def _change(self, kind: str, *values: str | int) -> asyncio.Future[None]:
        if self.state is not EngineState.READY:
            raise NotReadyError(self.state)
        self._num_changes += 1
        command_id = str(self._num_changes)
        try:
            self._send([kind, command_id, *values])
        except FrameError as error:
            raise TooLongError(f"the command is too long for the engine: {error}") from None
        change = self._changes[command_id] = asyncio.get_running_loop().create_future()
        return change

    def abort(self, running: Running) -> None:
        """Abort a request. Does nothing if it has ended."""
        if (
            self._running.pop(running.request_id, None) is not None
            and self.state is not EngineState.ENDED
        ):
            self._send([wire.ABORT, running.request_id])

    def tick(self, now: float) -> float:
        """Ping the engine, every `between_ticks` seconds; returns its seconds of silence.

        `state` is STALLED while they exceed `stall_timeout`. A loading engine is not pinged.
        """
        if self.state not in (EngineState.READY, EngineState.STALLED):
            return 0.0
        silent = self._silence.tick(now)
        self.state = EngineState.READY
        if silent > self._options.stall_timeout:
            self.state = EngineState.STALLED
        if not self._is_ping_pending:
            self._is_ping_pending = True
            self._send([wire.PING])
        return silent

    def fail_all(self, error: FreightError) -> None:
        """Fail every request, and abort it: an engine that goes on computes nothing for nobody."""
        for running in list(self._running.values()):
            self.abort(running)
            running.fail(error)

    def kill(self) -> None:
        """End the process at once; `on_end` is called."""
        assert self._process is not None
        self._process.kill()

    async def stop(self) -> None:
        """End the process after the step under way; kill it while it loads or is stalled, or after
        10 seconds.
        """
        if self._process is None:
            return
        if self.state in (EngineState.LOADING, EngineState.STALLED):
            self._process.kill()
        if self._transport is not None:
            self._transport.close()
        await _end_of(self._process)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has no base class

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._silence.heard()
        try:
            messages = self._frames.feed(self._buffer[:nbytes])
        except FrameError:
            logger.exception("the engine's process sent a message that cannot be read")
            self.kill()
            return
        try:
            for message in messages:
                self._take(*message)
        finally:
            self._on_told()

    def connection_lost(self, exc: Exception | None) -> None:
        self.state = EngineState.ENDED
        self._reaping = asyncio.get_running_loop().create_task(self._reap())

    async def _reap(self) -> None:
        assert self._process is not None
        ending = asyncio.get_running_loop().create_task(_end_of(self._process))
        await asyncio.wait((ending,), timeout=_SOON)
        how = ""
        if ending.done():
            how = f" with {describe_exit(ending.result())}"
        for running in self._running.values():
            running.fail(NotReadyError(self.state, how))
        self._running.clear()
        for change in self._changes.values():
            if not change.done():
                change.set_exception(NotReadyError(self.state, how))
        self._changes.clear()
        for waiting in (self.opened, self.ready):
            if not waiting.done():
                waiting.cancel()
        self.ended.set_result(await ending)
        self._on_end()

    def _send(self, message: list[Any]) -> None:
        assert self._transport is not None
        self._transport.write(encode(message, wire.CAP))

    def _take(self, name: str, *values: Any) -> None:
        if name == wire.STEPPED:
            self._stepped(*values)
        elif name == wire.ACCEPTED:
            self._accept(*values)
        elif name == wire.REFUSED:
            self._refuse(*values)
        elif name == wire.ADAPTERS:
            self._adapters_are(*values)
        elif name == wire.CHANGED:
            self._changed(*values)
        elif name == wire.LOST:
            self._lose(*values)
        elif name == wire.CACHE:
            self._on_changed(wire.changed_from_json(*values))
        elif name == wire.PONG:
            self._is_ping_pending = False
            self._silence.pong(values[0])
        elif name == wire.STATS:
            self.stats = wire.stats_from_json(values[0])
            self._on_stats(self.stats)
        else:
            self._take_start(name, *values)

    def _take_start(self, name: str, facts: Any, *failure: str) -> None:
        """Take a message of an engine that starts."""
        if name == wire.OPENED:
            _resolve(self.opened, facts)
        elif name == wire.READY:
            self.state = EngineState.READY
            self.adapters = wire.adapters_from_json(facts["adapters"])
            self.fingerprint = facts["fingerprint"]
            _resolve(self.ready, facts)
        elif name == wire.FAILED:
            self.failure = wire.error_from_json(facts, *failure)

    def _stepped(self, deltas: Sequence[Any], steps: Sequence[tuple[float, int]]) -> None:
        for fields in deltas:
            running = self._running.get(fields[0])
            if running is not None:
                delta = wire.delta_from_json(fields)
                if delta.finished:
                    del self._running[delta.request_id]
                running.receiver.put(running.index, delta)
        for seconds, num_tokens in steps:
            self._on_step(seconds, num_tokens)

    def _accept(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            running = self._running.get(request_id)
            if running is not None and not running.accepted.done():
                running.accepted.set_result(None)

    def _refuse(self, request_id: str, kind: str, error: str) -> None:
        running = self._running.pop(request_id, None)
        if running is not None:
            running.fail(wire.error_from_json(kind, error))

    def _adapters_are(
        self, loaded: Sequence[Sequence[Any]], command_id: str, failure: Sequence[str] | None
    ) -> None:
        self.adapters = wire.adapters_from_json(loaded)
        self._answered(command_id, failure)

    def _changed(
        self, command_id: str, fingerprint: str, level: int, failure: Sequence[str] | None
    ) -> None:
        self.fingerprint = fingerprint
        self.sleep_level = level
        self._answered(command_id, failure)

    def _answered(self, command_id: str, failure: Sequence[str] | None) -> None:
        change = self._changes.pop(command_id, None)
        if change is None or change.done():
            return
        if failure is None:
            change.set_result(None)
        else:
            kind, message = failure
            change.set_exception(wire.error_from_json(kind, message))

    def _lose(self, request_id: str, error: str) -> None:
        running = self._running.get(request_id)
        if running is not None:
            self.abort(running)
            running.fail(EngineError(f"the engine's report on the answer is too long: {error}"))


# This process's ends of connections to engines. An engine ends when its connection closes, so a
# forked child (multiprocessing) must not keep a second end open.
_connections: WeakSet[socket.socket] = WeakSet()


def _close_in_child() -> None:
    for connection in _connections:
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


async def _end_of(process: subprocess.Popen[bytes]) -> int:
    """Return the exit status of a process whose connection is closed; kill it if it does not end.

    Polls: at the end of an interpreter no new thread could wait for it.
    """
    deadline = time.monotonic() + _PATIENCE
    while (status := process.poll()) is None:
        if time.monotonic() > deadline:
            process.kill()
        await asyncio.sleep(_LOOK_EVERY)
    return status


def _resolve(waiting: asyncio.Future[wire.EngineFacts], facts: JsonDict) -> None:
    """Resolve a future with facts, unless it was cancelled because the parent is shutting down."""
    if not waiting.done():
        waiting.set_result(wire.facts_from_json(facts))


def _flags() -> list[str]:
    """Return the interpreter options of this process that change what code does: -O and -X dev."""
    flags = []
    if sys.flags.optimize:
        flags.append("-" + "O" * sys.flags.optimize)
    if sys.flags.dev_mode:
        flags += ["-X", "dev"]
    return flags


def describe_exit(status: int) -> str:
    """Return 'signal 9' or 'exit status 1'."""
    if status < 0:
        return f"signal {-status}"
    return f"exit status {status}"
