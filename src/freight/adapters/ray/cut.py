"""How a stream ends that was cut: with the error event of its API, as `freight serve` would send it."""

from __future__ import annotations

import json
import re

from freight.base.fields import JsonObject
from freight.serve.answers.blocks import sse
from freight.serve.anthropic import errors as anthropic
from freight.serve.openai.stream import failure_events
from freight.serve.tgi.reply import error_event
from freight.serve.transport.errors import ApiError
from freight.serve.transport.middleware import TGI_PATHS

_RESPONSES = "/v1/responses"
_STATE = "/state/stream"
_CREATED = re.compile(rb"event: response\.created\ndata: (.*)\n")
_NUMBER = re.compile(rb'"sequence_number": (\d+)')


def cut_events(path: str, body: JsonObject, first: bytes, last: bytes, error: ApiError) -> bytes:
    """Return the end of a stream.

    path   of its request
    body   of its request, parsed
    first  the beginning of what was sent of it
    last   the end of that
    """
    if path == _STATE:
        return b""  # it is no answer, and has no end: its readers connect again
    if path == _RESPONSES:
        return _failed_response(first, last, error)
    if path in anthropic.PATHS:
        return sse("error", anthropic.error_body(error))
    if path in TGI_PATHS or _is_tgi(path, body):
        return error_event(error)
    return failure_events(error)


def _is_tgi(path: str, body: JsonObject) -> bool:
    """Return whether /invocations was asked in the words of TGI, as `app.py` finds it."""
    is_other = body.get("messages") is not None or body.get("prompt") is not None
    return path == "/invocations" and not is_other


def _failed_response(first: bytes, last: bytes, error: ApiError) -> bytes:
    """Return the event that fails a response. Its `output` is empty: the items were in the replica."""
    created = _CREATED.search(first)
    if created is None:
        return sse("error", {"type": "error", "code": "server_error", "message": error.message})
    response = json.loads(created[1])["response"]
    numbers = _NUMBER.findall(last) or _NUMBER.findall(first)
    response |= {
        "status": "failed",
        "error": {"code": "server_error", "message": error.message},
    }
    name = "response.failed"
    number = int(numbers[-1]) + 1
    return sse(name, {"type": name, "sequence_number": number, "response": response})
