"""`freight` whose n-th call of the file system fails while it writes a checkpoint.

FREIGHT_TEST_FAULT is "N ACTION": ACTION is an errno of that call alone, an errno with a + of it and
all later ones, or a signal's name, which the process sends to itself there. The number of calls is
the last line of standard error. With FREIGHT_TEST_MOVES folders are not exchanged.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from freight.__main__ import main as freight
from freight.base.descent import ENDING
from freight.checkpoint import partial, writer
from freight.checkpoint.writer import CheckpointWriter
from freight.cli import main as cli

_CALLS = (
    *("rename", "replace", "mkdir", "rmdir", "unlink", "open", "write", "fsync", "chown"),
    *("listdir", "scandir"),
)


class Faults:
    """The fault that the environment asks for, in the calls from the writer's beginning on."""

    def __init__(self, number: int, action: str) -> None:
        self.number = number
        self.action = action
        self.calls = 0

    def before_call(self) -> None:
        self.calls += 1
        if self.action.startswith("SIG"):
            if self.calls == self.number:
                os.kill(os.getpid(), getattr(signal, self.action))
            return
        lasting = self.action.endswith("+")
        if self.calls == self.number or (lasting and self.calls > self.number):
            code = getattr(errno, self.action.rstrip("+"))
            raise OSError(code, os.strerror(code))

    def wrap(self, owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            self.before_call()
            return function(*args, **options)

        setattr(owner, name, wrapped)

    def begin(self) -> None:
        for name in _CALLS:
            self.wrap(os, name)
        self.wrap(shutil, "copyfile")
        self.wrap(writer, "save_file")
        self.wrap(partial, "exchange")

    def say(self) -> None:
        sys.stderr.write(f"\n{self.calls}\n")
        sys.stderr.flush()


def _never(one: Path, other: Path) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def main() -> None:
    number, action = os.environ.get("FREIGHT_TEST_FAULT", "0 EIO").split()
    faults = Faults(int(number), action)
    enter = CheckpointWriter.__enter__

    def entered(self: CheckpointWriter) -> CheckpointWriter:
        faults.begin()
        return enter(self)

    if os.environ.get("FREIGHT_TEST_MOVES"):
        partial.exchange = _never
    CheckpointWriter.__enter__ = entered  # type: ignore[method-assign]
    run = cli.main

    def with_handlers() -> None:
        """Have signals, which waited until their handlers are in place, arrive."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        run()

    cli.main = with_handlers
    try:
        freight()
    finally:
        faults.say()


if __name__ == "__main__":
    main()
