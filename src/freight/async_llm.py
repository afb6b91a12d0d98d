"""AsyncLLM: the engine for programs with event loops, with the names that vLLM's users know.

It loads no torch where its engine is in a process of its own, and needs nothing of the server.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import uuid
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self

from freight.base.start_log import log_to_stderr
from freight.engine.adapters import LoRARequest
from freight.engine.intake import AcceptedPrompt
from freight.engine.messages import Action, level_of_tags
from freight.errors import ConfigError, EngineError, RequestError, choices
from freight.outputs import EngineStats, FinishReason, RequestOutput
from freight.sampling import SamplingParams
from freight.serve.processes.growing import Growing
from freight.serve.processes.hosts import Host, ProcessHost, ThreadHost
from freight.serve.processes.pulse import STALL_TIMEOUT
from freight.settings.engine import EngineArgs
from freight.text.prompts import (
    Message,
    Prompt,
    Tokenization,
    chat_prompt,
    check_on_error,
    params_of,
    raise_failed,
    text_or_ids,
    unknown_option,
)

Accepted = tuple[AcceptedPrompt, SamplingParams]

_ENGINES = "process", "thread"
_LONG = 1 << 12  # characters: tokenizing more takes a thread, so that the event loop goes on
_EVENTS_PER_SECOND = 50.0
_PAUSES = "abort", "wait", "keep"
_LOOK_EVERY = 0.005  # seconds between looks at what still runs


class AsyncLLM:
    """A model ready to generate, for any number of event loops.

        async with AsyncLLM(model="demo", kv_cache_dtype="fp8") as llm:
            async for output in llm.generate("def main(", SamplingParams(max_tokens=64)):
                print(output.outputs[0].text)

    The options are those of LLM, and it raises as LLM does. It returns when the model is loaded:
    `await asyncio.to_thread(AsyncLLM, …)` holds up no event loop meanwhile.

    engine                 "process": in a process of its own, which ends with this one; "thread":
                           in this process, whose Python then holds up its steps
    max_events_per_second  of one request: tokens that come faster share an output; 0: an output for
                           every step
    stall_timeout          seconds without a sign of life of the engine's process after which its
                           requests fail with EngineError, and so do new ones until it gives signs
                           of life again; 0: they wait for ever

    May be used from several event loops and threads. A fork of this process cannot use it, and a
    process that is spawned makes its own.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        engine: str = "process",
        max_events_per_second: float = _EVENTS_PER_SECOND,
        stall_timeout: float = STALL_TIMEOUT,
        **options: Any,
    ) -> None:
        log_to_stderr()
        if engine not in _ENGINES:
            raise ConfigError(f"engine is {engine!r}; it must be {choices(map(repr, _ENGINES))}")
        if not stall_timeout >= 0:
            raise ConfigError(f"stall_timeout is {stall_timeout}; it must be 0 or more seconds")
        if not max_events_per_second >= 0:
            raise ConfigError(
                f"max_events_per_second is {max_events_per_second}; it must be 0 or more"
            )
        args = EngineArgs.from_options(model=model, **options)
        self._names = itertools.count()
        self._requests: dict[str, Growing] = {}  # by the callers' ids
        self._lock = threading.Lock()  # of `_requests` and `_end`
        self._end: EngineError | None = None  # it was shut down
        self._pid = os.getpid()
        self._host: Host
        if engine == "process":
            self._host = ProcessHost(args, max_events_per_second, stall_timeout)
        else:
            self._host = ThreadHost(args, max_events_per_second)
        self._pauses = Pauses(self)
        # where nobody calls `shutdown`: when the last reference or the interpreter goes
        self._at_end = weakref.finalize(self, self._host.stop, at_once=True)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        on_error: str = "raise",
        tokenization_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
        **unknown: Any,
    ) -> Stream:
        """Complete one prompt; the outputs, for `async for`, have all there is so far, and the last
        is `finished`.

        Prompts and options are those of `LLM.stream`. The request begins when its first output is
        awaited, which raises RequestError where it cannot be served. `request_id` is a name for
        `abort`, made up if it is None. Leaving the loop, and cancelling the task that awaits,
        aborts the request. `lora_request` names its adapter, which is loaded when the request begins
        unless it is already; None: the model alone.
        """
        for name in unknown:
            raise unknown_option(
                name,
                "generate takes prompt, sampling_params, request_id, on_error, tokenization_kwargs and lora_request",
            )
        check_on_error(on_error)
        tokenization = Tokenization.of(tokenization_kwargs)
        params = tokenization.applied(params_of(sampling_params, 1)[0])
        adds = tokenization.add_special_tokens is not False

        async def accept() -> Accepted:
            return await self._accept(text_or_ids(prompt), params, adds), params

        return Stream(self, request_id, accept, on_error, lora_request)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        on_error: str = "raise",
        tokenization_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
        **template_options: Any,
    ) -> Stream:
        """Answer one conversation, a list of {"role", "content"}, through the model's chat template.

        `template_options` are those of `LLM.chat_prompt`; everything else is as in `generate`, but
        that no special tokens are added unless `tokenization_kwargs` asks for them.
        """
        check_on_error(on_error)
        tokenization = Tokenization.of(tokenization_kwargs)
        params = tokenization.applied(params_of(sampling_params, 1)[0])
        adds = bool(tokenization.add_special_tokens)

        async def accept() -> Accepted:
            tokenizer = self._host.intake.tokenizer
            # what a template does takes as long as it likes
            ids = await asyncio.to_thread(chat_prompt, tokenizer, messages, adds, template_options)
            return await self._accept(ids, params, adds), params

        return Stream(self, request_id, accept, on_error, lora_request)

    async def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Begin no request until `resume_generation`: those that come wait.

        mode         what becomes of those that run. "abort": they end, with finish reason "abort";
                     "wait": they finish first; "keep": they stand still
        clear_cache  empty the prefix cache

        Returns once that is done. Raises ConfigError for another mode.
        """
        await self._pauses.pause(mode, clear_cache)

    async def resume_generation(self) -> None:
        """Begin requests again, and go on with those that stood still."""
        await self._pauses.resume()

    async def is_paused(self) -> bool:
        """Return whether requests wait for `resume_generation`."""
        return self._pauses.mode is not None

    async def update_weights_from_disk(self, model: str, abort_all_requests: bool = False) -> None:
        """Go on with other weights of the same model, from a folder or a hub id, once no request is
        computed: those that run finish first, or end. `fingerprint` changes, and no block of the cache is found
        again.

        Raises ConfigError and CheckpointError for weights that do not fit, CapacityError where they
        have no room beside the old ones, RequestError while requests stand still. The old weights
        stay then.
        """
        await self._pauses.change(Action.UPDATE, model, abort_all_requests)

    async def sleep(self, level: int = 1) -> None:
        """Give memory back, as `LLM.sleep`, once the requests that run have finished. Requests are
        refused until `wake_up`.
        """
        await self._pauses.change(Action.SLEEP, level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again, as `LLM.wake_up`."""
        await self._pauses.change(Action.WAKE_UP, level_of_tags(tags))

    async def reset_prefix_cache(self) -> None:
        """Find no block of the cache again. Those of a store are found still."""
        self._check()
        await asyncio.wrap_future(self._host.change(Action.RESET_PREFIX_CACHE))

    async def is_sleeping(self) -> bool:
        """Return whether requests are refused until `wake_up`."""
        return self._host.sleep_level > 0

    @property
    def fingerprint(self) -> str:
        """What decides the bits of this engine, weights included: 'fp_' and 16 digits."""
        return self._host.fingerprint

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter under a name, for `LoRARequest(name)`. One that has the name is replaced:
        requests that use it end with it.

        Raises CheckpointError and ConfigError for its files, CapacityError where all of `max_loras`
        are in use, RequestError for an engine that takes none; nothing has changed then.
        """
        self._check()
        await asyncio.wrap_future(self._host.load_adapter(name, path))

    async def unload_adapter(self, name: str) -> None:
        """Take an adapter away. Raises RequestError for a name that nothing is loaded under."""
        self._check()
        await asyncio.wrap_future(self._host.unload_adapter(name))

    @property
    def adapters(self) -> dict[str, str]:
        """The digests of the adapters that are loaded, by name."""
        return {adapter.name: adapter.digest for adapter in self._host.adapters}

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests by their ids. Who awaits one gets its last output, with finish reason
        "abort". Ids that are not known are ignored.
        """
        self._check_process()
        for name in [request_id] if isinstance(request_id, str) else request_id:
            growing = self._requests.get(name)
            if growing is not None:
                self._host.abort(growing)
                growing.end(FinishReason.ABORT)

    def stats(self) -> EngineStats:
        """Return the engine's statistics, at most half a second old while it has work."""
        self._check()
        return self._host.stats

    def shutdown(self) -> None:
        """End the engine, and wait for its end. Requests that run fail with EngineError. Leaving
        `async with` does this, and holds up no event loop.
        """
        if os.getpid() != self._pid:  # the engine is not this process's
            return
        with self._lock:
            self._end = self._end or _shut_down()
            running = list(self._requests.values())
        for growing in running:
            growing.fail(_shut_down())
        self._host.stop()
        self._at_end.detach()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    def __reduce__(self) -> NoReturn:
        raise ConfigError("an AsyncLLM cannot be pickled: make one in each process that needs one")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise EngineError(
                f"this AsyncLLM was made in process {self._pid}, and process {os.getpid()} is a fork of that: "
                "make another here"
            )

    def _check(self) -> None:
        """Raise EngineError if there is no engine."""
        self._check_process()
        end = self._end or self._host.end
        if end is not None:
            raise EngineError(str(end))  # each caller has a traceback of its own

    async def _accept(
        self, prompt: str | Sequence[int], params: SamplingParams, adds: bool
    ) -> AcceptedPrompt:
        accept = partial(self._host.intake.accept, prompt, params, adds)
        is_long = isinstance(prompt, str) and len(prompt) >= _LONG
        return await asyncio.to_thread(accept) if is_long else accept()

    def _begin(
        self, request_id: str | None, accepted: Accepted, adapter: LoRARequest | None
    ) -> Growing:
        """Submit a request to the engine."""
        self._check()
        name = uuid.uuid4().hex if request_id is None else request_id
        tokenizer = self._host.intake.tokenizer
        growing = Growing(str(next(self._names)), name, *accepted, tokenizer, adapter)
        with self._lock:
            if self._end is not None:
                raise _shut_down()
            if name in self._requests:
                raise RequestError(f"request id {name!r} is in use")
            self._requests[name] = growing
        self._host.submit(growing)
        return growing

    def _leave(self, growing: Growing) -> None:
        """Forget a request without a reader, and abort it if it still runs."""
        if os.getpid() != self._pid:
            return
        self._requests.pop(growing.request_id, None)
        if not growing.is_finished:
            self._host.abort(growing)


class Stream:
    """The outputs of one request. It belongs to the event loop in which the first one is awaited.

    A stream that is no longer referred to, and one whose `aclose` is called, aborts its request.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        request_id: str | None,
        accept: Callable[[], Awaitable[Accepted]],
        on_error: str,
        adapter: LoRARequest | None,
    ) -> None:
        self._llm = llm
        self._adapter = adapter
        self._request_id = request_id
        self._accept = accept
        self._on_error = on_error
        self._growing: Growing | None = None
        self._last: RequestOutput | None = None  # it is finished, and has been handed out
        self._is_over = self._is_awaited = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_awaited:
            raise RequestError("another task awaits the next output of this stream")
        if self._growing is not None:
            self._growing.check_loop()
        last = self._last
        self._last = None
        if last is not None and self._on_error == "raise":
            raise_failed([last])
        if self._is_over:
            raise StopAsyncIteration
        self._is_awaited = True
        try:
            output = await self._next()
        except BaseException:  # it is refused, there is no engine, or the task is cancelled
            self._close()
            raise
        finally:
            self._is_awaited = False
        if output.finished:
            self._last = output
            self._close()
        return output

    async def aclose(self) -> None:
        self._close()

    def __del__(self) -> None:
        self._close()

    async def _next(self) -> RequestOutput:
        if self._growing is None:
            self._llm._check()  # before a long prompt is tokenized
            accepted = await self._accept()
            await self._llm._pauses.settle()
            self._growing = self._llm._begin(self._request_id, accepted, self._adapter)
        return await self._growing.next()

    def _close(self) -> None:
        self._is_over = True
        if self._growing is not None:
            self._llm._leave(self._growing)
            self._growing = None


class Pauses:
    """Which requests of an AsyncLLM may begin. A change happens while none is computed."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.mode: str | None = None  # how requests were paused
        self._llm = weakref.ref(llm)
        self._num_changes = 0
        self._lock = threading.Lock()  # held by the change under way, of any event loop

    async def settle(self) -> None:
        """Wait until a request may begin."""
        while self.mode is not None or self._num_changes:
            self._owner._check()
            await asyncio.sleep(_LOOK_EVERY)

    async def pause(self, mode: str, clear_cache: bool) -> None:
        if mode not in _PAUSES:
            raise ConfigError(f"mode is {mode!r}; it must be {choices(map(repr, _PAUSES))}")
        async with self._alone():
            if self.mode == "keep":
                await self._send(Action.THAW)
            self.mode = mode
            if mode == "keep":
                await self._send(Action.FREEZE)
            else:
                await self._quiet(mode == "abort")
            if clear_cache:
                await self._send(Action.RESET_PREFIX_CACHE)

    async def resume(self) -> None:
        async with self._alone():
            if self.mode == "keep":
                await self._send(Action.THAW)
            self.mode = None

    async def change(self, action: Action, value: str | int, abort: bool = False) -> None:
        """Change the engine while no request is computed."""
        async with self._alone():
            if self.mode == "keep" and not abort and self._owner._requests:
                raise RequestError(
                    f"{len(self._owner._requests)} requests stand still halfway, and an answer has one version of the "
                    "weights: resume or abort them first"
                )
            if self.mode == "keep":
                await self._send(Action.THAW)
                self.mode = "wait"
            await self._quiet(abort)
            await self._send(action, value)

    @property
    def _owner(self) -> AsyncLLM:
        llm = self._llm()
        assert llm is not None, "its method runs"
        return llm

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        self._owner._check()
        self._num_changes += 1  # requests wait from now on
        try:
            while not self._lock.acquire(blocking=False):
                await asyncio.sleep(_LOOK_EVERY)
            try:
                yield
            finally:
                self._lock.release()
        finally:
            self._num_changes -= 1

    async def _quiet(self, abort: bool) -> None:
        if abort:
            await self._send(Action.END_ALL)
        while any(not growing.is_finished for growing in list(self._owner._requests.values())):
            self._owner._check()
            await asyncio.sleep(_LOOK_EVERY)

    async def _send(self, action: Action, value: str | int = "") -> None:
        await asyncio.wrap_future(self._owner._host.change(action, value))


def _shut_down() -> EngineError:
    return EngineError("this AsyncLLM was shut down: make another")
