"""How other processes of Freight are started.

Ctrl-C in a terminal reaches them too, and may find them while Python imports.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

SECRETS = ("FREIGHT_API_KEY",)  # variables that only a server's first process needs


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` as the other processes may have it."""
    return {name: value for name, value in environ.items() if name not in SECRETS}


def spawn(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """subprocess.Popen of a command that begins with SIGINT, SIGTERM and SIGHUP blocked; later it
    ignores them itself.

    What arrives here meanwhile is delivered when this returns.
    """
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    )
    try:
        return subprocess.Popen(command, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
