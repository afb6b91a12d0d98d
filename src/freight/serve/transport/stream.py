"""AnswerResponse: an Answer over HTTP, streamed or complete, which ends when its client leaves.

A stream's status line is sent with the first token, or after a few seconds without one, so that an
early failure still has its own status. After that an error is an event of the stream: a stream
never ends silently.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from freight.serve.call import Call
from freight.serve.service import Answer
from freight.serve.transport.errors import ApiError
from freight.serve.transport.slices import in_turn, json_bytes, json_in_slices

logger = logging.getLogger("freight")

_HEADERS_AFTER = 5.0  # seconds without a token after which the status line is sent anyway
_COMMENT = b": keep-alive\n\n"


class ClientLeftError(Exception):
    """The client has disconnected: nobody reads the answer any more."""


class AnswerResponse(Response):
    """The answer to `call`, computed while it is sent."""

    def __init__(
        self,
        answer: Answer,
        call: Call,
        headers: Mapping[str, str],
        as_error: Callable[[ApiError], ApiError],
    ) -> None:
        super().__init__()
        self._answer = answer
        self._call = call
        self._extra = headers
        self._as_error = as_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer
        status = 499  # the client left, or the task was cancelled
        try:
            async with _watched(receive, answer):
                await (self._stream(send) if self._call.stream else self._whole(send))
            status = 200
        except ClientLeftError:
            pass
        except ApiError as error:
            status = error.status
            await self._refuse(send, error)
        finally:
            answer.close(status)

    async def _stream(self, send: Send) -> None:
        answer = self._answer
        reply = self._answer.reply
        first = b""  # `start` first: it shows the state before any token
        start = reply.start()
        with contextlib.suppress(TimeoutError):
            first = await asyncio.wait_for(answer.advance(), _HEADERS_AFTER)
        kind = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        await send(_start(200, kind | dict(self._extra)))
        try:
            await send(_body(start + first))
            while not answer.is_finished:
                await send(_body(await answer.advance() or _COMMENT))
            await send(_body(reply.end(), more=False))
        except ClientLeftError:
            raise
        except ApiError as error:
            await send(_body(reply.failure(error), more=False))
            answer.close(error.status)
        except Exception:
            logger.exception("an answer could not be written")
            await send(_body(reply.failure(ApiError(500, "the server failed")), more=False))
            answer.close(500)

    async def _whole(self, send: Send) -> None:
        answer = self._answer
        while not answer.is_finished:
            await answer.advance()
        if answer.is_large:
            parts = await in_turn(lambda: json_in_slices(answer.reply.body()))
        else:
            parts = [json_bytes(answer.reply.body())]
        await _send_json(send, 200, parts, self._extra)

    async def _refuse(self, send: Send, error: ApiError) -> None:
        """Send an error before the status line was sent."""
        error = self._as_error(error)
        body = json_bytes(self._call.failure_body(error))
        await _send_json(send, error.status, [body], {**self._extra, **error.headers})


async def _send_json(
    send: Send, status: int, parts: Sequence[bytes], headers: Mapping[str, str]
) -> None:
    size = str(sum(map(len, parts)))
    await send(
        _start(status, {"content-type": "application/json", "content-length": size, **headers})
    )
    for number, part in enumerate(parts, 1):
        await send(_body(part, more=number < len(parts)))


def _start(status: int, headers: Mapping[str, str]) -> Message:
    raw = [
        (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
    ]
    return {"type": "http.response.start", "status": status, "headers": raw}


def _body(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


@contextlib.asynccontextmanager
async def _watched(receive: Receive, answer: Answer) -> AsyncIterator[None]:
    """Make `answer` fail with ClientLeftError once the connection is closed."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answer.inbox.fail(ClientLeftError())

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
