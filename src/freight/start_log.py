"""Start-up log lines: to stderr, unless the program has set up logging itself."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("freight")


def log_to_stderr() -> None:
    """Log start-up decisions to stderr unless the program has set up logging."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("freight: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
