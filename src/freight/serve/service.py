"""The path from a Call to an Answer: tokenize, check, admit, submit. Knows no routes and no
sockets.

Requests are refused here, before an answer has begun: prompts that cannot be tokenized or are too
long, more requests than may wait, a server that is loading or shutting down. `begin` returns once
the engine has accepted every request of the call. From then on `Answer.advance` returns the bytes
to send, and `Answer.close` stops what still runs; it must be called however the answer ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from freight.engine.adapters import LoadedAdapter, LoRARequest
from freight.engine.intake import AcceptedPrompt, Intake
from freight.errors import FreightError, RequestError
from freight.outputs import EngineStats, FinishReason, RequestDelta, RequestTimes
from freight.sampling import SamplingParams, check_limits
from freight.serve.adapters import ServedAdapters
from freight.serve.call import (
    Call,
    Conversation,
    Pair,
    Reply,
    ReplyHead,
    Served,
    TokenizedWork,
    Work,
)
from freight.serve.engine_errors import from_engine, not_ready
from freight.serve.inbox import Inbox, merged
from freight.serve.limits import (
    CONTEXT_IS,
    ServingLimits,
    check_context,
    check_input,
    check_scores,
    num_pooled,
    num_scores,
)
from freight.serve.observe.log import RequestLine, log_request, loggable
from freight.serve.observe.metrics import UNNAMED, Metrics
from freight.serve.observe.traces import TracedRequest, Traces
from freight.serve.openai.fields import from_request_error, served_name
from freight.serve.pooling.pairs import read_pair
from freight.serve.processes.client import EngineClient, EngineState, Running
from freight.serve.processes.wire import EngineFacts
from freight.serve.prompt_ids import read_prompt
from freight.serve.rendering.renderer import Renderer
from freight.serve.tokens import Tokenize
from freight.serve.transport.auth import Keys
from freight.serve.transport.errors import ApiError, took_too_long
from freight.serve.transport.slices import in_turn, is_large, json_in_slices
from freight.serve.weights import ServedWeights
from freight.structured import StructuredOutputs
from freight.text.chat_text import ChatText
from freight.text.pooling_inputs import PairTokens

logger = logging.getLogger("freight")

# Characters: tokenizing more takes a thread, or the process for what is long.
_LONG = 1 << 12
_VERY_LONG = 1 << 17
_VERY_LONG_MARKED = 1 << 14
_PROBED = 16  # characters per token of the context: the length of the beginning that is probed
_KEPT_TIMES = 32  # durations of answers, whose mean is the Retry-After of a 429
_LARGE = 1 << 15  # log-probabilities of prompts, numbers of vectors: more are written in a thread
_AHEAD = 2  # requests of one call in the engine, for each that a step may have
_REMEMBERED = 4096  # grammars that compiled; the set is cleared when it is full
_LONGEST_RETRY = 120  # seconds, the largest Retry-After
# Code of an error -> why the request was rejected, in the metrics.
_REJECTED: dict[str | None, str] = {
    "queue_full": "queue_full",
    "context_length_exceeded": "too_long",
    "draining": "draining",
}
KEEP_ALIVE = 15.0  # seconds without a token after which a stream gets a comment


class Service:
    """One served model. `served` and `renderer` are set once it is loaded, and again for a new
    engine.
    """

    def __init__(
        self,
        client: EngineClient,
        limits: ServingLimits,
        keys: Keys,
        metrics: Metrics,
        max_sequences: int,
        request_timeout: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_queue: int = 0,
    ) -> None:
        """max_sequences: completions that run or wait; `max_queue` of them wait."""
        self.client = client
        self.limits = limits
        self.keys = keys
        self.metrics = metrics
        self.served: Served | None = None
        self.facts: EngineFacts | None = None
        self.renderer: Renderer | None = None
        # In a separate process: slow grammars do not delay conversations.
        self.grammars: Renderer | None = None
        # In a third one: what is long delays no conversation that is short.
        self.large: Renderer | None = None
        self.draining = False
        self.answers: set[Answer] = set()
        self.adapters = ServedAdapters(self._adapters_changed)
        self.weights = ServedWeights(self)
        self.traces: Traces | None = None
        self.clock = clock
        self.max_sequences = max_sequences
        self._max_queue = max_queue
        self._request_timeout = request_timeout
        self._num_submitted = 0
        self._durations: deque[float] = deque(maxlen=_KEPT_TIMES)  # seconds, of the last answers
        self._checked: set[object] = set()  # keys of grammars that compiled

    def require_served(self) -> Served:
        """Return the model. Raises ApiError 503 while it is not loaded, or the server drains."""
        if self.draining:
            raise ApiError(
                503,
                "the server is shutting down",
                code="draining",
                headers={"Connection": "close"},
            )
        if self.served is None or self.client.state is not EngineState.READY:
            raise not_ready(self.client.state)
        return self.served

    async def begin(self, call: Call, request_id: str, key_name: str | None) -> Answer:
        """Submit a call and return its answer, once the engine has accepted it. Raises ApiError."""
        served = self.require_served()
        arrival = self.clock()
        work = []
        for prompt in call.work:
            work.append(await self.tokenize(prompt, key_name))
            await asyncio.sleep(0)  # what is short is tokenized at once: others get a turn
        await self.adapters.settle(call.model)
        await self.weights.settle(self._request_timeout)
        # a new engine may have started meanwhile. From here to `submit` nothing is awaited: the engine
        # has the versions of weights and adapter that the head states
        served = self.require_served()
        adapter = self._adapter_of(call, served)
        check_scores(work, self.limits)
        at_once = self._at_once(work)
        is_queued = self._admit(work[:at_once], key_name)
        head = ReplyHead(
            call.request_id or request_id,
            int(time.time()),
            call.model,
            served.fingerprint_of(adapter),
        )
        reply = call.reply(head, served, work)
        answer = Answer(self, reply, work, request_id, key_name, arrival, adapter, at_once)
        answer.is_queued = is_queued
        answer.model = call.model
        try:
            await answer.submit()
        except ApiError:
            answer.stop()  # `refused` counts and logs it
            raise
        except BaseException:
            answer.close(499)
            raise
        return answer

    def _adapter_of(self, call: Call, served: Served) -> LoadedAdapter | None:
        """Return the adapter that a call names. Raises ApiError if it was unloaded meanwhile."""
        name = served_name(call.model, served)
        if name in served.names:
            return None
        return served.adapter(name)

    def cut_answers(self, error: ApiError) -> None:
        """Fail the answers whose requests are not all in the engine yet."""
        for answer in list(self.answers):
            answer.cut(error)

    def weights_changed(self) -> None:
        """Show the fingerprint that the engine has now."""
        fingerprint = self.client.fingerprint
        if self.served is not None:
            self.served = replace(self.served, fingerprint=fingerprint)
        if self.facts is not None:
            self.facts = replace(self.facts, fingerprint=fingerprint)

    def _adapters_changed(
        self, loaded: tuple[LoadedAdapter, ...], changing: frozenset[str]
    ) -> None:
        if self.served is not None:
            self.served = replace(self.served, adapters=loaded, changing=changing)
        self.metrics.add_adapters([adapter.name for adapter in loaded])

    async def tokenize(self, work: Work, key_name: str | None = None) -> TokenizedWork:
        """Tokenize and check a prompt; returns it with the parameters that the engine takes. Raises
        ApiError.
        """
        served = self.require_served()
        intake = served.intake
        render = partial(self.render, key_name=key_name)
        encode = partial(self._encode_prompt, intake, key_name)
        try:
            check_limits(work.params, self.limits.sampling)
            if isinstance(work.prompt, Pair):
                pair = await self._read_pair(work, work.prompt, key_name)
                assert work.params.pooling is not None, "a pair is scored"
                pooling = replace(work.params.pooling, first_segment=pair.first_segment)
                params = replace(work.params, pooling=pooling)
                work = replace(work, prompt=pair.token_ids, params=params)
            prompt = await read_prompt(work, intake, render, encode)
            params = prompt.params
            count = len(prompt.token_ids)
            if params.pooling is not None:
                check_input(count, work.prompt_from, served.max_model_len)
            else:
                param = "messages" if isinstance(work.prompt, Conversation) else "prompt"
                answer = 0 if params.max_tokens == 0 else None
                check_context(count, answer, served.max_model_len, param)
            accepted = intake.accept(prompt.token_ids, params)
        except RequestError as error:
            raise from_request_error(error) from None
        await self._check_grammar(params, work.form_from, key_name)
        salt = self.keys.salt_for(key_name, params.cache_salt)
        params = replace(params, cache_salt=salt, timeout_s=self._timeout(params))
        return TokenizedWork(prompt.text, accepted.token_ids, params)

    async def _encode_prompt(
        self,
        intake: Intake,
        key_name: str | None,
        text: str | ChatText,
        add_special_tokens: bool,
        params: SamplingParams,
    ) -> tuple[Sequence[int], int]:
        """An `Encode` of this server. A text that is too long is refused before all of it is read."""
        if not text or intake.tokenizer is None:
            assert isinstance(text, str)
            token_ids = intake.accept(text, params).token_ids  # raises without a tokenizer
            return token_ids, len(token_ids)
        most = params.truncate_prompt_tokens
        if most is None:
            written = text.text if isinstance(text, ChatText) else text
            await self._check_size(intake.max_model_len, written, key_name)
        last = intake.max_model_len if most == -1 else most
        if params.pooling is not None:  # the first ones are kept: `Intake.cut`
            last = None
        return await self.encode(text, add_special_tokens, last, key_name)

    async def _read_pair(self, work: Work, pair: Pair, key_name: str | None) -> PairTokens:
        """Return the tokens of a pair. A chat template, which may put it, is run in the process
        for templates. Raises RequestError and ApiError.
        """
        served = self.require_served()
        tokenizer = served.tokenizer
        pooling = served.pooling
        if tokenizer is None or pooling is None:
            raise RequestError(
                "a pair of texts needs a tokenizer and a model that pools; send token ids to /pooling"
            )
        most = work.params.truncate_prompt_tokens
        if most == -1:
            most = served.max_model_len
        await self._check_size(served.max_model_len, pair.query, key_name)
        if most is None and pair.document_tokens is None:
            await self._check_size(served.max_model_len, pair.document, key_name)
        is_long_pair = is_long(pair.query) or is_long(pair.document)
        renderer = self.large if is_long_pair else self.renderer
        if renderer is not None and (is_long_pair or tokenizer.has_chat_template):
            return await renderer.read_pair(pair, pooling, most, work.prompt_from, key_name)
        try:
            return read_pair(tokenizer, pooling, pair, most)
        except RequestError as error:
            where = work.prompt_from
            raise ApiError(400, f"{where}: {error}", param=where) from None

    def observe(self, stats: EngineStats) -> None:
        self.metrics.set_stats(stats)

    def finished(self, seconds: float) -> None:
        """Record the duration of an answer, in seconds, for the Retry-After of a full queue."""
        self._durations.append(seconds)

    def next_name(self) -> str:
        """Return a new id for a request to the engine. Ids that clients choose may collide."""
        self._num_submitted += 1
        return str(self._num_submitted)

    def refused(
        self, error: ApiError, request_id: str, key_name: str | None, route: str | None = None
    ) -> None:
        """`count_refusal` of this model."""
        count_refusal(self.metrics, error, request_id, key_name, route)

    def trace_refusal(self, error: ApiError, request_id: str, route: str, arrival: float) -> None:
        """Make the span of a request whose answer did not begin, if there are spans."""
        if self.traces is not None:
            seconds = self.clock() - arrival
            self.traces.record(refused_request(error, request_id, route, seconds))

    async def render(self, conversation: Conversation, key_name: str | None = None) -> ChatText:
        """Render a conversation to text. Raises ApiError."""
        served = self.require_served()
        if served.tokenizer is None:
            raise ApiError(
                400,
                "this server was started with --skip-tokenizer-init, and a chat needs a tokenizer; send token ids to "
                "/v1/completions",
                code="no_chat_template",
            )
        if not served.tokenizer.has_chat_template:
            raise ApiError(
                400,
                "this model has no chat template: it was not trained to converse; send a plain prompt to "
                "/v1/completions, or start the server with --chat-template FILE",
                code="no_chat_template",
            )
        assert self.renderer is not None
        renderer = self.renderer
        if self.large is not None and is_large(
            [conversation.messages, conversation.template_values]
        ):
            renderer = self.large
        return await renderer.render(conversation, key_name)

    async def _check_size(self, max_model_len: int, text: str, key_name: str | None) -> None:
        """Refuse a text whose beginning alone is too long: tokenizing megabytes takes seconds of a
        core.
        """
        probe = text[: _PROBED * max_model_len]
        if len(probe) == len(text):
            return
        _, count = await self.encode(probe, False, 0, key_name)
        if count > 2 * max_model_len:  # twice: what follows may merge some of the tokens
            raise ApiError(
                400,
                f"{CONTEXT_IS} {max_model_len} tokens, for prompt and answer together; the first {len(probe)} "
                f"of the prompt's {len(text)} characters have {count} tokens. Shorten the prompt",
                code="context_length_exceeded",
            )

    async def encode(
        self,
        text: str | ChatText,
        add_special_tokens: bool,
        last: int | None,
        key_name: str | None,
    ) -> tuple[Sequence[int], int]:
        """Return the token ids of a text or a rendered conversation, with their number; of one that
        is long, only the `last` of them (None: all). Raises RequestError and ApiError.
        """
        tokenizer = self.require_served().tokenizer
        assert tokenizer is not None
        if self.large is not None and is_long(text):
            return await self.large.encode(text, add_special_tokens, last, key_name)
        size = len(text.text if isinstance(text, ChatText) else text)
        if size < _LONG:
            token_ids = tokenizer.encode(text, add_special_tokens)
        else:
            token_ids = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)
        return token_ids, len(token_ids)

    async def tokenized(self, asked: Tokenize, key_name: str | None) -> list[bytes]:
        """Return the answer of /tokenize, JSON in parts. Raises ApiError."""
        served = self.require_served()
        prompt = asked.prompt
        text = prompt if isinstance(prompt, str) else await self.render(prompt, key_name)
        if self.large is not None and is_long(text, asked.with_offsets):
            return await self.large.tokenized(text, asked, served.max_model_len, key_name)
        return await asyncio.to_thread(lambda: json_in_slices(asked.answer(text, served)))

    async def _check_grammar(
        self, params: SamplingParams, form_from: str, key_name: str | None = None
    ) -> None:
        if params.structured_outputs is None:
            return
        structured = StructuredOutputs.of(params.structured_outputs)
        form, text = structured.key()
        key = form, hashlib.sha256(text.encode()).digest()
        if key not in self._checked:
            assert self.grammars is not None
            try:
                await self.grammars.check_grammar(structured.given(), key_name)
            except ApiError as error:
                raise _renamed(form_from, error) from None
            if len(self._checked) >= _REMEMBERED:
                self._checked.clear()
            self._checked.add(key)

    def _timeout(self, params: SamplingParams) -> float | None:
        if params.timeout_s is None:
            return self._request_timeout
        if self._request_timeout is None:
            return params.timeout_s
        return min(params.timeout_s, self._request_timeout)

    def _at_once(self, work: Sequence[TokenizedWork]) -> int:
        """Return how many requests of a call are in the engine at a time. Of what is pooled others
        follow as these end: a call may have thousands, and the queue is not its own.
        """
        if not all(item.params.pooling is not None for item in work):
            return len(work)
        running = max(1, self.max_sequences - self._max_queue)
        return min(len(work), _AHEAD * running, self.max_sequences)

    def _admit(self, work: Sequence[TokenizedWork], key_name: str | None) -> bool:
        """Return whether the completions of `work` wait for others. Raises ApiError if they do not
        fit: 400 if they never can, 429 if not now.
        """
        count = sum(item.params.n for item in work)
        if count > self.max_sequences:
            raise ApiError(
                400,
                f"the request asks for {count} completions and the server holds {self.max_sequences} "
                f"at once; split it",
                param="n",
            )
        num_held = self.client.num_sequences
        if num_held + count > self.max_sequences:
            raise self._full(
                f"{num_held} completions are running or waiting, and {self.max_sequences} may"
            )
        waits = num_held + count > self.max_sequences - self._max_queue
        if waits and key_name is not None and len(self.keys.names) > 1:
            left = self.max_sequences - num_held
            waiting = sum(
                answer.num_waiting for answer in self.answers if answer.key_name == key_name
            )
            if waiting > 0 and waiting + count > left:
                raise self._full(
                    f"{waiting} completions of this key wait, and {left} more may wait, which the other keys need"
                )
        return waits

    def _full(self, why: str) -> ApiError:
        seconds = sum(self._durations) / len(self._durations) if self._durations else 1.0
        retry = str(min(_LONGEST_RETRY, max(1, math.ceil(seconds))))
        return ApiError(
            429, f"{why}; try again in {retry} s", code="queue_full", headers={"Retry-After": retry}
        )


def count_refusal(
    metrics: Metrics,
    error: ApiError,
    request_id: str,
    key_name: str | None,
    route: str | None = None,
) -> None:
    """Count and log a request whose answer did not begin. The message is not logged: it may quote
    the request's text.
    """
    line = RequestLine(
        request_id,
        error.status,
        0.0,
        key_name=key_name,
        route=route,
        code=error.code or error.type,
        param=loggable(error.param),
    )
    log_request(line)
    if error.code in _REJECTED:
        metrics.rejected(_REJECTED[error.code])
    elif error.status in (400, 413, 415, 422):
        metrics.rejected("invalid")


def refused_request(error: ApiError, request_id: str, route: str, seconds: float) -> TracedRequest:
    """Return what the span of a request says whose answer did not begin."""
    return TracedRequest(request_id, error.status, seconds, route, error.code or error.type)


def _num_values(work: Sequence[TokenizedWork], served: Served | None) -> int:
    """Return how many numbers of log-probabilities and vectors an answer may have."""
    size = 0
    if served is not None and served.pooling is not None:
        size = served.pooling.size
    return sum(map(num_scores, work)) + num_pooled(work, size)


def is_long(text: str | ChatText, with_offsets: bool = False) -> bool:
    """Return whether reading what a tokenizer made of a text holds the interpreter for too long.
    Where its tokens stand takes ten times as long to read as what they are.
    """
    if isinstance(text, ChatText):
        return len(text.text) >= (_VERY_LONG_MARKED if text.plain else _VERY_LONG)
    return len(text) >= (_VERY_LONG_MARKED if with_offsets else _VERY_LONG)


def _renamed(field: str, error: ApiError) -> ApiError:
    """Return an error of `structured_outputs` under the name of the field that the client sent."""
    if error.param != "structured_outputs" or field == error.param:
        return error
    message = re.sub(r"^structured_outputs(\.\w+)?", field, error.message)
    return ApiError(error.status, message, param=field, code=error.code, headers=error.headers)


class Answer:
    """One answer in progress."""

    def __init__(
        self,
        service: Service,
        reply: Reply,
        work: Sequence[TokenizedWork],
        request_id: str,
        key_name: str | None,
        arrival: float,
        adapter: LoadedAdapter | None = None,
        at_once: int | None = None,
    ) -> None:
        """at_once: requests that are in the engine at a time; None: all"""
        self.reply = reply
        self.inbox = Inbox()
        self._last_sent = arrival
        self._service = service
        self._work = work
        self._request_id = request_id
        self.key_name = key_name
        self.is_queued = False  # it was admitted to wait for others
        self.model: str | None = None  # the name that the answer shows
        self._arrival = arrival
        self._adapter = adapter
        self._lora = None if adapter is None else LoRARequest(adapter.name)
        self._client = service.client
        self._at_once = len(work) if at_once is None else at_once
        self._running: list[Running] = []  # of the first requests, in order
        self._unfinished = set(range(len(work)))
        self._failure: ApiError | None = None
        self._last_token: dict[tuple[int, int], float] = {}  # its time, for each completion
        self._prompt_tokens = sum(len(item.token_ids) for item in work)
        self._generated = [[0] * item.params.n for item in work]
        self._cached = 0
        self._first_token: float | None = None  # seconds until it
        self._times: list[RequestTimes] = []  # of the requests that have finished
        self._reason: str | None = None
        self._is_closed = False
        self._is_cut = False  # it fails, and submits no further request
        # its reply is written in a thread
        self.is_large = _num_values(work, service.served) > _LARGE

    async def submit(self) -> None:
        """Submit the requests and wait until the engine has accepted them. Raises ApiError."""
        service = self._service
        service.answers.add(self)
        try:
            for _ in range(self._at_once):
                self._submit_next()
            for running in list(self._running):
                await running.accepted
        except FreightError as error:
            raise from_engine(error) from None
        for item in self._work[: self._at_once]:
            self._count_queued(item)

    def _submit_next(self) -> None:
        index = len(self._running)
        item = self._work[index]
        name = self._service.next_name()
        prompt = AcceptedPrompt(item.text, item.token_ids)
        self._running.append(
            self._client.submit(name, index, prompt, item.params, self, self._lora)
        )

    def _count_queued(self, item: TokenizedWork) -> None:
        self._service.metrics.request_queued(
            item.params.n, item.params.max_tokens, len(item.token_ids)
        )

    def put(self, index: int, delta: RequestDelta) -> None:
        """Take what is new of a request (`Receiver`). Where one ends, the next is submitted at once:
        no other request can take its place in between.
        """
        is_over = self._is_closed or self._is_cut
        if delta.finished and not is_over and len(self._running) < len(self._work):
            try:
                self._submit_next()
            except FreightError as error:
                self.fail(error)
            else:
                self._count_queued(self._work[len(self._running) - 1])
        self.inbox.put(index, delta)

    def fail(self, error: Exception) -> None:
        self.inbox.fail(error)

    def cut(self, error: ApiError) -> None:
        """Submit no further request. Fails an answer that has some left."""
        if len(self._running) < len(self._work):
            self._is_cut = True
            self.inbox.fail(error)

    @property
    def num_waiting(self) -> int:
        """Completions that were admitted to wait, and have had nothing of the engine yet."""
        if not self.is_queued:
            return 0
        return sum(
            self._work[index].params.n
            for index in self._unfinished
            if not any(self._generated[index])
        )

    @property
    def is_finished(self) -> bool:
        return not self._unfinished and self._failure is None

    async def advance(self) -> bytes:
        """Wait for new deltas of any request; returns the bytes to send. Raises ApiError, after the
        bytes that came before it.
        """
        if self._failure is not None:
            raise self._failure
        try:
            new = merged(await self.inbox.next())
        except FreightError as error:
            raise from_engine(error) from None
        sent = b""
        for index, delta in new:
            try:
                sent += await self._take(index, delta)
            except ApiError as error:
                self._failure = error
                break
        if self._failure is not None and not sent:
            raise self._failure
        if sent:
            self._last_sent = self._service.clock()
        return sent

    def nudge_if_quiet(self, seconds: float) -> None:
        """Make `advance` return empty if nothing was sent for `seconds`."""
        if self._service.clock() - self._last_sent >= seconds:
            self._last_sent = self._service.clock()
            self.inbox.nudge()

    def end_if_late(self) -> None:
        """Fail if the time limit has passed: a stalled engine does not check it."""
        limits = [item.params.timeout_s for item in self._work if item.params.timeout_s is not None]
        if limits and self._service.clock() - self._arrival > max(limits):
            for running in self._running:
                running.fail(took_too_long())

    def close(self, status: int) -> None:
        """End the answer with this status (499: the client left). Stops what still runs; logs the
        request.
        """
        if self._is_closed:
            return
        self.stop()
        service = self._service
        for index in range(len(self._running)):
            if index in self._unfinished:
                self._reason = str(FinishReason.ABORT if status == 499 else FinishReason.ERROR)
                self._count(index, self._reason)
        seconds = service.clock() - self._arrival
        if status == 200:
            service.finished(seconds)
        counts = self._prompt_tokens, sum(map(sum, self._generated)), self._cached
        log_request(
            RequestLine(self._request_id, status, seconds, *counts, self._reason, self.key_name)
        )
        if service.traces is not None:
            service.traces.record(self._traced(status, seconds))

    def _traced(self, status: int, seconds: float) -> TracedRequest:
        failure = self._failure
        return TracedRequest(
            self._request_id,
            status,
            seconds,
            code=None if failure is None else failure.code or failure.type,
            model=self.model,
            params=self._work[0].params if self._work else None,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=sum(map(sum, self._generated)),
            first_token=self._first_token,
            times=self._times,
            finish_reason=self._reason,
        )

    def stop(self) -> None:
        """Stop what runs, and neither count nor log it: for an answer that did not begin."""
        self._is_closed = True
        self._service.answers.discard(self)
        for running in self._running:
            self._service.client.abort(running)

    async def _take(self, index: int, delta: RequestDelta) -> bytes:
        now = self._service.clock()
        metrics = self._service.metrics
        generated = self._generated[index]
        if not any(generated) and any(output.token_ids for output in delta.outputs):
            seconds = now - self._arrival
            metrics.first_token(seconds)
            if self._first_token is None:
                self._first_token = seconds
        for output in delta.outputs:
            if output.token_ids:
                last = self._last_token.get((index, output.index))
                if last is not None:
                    metrics.inter_token(now - last, len(output.token_ids))
                self._last_token[index, output.index] = now
                generated[output.index] += len(output.token_ids)
        if delta.finished:
            self._unfinished.remove(index)
            self._cached += delta.num_cached_tokens
            if delta.times is not None:
                self._times.append(delta.times)
            self._reason = str(
                next(output.finish_reason for output in delta.outputs if output.finish_reason)
            )
            self._count(index, self._reason, delta.times, delta.num_cached_tokens)
        if self.is_large:
            return await in_turn(self.reply.advance, index, delta)
        return self.reply.advance(index, delta)

    def _count(
        self, index: int, reason: str, times: RequestTimes | None = None, cached: int = 0
    ) -> None:
        seconds = self._service.clock() - self._arrival
        prompt_tokens = len(self._work[index].token_ids)
        key = self.key_name or UNNAMED
        generated = self._generated[index]
        self._service.metrics.request_finished(
            reason,
            seconds,
            times,
            prompt_tokens,
            sum(generated),
            cached,
            key,
            max(generated),
            None if self._adapter is None else self._adapter.name,
        )
