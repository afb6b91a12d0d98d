"""How a process logs: lines of text or of JSON.

A record is always one line, whatever its message has in it. One that is written while a request is
handled has its id.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum

from freight.base.fields import JsonDict, JsonObject
from freight.base.start_log import log_to_stderr
from freight.errors import legible

current_request: ContextVar[str | None] = ContextVar(
    "current_request", default=None
)  # id of what is being handled

current_trace: ContextVar[str | None] = ContextVar(
    "current_trace", default=None
)  # the trace that it belongs to

current_model: ContextVar[str | None] = ContextVar(
    "current_model", default=None
)  # the model that it is for, of a server that has several

_PLAIN = re.compile(r"[^\s\"'=\\\x00-\x1f\x7f-\x9f]+")


class LogFormat(StrEnum):
    """`--log-format`, and PLAIN: as a program of Python that has set up no logging."""

    TEXT = "text"
    JSON = "json"
    PLAIN = "plain"


def _fields_of(record: logging.LogRecord) -> JsonDict:
    """The fields of an event, and the ids of the request that is being handled, of its trace, and of
    its model, if there are any.
    """
    fields: JsonObject = getattr(record, "fields", {})
    handled = {
        "request_id": current_request.get(),
        "trace_id": current_trace.get(),
        "model": current_model.get(),
    }
    return {**{name: value for name, value in handled.items() if value is not None}, **fields}


class _OfModel(logging.Filter):
    """Gives the lines of a process the name of its model, whichever thread writes them."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model

    def filter(self, record: logging.LogRecord) -> bool:
        record.fields = {"model": self._model, **getattr(record, "fields", {})}
        return True


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO request request_id=… status=200 …`, always one line."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [_time_of(record), record.levelname, legible(record.getMessage())]
        parts += [
            f"{name}={_text(value)}"
            for name, value in _fields_of(record).items()
            if value is not None
        ]
        if record.exc_info:
            parts.append(f"error={_text(self.formatException(record.exc_info))}")
        return " ".join(parts)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, message, and the fields of the event."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _time_of(record),
            "level": record.levelname,
            "message": record.getMessage(),
        }
        entry |= _fields_of(record)
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def set_up_logging(log_format: str, level: int = logging.INFO, model: str | None = None) -> None:
    """Log to stderr, in this process. Raises ValueError for an unknown format.

    model: the name of the model that the lines are about, where the server has several
    """
    if log_format == LogFormat.PLAIN:
        log_to_stderr()
        logging.getLogger("freight").setLevel(level)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter_of(LogFormat(log_format)))
    if model is not None:
        handler.addFilter(_OfModel(model))
    for name in ("freight", "uvicorn"):
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.propagate = False
        log.setLevel(level if name == "freight" else logging.WARNING)


def formatter_of(log_format: LogFormat) -> logging.Formatter:
    return JsonFormatter() if log_format is LogFormat.JSON else TextFormatter()


def _time_of(record: logging.LogRecord) -> str:
    return (
        datetime.fromtimestamp(record.created, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def _text(value: object) -> str:
    """A value without blanks as it is, any other as a JSON string."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) and text.isprintable() else json.dumps(text)
