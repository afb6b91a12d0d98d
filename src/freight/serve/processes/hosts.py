"""Where the engine of an AsyncLLM is: in a process of its own, or in a thread of this one.

Requests come from any thread, and what comes of them is put into each `Growing`. A host knows
nothing of the event loops that read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import fields, replace
from queue import SimpleQueue
from typing import Protocol

from freight.cache.events import CacheChanged
from freight.engine.adapters import LoadedAdapter
from freight.engine.intake import Intake
from freight.engine.messages import (
    Abort,
    Accepted,
    Action,
    AdaptersAre,
    Add,
    Change,
    Changed,
    Command,
    Event,
    LoadAdapter,
    Refused,
    Stepped,
    Stop,
    UnloadAdapter,
)
from freight.errors import EngineError, FreightError
from freight.outputs import EngineStats
from freight.serve.processes.client import EngineClient, NotReadyError, WorkerOptions
from freight.serve.processes.growing import Growing, Readers
from freight.serve.processes.log import LogFormat
from freight.serve.processes.pulse import STALL_TIMEOUT
from freight.serve.processes.supervisor import Supervisor
from freight.serve.processes.wire import EngineFacts
from freight.settings.engine import EngineArgs
from freight.settings.resolve import check, for_serving
from freight.text.tokenizer import Tokenizer

logger = logging.getLogger("freight")

_WAY_OUT = "make another AsyncLLM"


class Host(Protocol):
    """An engine that is ready. All may be called from any thread.

    intake  the model, as its prompts see it
    end     why there is no engine any more
    pid     of its process
    """

    intake: Intake
    end: EngineError | None

    @property
    def stats(self) -> EngineStats: ...

    @property
    def pid(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Of the weights of now."""
        ...

    @property
    def sleep_level(self) -> int:
        """How deep the engine sleeps."""
        ...

    def submit(self, request: Growing) -> None:
        """Submit a request; it fails if it cannot be served."""

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Those that are loaded."""
        ...

    def load_adapter(self, name: str, path: str) -> Future[None]:
        """Load an adapter for requests to come; the future raises what the engine raised."""
        ...

    def unload_adapter(self, name: str) -> Future[None]:
        """Take an adapter's name away from requests to come; as `load_adapter`."""
        ...

    def change(self, action: Action, value: str | int = "") -> Future[None]:
        """Change the engine between two steps; the future raises what the engine raised."""
        ...

    def abort(self, request: Growing) -> None:
        """Abort a request. One that has ended stays as it is."""

    def stop(self, at_once: bool = False) -> None:
        """End the engine, and wait for its end. at_once: not even for the step under way. In a fork
        of the process that has the engine, and a second time, this does nothing.
        """


class ProcessHost:
    """An engine in a process of its own, which ends with this one. A thread has the event loop in
    which the process is talked to.
    """

    def __init__(
        self, args: EngineArgs, events_per_second: float, stall_timeout: float = STALL_TIMEOUT
    ) -> None:
        """Returns when the model is loaded. Raises what loading it raised in that process.

        stall_timeout: seconds without a sign of life after which requests fail; 0: never
        """
        check(args)  # before a process is started
        options = WorkerOptions(
            {field.name: getattr(args, field.name) for field in fields(args)},
            log_level=logger.getEffectiveLevel(),
            log_format=LogFormat.PLAIN,
            events_per_second=events_per_second,
            stall_timeout=stall_timeout,
        )
        self.end: EngineError | None = None
        self._owner = os.getpid()
        self._loop = asyncio.SelectorEventLoop()
        self._over = asyncio.Event()
        self._readers = Readers()
        self._engine = Supervisor(options, self, on_told=self._readers.flush)
        self._stats: EngineStats | None = None
        self._reported = asyncio.Event()  # there are stats
        self._thread = threading.Thread(target=self._run, name="freight-engine", daemon=True)
        self._opened: Future[EngineFacts] = Future()
        self._ready: Future[EngineFacts] = Future()
        self._thread.start()
        try:
            folder = self._opened.result().tokenizer
            tokenizer = None if folder is None else Tokenizer.load(folder)  # beside the weights
            facts = self._ready.result()
        except BaseException:
            self.stop(at_once=True)
            raise
        self.intake = Intake(
            tokenizer,
            facts.vocab_size,
            facts.max_model_len,
            facts.pooling,
            facts.generates,
            priorities=args.has_priorities,
        )

    @property
    def stats(self) -> EngineStats:
        assert self._stats is not None, "they are waited for"
        return self._stats

    @property
    def pid(self) -> int:
        pid = self._engine.client.pid
        assert pid is not None
        return pid

    def submit(self, request: Growing) -> None:
        request.readers = self._readers
        if not self._call(self._submit, request):
            request.fail(self.end or EngineError(f"the engine was stopped: {_WAY_OUT}"))

    def load_adapter(self, name: str, path: str) -> Future[None]:
        return self._change(lambda client: client.load_adapter(name, path))

    def unload_adapter(self, name: str) -> Future[None]:
        return self._change(lambda client: client.unload_adapter(name))

    def change(self, action: Action, value: str | int = "") -> Future[None]:
        return self._change(lambda client: client.change(action, value))

    @property
    def fingerprint(self) -> str:
        return self._engine.client.fingerprint

    @property
    def sleep_level(self) -> int:
        return self._engine.client.sleep_level

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...]:
        return self._engine.client.adapters

    def abort(self, request: Growing) -> None:
        self._call(self._abort, request)

    def stop(self, at_once: bool = False) -> None:
        if os.getpid() != self._owner:
            return
        if at_once and self._engine.client.pid is not None:
            self._engine.client.kill()
        with contextlib.suppress(RuntimeError):  # the loop is closed: it was stopped before
            self._loop.call_soon_threadsafe(self._over.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def load(self, client: EngineClient) -> None:
        self._opened.set_result(await client.opened)
        facts = await client.ready
        await self._reported.wait()
        self._ready.set_result(facts)

    def set_stats(self, stats: EngineStats) -> None:
        self._stats = stats
        self._reported.set()

    def observe_step(self, seconds: float, num_tokens: int) -> None:
        pass

    def set_stalled(self, is_stalled: bool) -> None:
        if is_stalled:
            client = self._engine.client
            client.fail_all(NotReadyError(client.state))

    def replaced(self, client: EngineClient) -> None:
        raise AssertionError("no engine is started in place of another")

    def failed(self, status: int, reason: str) -> None:
        self.end = EngineError(f"{reason}: {_WAY_OUT}")
        for waiting in (self._opened, self._ready):
            if not waiting.done():
                waiting.set_exception(self._engine.client.failure or self.end)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loading = self._loop.create_task(self._engine.load())
        watching = self._loop.create_task(self._engine.watch())
        try:
            await self._over.wait()
        finally:
            watching.cancel()
            await self._engine.stop()

    def _change(self, send: Callable[[EngineClient], Awaitable[None]]) -> Future[None]:
        async def changed() -> None:
            await send(self._engine.client)

        change = changed()
        try:
            return asyncio.run_coroutine_threadsafe(change, self._loop)
        except RuntimeError:  # the loop has ended
            change.close()
            raise self.end or EngineError(f"the engine was stopped: {_WAY_OUT}") from None

    def _call(self, action: Callable[[Growing], None], request: Growing) -> bool:
        """Call `action` in the loop; False: the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(action, request)
        except RuntimeError:
            return False
        return True

    def _submit(self, request: Growing) -> None:
        try:
            request.running = self._engine.client.submit(
                request.name, 0, request.prompt, request.params, request, request.adapter
            )
        except FreightError as error:
            request.fail(self.end or error)

    def _abort(self, request: Growing) -> None:
        if request.running is not None:
            self._engine.client.abort(request.running)


class ThreadHost:
    """An engine in this process, which a thread of its own steps."""

    def __init__(self, args: EngineArgs, events_per_second: float) -> None:
        """Returns when the model is loaded. Raises as LLM does."""
        from freight.engine.build import start_engine
        from freight.engine.loop import Loop
        from freight.engine.renewal import Renewal
        from freight.model.open import open_model

        opened = open_model(args)
        opened = replace(opened, args=for_serving(args, str(opened.device.kind)))
        engine, config = start_engine(opened)
        self.intake = engine.intake
        self.stats = engine.stats()
        self.pid = self._owner = os.getpid()
        self.end: EngineError | None = None
        self.adapters = engine.adapters.loaded
        self.sleep_level = 0
        self._changes: dict[str, Future[None]] = {}
        self._requests: dict[str, Growing] = {}
        self._readers = Readers()
        self._commands: SimpleQueue[Command] = SimpleQueue()
        renewal = Renewal(engine, opened, config)
        self.fingerprint = renewal.fingerprint()
        loop = Loop(
            engine,
            self._commands,
            self._emit,
            events_per_second=events_per_second,
            renewal=renewal,
        )
        self._thread = threading.Thread(
            target=self._run, args=(loop.run,), name="freight-engine", daemon=True
        )
        self._thread.start()

    def submit(self, request: Growing) -> None:
        request.readers = self._readers
        self._requests[request.name] = request
        prompt = request.prompt
        self._commands.put(
            Add(request.name, prompt.text, prompt.token_ids, request.params, request.adapter)
        )
        if self.end is not None:  # nobody may look into the queue any more
            request.fail(self.end)

    def load_adapter(self, name: str, path: str) -> Future[None]:
        command_id = uuid.uuid4().hex
        return self._change(LoadAdapter(command_id, name, path))

    def unload_adapter(self, name: str) -> Future[None]:
        command_id = uuid.uuid4().hex
        return self._change(UnloadAdapter(command_id, name))

    def change(self, action: Action, value: str | int = "") -> Future[None]:
        return self._change(Change(uuid.uuid4().hex, action, value))

    def _change(self, command: LoadAdapter | UnloadAdapter | Change) -> Future[None]:
        change: Future[None] = Future()
        self._changes[command.command_id] = change
        self._commands.put(command)
        if self.end is not None:
            _finish(change, self.end)
        return change

    def abort(self, request: Growing) -> None:
        if self._requests.pop(request.name, None) is not None:
            self._commands.put(Abort(request.name))

    def stop(self, at_once: bool = False) -> None:
        """Stop after the step under way, also if `at_once`."""
        if os.getpid() != self._owner:
            return
        self._commands.put(Stop())
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self, steps: Callable[[], None]) -> None:
        try:
            steps()
        except BaseException as error:
            logger.exception("the engine's thread has ended")
            how = f"{type(error).__name__}: {error}"
            self.end = EngineError(f"the engine's thread ended with {how}: {_WAY_OUT}")
            for request in list(self._requests.values()):
                request.fail(self.end)
            for change in list(self._changes.values()):
                _finish(change, self.end)

    def _answered(self, command_id: str, failure: FreightError | None) -> None:
        change = self._changes.pop(command_id, None)
        if change is not None:
            _finish(change, failure)

    def _emit(self, event: Event) -> None:
        match event:
            case Stepped(deltas, _):
                for delta in deltas:
                    request = self._requests.get(delta.request_id)
                    if request is not None:
                        if delta.finished:
                            self._requests.pop(delta.request_id, None)
                        request.put(0, delta)
                self._readers.flush()
            case Refused(request_id, error):
                request = self._requests.pop(request_id, None)
                if request is not None:
                    request.fail(error)
            case AdaptersAre(loaded, command_id, failure):
                self.adapters = loaded
                self._answered(command_id, failure)
            case Changed(command_id, fingerprint, level, failure):
                self.fingerprint = fingerprint
                self.sleep_level = level
                self._answered(command_id, failure)
            case Accepted() | CacheChanged():  # which nobody asks for
                pass
            case stats:
                self.stats = stats


def _finish(change: Future[None], error: Exception | None) -> None:
    """Resolve a command's future, unless who waited has left."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            change.set_result(None)
        else:
            change.set_exception(error)
