"""`freight batch`: a file of requests, answered without HTTP by the server's own request path.

A line is handled like a request's body: the same parsing, limits, template, grammar and reply, so
every field means what it means to `freight serve`. Many lines are in the engine at a time; their
answers are written in the order of the lines. An invalid line gets an error as its answer, and the
others go on.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import islice

from freight.base.fields import JsonDict
from freight.serve.anthropic.messages_request import parse_messages
from freight.serve.app import Parse, generating
from freight.serve.call import Call
from freight.serve.lifecycle import Lifecycle
from freight.serve.offline.batch_files import BatchInput, BatchOutput, InputLine
from freight.serve.openai.chat_request import parse_chat
from freight.serve.openai.completion_request import parse_completion
from freight.serve.openai.responses_request import parse_responses
from freight.serve.pooling.classify_request import parse_classify
from freight.serve.pooling.embedding_request import parse_embeddings
from freight.serve.pooling.rerank_request import parse_rerank
from freight.serve.pooling.score_request import parse_score
from freight.serve.processes.client import WorkerOptions
from freight.serve.processes.log import set_up_logging
from freight.serve.rendering.renderer import MAX_WAITING
from freight.serve.service import Service
from freight.serve.serving import Serving, read_template
from freight.serve.settings import ServerSettings
from freight.serve.transport.auth import Keys
from freight.serve.transport.body import parse_object
from freight.serve.transport.errors import ApiError
from freight.serve.transport.http import loop_factory
from freight.serve.transport.http_limits import HttpLimits
from freight.serve.transport.middleware import FAILED, error_body
from freight.serve.transport.slices import json_bytes

URLS: dict[str, Parse] = {
    "/v1/chat/completions": generating(parse_chat),
    "/v1/completions": generating(parse_completion),
    "/v1/responses": generating(parse_responses),
    "/v1/messages": generating(parse_messages),
    "/v1/embeddings": parse_embeddings,
    "/v1/rerank": parse_rerank,
    "/v1/score": parse_score,
    "/classify": parse_classify,
}
# Lines in the engine at a time, per sequence of a step: the waiting ones keep every step full.
LINES_PER_SEQUENCE = 2
COMPLETIONS = 64 * 16  # of one line at most: its prompts (64) times its n (16)
_AHEAD = 4096  # answers that may be finished before the one that is written next

logger = logging.getLogger("freight")


@dataclass
class BatchCounts:
    """Progress of a run. Tokens count this run only; lines count the whole file.

    lines   of IN, without empty ones
    before  answered by earlier runs
    failed  answered with an error, by this run or an earlier one
    """

    lines: int
    before: int = 0
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0

    def as_object(self) -> dict[str, int]:
        return asdict(self)


def run_batch(
    source: BatchInput,
    out: BatchOutput,
    settings: ServerSettings,
    options: WorkerOptions,
    counts: BatchCounts,
    on_progress: Callable[[int], None],
) -> int:
    """Answer the lines of `source` that `out` has no answer to; returns the exit status.

    on_progress  is called with the number of answered lines

    Raises ConfigError before anything starts, OSError if `out` cannot be written.
    """
    template = read_template(settings.chat_template)
    set_up_logging(settings.log_format)
    logging.getLogger("freight.server").setLevel(logging.WARNING)  # no line for each request
    lifecycle = Lifecycle(settings, Serving(settings, options, Keys.read(), template))
    at_once = LINES_PER_SEQUENCE * int(options.engine_args["max_num_seqs"])

    async def job(service: Service) -> None:
        await _Batch(service, out, counts, on_progress, at_once).run(
            islice(source, out.num_done, None)
        )

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(lifecycle.compute(job, (signal.SIGTERM, signal.SIGINT)))


class _Batch:
    """The lines of one run. A failure that is not the fault of a single line ends the run."""

    def __init__(
        self,
        service: Service,
        out: BatchOutput,
        counts: BatchCounts,
        on_progress: Callable[[int], None],
        at_once: int,
    ) -> None:
        self._service = service
        self._out = out
        self._counts = counts
        self._on_progress = on_progress
        self._limits = HttpLimits()
        self._places = asyncio.Semaphore(at_once)
        # More conversations at a time would be refused, as those of a client are
        self._beginnings = asyncio.Semaphore(MAX_WAITING)
        self._answers: asyncio.Queue[asyncio.Task[JsonDict] | None] = asyncio.Queue(_AHEAD)

    async def run(self, lines: Iterable[InputLine]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._write())
                for line in lines:
                    await self._places.acquire()
                    await self._answers.put(group.create_task(self._answer(line)))
                await self._answers.put(None)
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None  # several lines may fail at once: report one

    async def _write(self) -> None:
        while (task := await self._answers.get()) is not None:
            entry = await task
            self._out.write(json_bytes(entry) + b"\n")
            self._count(entry)

    async def _answer(self, line: InputLine) -> JsonDict:
        """Answer one line. Raises ApiError 503 when the engine is gone."""
        request_id = line.id.removeprefix("batch_req_")
        custom_id: object = None
        response: JsonDict | None = None
        fault: ApiError | None = None
        try:
            content = parse_object(line.raw, self._limits)
            custom_id = (
                content.get("custom_id") if isinstance(content.get("custom_id"), str) else None
            )
            url, body = _parts(content)
            status, answer, fault = await self._respond(url, body, request_id)
            response = {"status_code": status, "request_id": request_id, "body": answer}
        except ApiError as error:
            if error.status == 503:
                raise
            fault = error
        finally:
            self._places.release()
        failure = None
        if fault is not None:
            failure = {"code": fault.code or fault.type, "message": _at(line, fault)}
        return {"id": line.id, "custom_id": custom_id, "response": response, "error": failure}

    async def _respond(
        self, url: str, body: JsonDict, request_id: str
    ) -> tuple[int, object, ApiError | None]:
        """Answer one request; returns the status, the body, and the error in it, if any."""
        service = self._service
        call = None
        try:
            call = URLS[url](body, service.require_served(), service.limits)
            if call.stream:
                raise ApiError(
                    400,
                    "stream is true, and the answers of a batch are not streamed; omit it",
                    param="stream",
                )
            return 200, await self._whole(call, request_id), None
        except ApiError as error:
            fault = error
        except Exception:
            logger.exception("a request of the batch failed")
            fault = ApiError(500, FAILED)
        if fault.status == 503:
            raise fault
        return (
            fault.status,
            error_body(url, fault) if call is None else call.failure_body(fault),
            fault,
        )

    async def _whole(self, call: Call, request_id: str) -> object:
        async with self._beginnings:
            answer = await self._service.begin(call, request_id, None)
        status = 500
        try:
            while not answer.is_finished:
                await answer.advance()
            status = 200
            return answer.reply.body()
        except ApiError as error:
            status = error.status
            raise
        finally:
            answer.close(status)

    def _count(self, entry: JsonDict) -> None:
        counts = self._counts
        counts.answered += 1
        counts.failed += entry["error"] is not None
        body = (entry["response"] or {}).get("body")
        usage = body.get("usage") if isinstance(body, dict) else None
        for name, count in (usage or {}).items():
            if name in ("prompt_tokens", "input_tokens"):
                counts.prompt_tokens += count
            elif name in ("completion_tokens", "output_tokens"):
                counts.generated_tokens += count
        self._on_progress(counts.before + counts.answered)


def _parts(content: JsonDict) -> tuple[str, JsonDict]:
    """Return the url and the body of a line. Raises ApiError if the line is not a request."""
    custom_id = content.get("custom_id")
    method = content.get("method")
    url = content.get("url")
    body = content.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ApiError(
            400, "custom_id is missing or not a string; give each line its own", param="custom_id"
        )
    if method != "POST":
        raise ApiError(400, f"method is {method!r:.60}; it must be POST", param="method")
    if not isinstance(url, str) or url not in URLS:
        raise ApiError(400, f"url is {url!r:.60}; it must be one of {', '.join(URLS)}", param="url")
    if not isinstance(body, dict):
        raise ApiError(400, "body is missing or not a JSON object", param="body")
    return url, body


def _at(line: InputLine, error: ApiError) -> str:
    return f"line {line.number}: {error.message}"
