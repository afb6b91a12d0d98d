"""Spawning of a server's processes, which end with it (`descent.py`). Ctrl-C in a terminal reaches
them too, possibly while Python is still importing.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from freight.base.descent import from_lasting_thread, with_parent

SECRETS = (  # variables that only a server's main process needs
    "FREIGHT_API_KEY",
    "OTEL_EXPORTER_OTLP_HEADERS",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
)


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without secrets, for the other processes."""
    return {name: value for name, value in environ.items() if name not in SECRETS}


def spawn(
    command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a process with SIGINT, SIGTERM and SIGHUP blocked, until it ignores them itself.

    command: of a module that calls `end_with_parent` before it imports. env: None for that of this
    process.
    """
    environ = with_parent(os.environ if env is None else env)
    return from_lasting_thread(lambda: subprocess.Popen(command, env=environ, **options))
