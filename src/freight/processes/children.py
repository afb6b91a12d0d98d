"""Spawning of Freight's processes. Ctrl-C in a terminal reaches them too, possibly while Python is
still importing.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

SECRETS = ("FREIGHT_API_KEY",)  # variables that only a server's main process needs


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without secrets, for the other processes."""
    return {name: value for name, value in environ.items() if name not in SECRETS}


def spawn(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process with SIGINT, SIGTERM and SIGHUP blocked, until it ignores them itself.

    A signal that this process receives meanwhile is delivered when the call returns.
    """
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    )
    try:
        return subprocess.Popen(command, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
