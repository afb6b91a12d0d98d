"""The server's log: a line per finished request, a summary every few seconds.

No line has text of a prompt or an answer. A request id from a client is checked before it is used.
"""

from __future__ import annotations

import logging
import re
import uuid
from dataclasses import asdict, dataclass

from freight.base.fields import JsonDict
from freight.outputs import EngineStats
from freight.serve.observe.state import cache_use, prefix_hit_rate, rates

SECONDS_BETWEEN_SUMMARIES = 10.0

logger = logging.getLogger("freight.server")
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?", re.ASCII
)
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
_PARAM = re.compile(r"[A-Za-z_]{1,40}(?:\.[A-Za-z_]{1,40}|\[[0-9]{1,9}\]){0,8}", re.ASCII)


@dataclass(frozen=True)
class RequestLine:
    """The log entry of a finished request. Token counts are over all its completions.

    status         of the HTTP answer
    finish_reason  None if the request was refused
    key_name       of the API key; None without keys
    route          of a refused request, as are `code` and `param` of its error
    """

    request_id: str
    status: int
    seconds: float
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    key_name: str | None = None
    route: str | None = None
    code: str | None = None
    param: str | None = None


def request_id_of(header: str | None) -> str:
    """Return the client's X-Request-Id if it is 1 to 128 of A-Z a-z 0-9 . _ -, else a new one."""
    if header is not None and _ID.fullmatch(header):
        return header
    return uuid.uuid4().hex


def loggable(param: str | None) -> str | None:
    """Return the path of a field if it is safe to log, else "other": a client may send any text as
    a name.
    """
    if param is None or _PARAM.fullmatch(param):
        return param
    return "other"


def trace_id_of(header: str | None) -> str | None:
    """Return the trace id of a `traceparent` header (W3C Trace Context), or None if it is invalid.

    Versions after 00 may append fields behind a dash; these are ignored.
    """
    match = _TRACEPARENT.fullmatch(header or "")
    if match is None or (match[1] == "00" and match[3] is not None):
        return None
    return match[2]


def log_request(line: RequestLine) -> None:
    """Log a finished request: a failure of the server as WARNING, all else as INFO."""
    fields = asdict(line)
    fields["seconds"] = round(line.seconds, 4)
    if line.code is None:
        for name in ("route", "code", "param"):
            del fields[name]
    level = logging.INFO
    if line.status >= 500:
        level = logging.WARNING
    logger.log(level, "request", extra={"fields": fields})


def summary(
    stats: EngineStats, previous: EngineStats | None, seconds: float
) -> tuple[int, JsonDict]:
    """Return the level and the fields of the summary line, for the `seconds` since `previous`.

    The level is DEBUG if the engine did nothing and has nothing to do.
    """
    done = rates(stats, previous, seconds)
    idle = not (stats.running or stats.waiting or done.prompt_tokens or done.generated_tokens)
    level = logging.INFO
    if idle:
        level = logging.DEBUG
    return level, {
        "running": stats.running,
        "waiting": stats.waiting,
        "cache_use": round(cache_use(stats), 4),
        "prefix_hit_rate": round(prefix_hit_rate(stats), 4),
        "prompt_tokens_per_s": round(done.prompt_tokens_per_s, 1),
        "generated_tokens_per_s": round(done.generated_tokens_per_s, 1),
        "preemptions": stats.preemptions,
    }


def log_summary(stats: EngineStats, previous: EngineStats | None, seconds: float) -> None:
    """Log one summary; called every SECONDS_BETWEEN_SUMMARIES."""
    level, fields = summary(stats, previous, seconds)
    logger.log(level, "summary", extra={"fields": fields})
