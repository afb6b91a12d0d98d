"""LineProcess: a benchmark's process that reads and answers lines."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any


class LineProcess:
    """A process that runs `command` in the environment `env`, and has answered "ready".

    Raises SystemExit, which calls it `name`, if it does not answer so.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)
        if self.answer() != "ready":
            raise SystemExit(f"{name} did not start: see the lines above")

    def tell(self, line: Any) -> None:
        """Send a line of JSON."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """Read a line, without its end."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def end(self) -> None:
        """Close the process's input, and wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
