"""Start-up log lines: to stderr, unless the program has set up logging itself.

A record is one line that a terminal can take, whatever a model's files put into it
(`errors.legible`).
"""

from __future__ import annotations

import logging
import sys

from freight.errors import legible

logger = logging.getLogger("freight")


class PlainFormatter(logging.Formatter):
    """`freight: message`, and the traceback of an exception below it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return f"freight: {legible(record.message)}"


def log_to_stderr() -> None:
    """Log start-up decisions to stderr unless the program has set up logging."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(PlainFormatter())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
