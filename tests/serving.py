"""`freight serve` as a process of its own, from the line that says where it listens to its exit
status.

Where the start is not what is tested, the server is forked from a process that has imported all it
needs (`tests/forked_server.py`), which saves seconds.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from tests.environment import without_options
from tests.forked_server import CAN_FORK, Forked

START_SECONDS = 300.0
STOP_SECONDS = 300.0
LISTENING = re.compile(r"listening on (https?://127\.0\.0\.1:\d+)")


class ServeProcess:
    """A server that was started; `url` once it listens, `said` all that it wrote to stderr."""

    def __init__(
        self,
        model: str | Path | None,
        options: Sequence[str] = (),
        flags: Sequence[str] = (),
        forked: bool = False,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """`flags` are of the interpreter (-O). model: None where `options` have --models."""
        arguments = ["serve", *([] if model is None else [str(model)]), "--port", "0", *options]
        environ = without_options(environ)
        self.process: subprocess.Popen[str] | Forked
        if forked and CAN_FORK:
            self.process = Forked(arguments, environ, flags=flags)
        else:
            command = [sys.executable, *flags, "-m", "freight", *arguments]
            self.process = subprocess.Popen(
                command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environ
            )
        self._lines: list[str] = []
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def said(self) -> str:
        return "".join(self._lines)

    @property
    def url(self) -> str:
        """Where it listens; waits until it does."""
        self._listening.wait(START_SECONDS)
        found = LISTENING.search(self.said)
        assert found, f"freight serve did not say where it listens: {self.said[-2000:]}"
        return found[1]

    def wait_until_healthy(self) -> str:
        """The URL, once the model is loaded."""
        url, end = self.url, time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            if health(url) == 200:
                return url
            time.sleep(0.05)
        raise AssertionError(f"freight serve did not become healthy: {self.said[-2000:]}")

    def children(self) -> dict[str, int]:
        """Its processes by module: 'worker' is the engine's."""
        return dict(self._children())

    def all_of(self, module: str) -> list[int]:
        """Its processes of one module, of which it may have several: 'render_process'."""
        return [pid for name, pid in self._children() if name == module]

    def _children(self) -> Iterator[tuple[str, int]]:
        for pid in children_of(self.process.pid):
            try:
                module = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                name = Path(f"/proc/{pid}/comm").read_text().strip()
            except OSError:
                continue
            if b"-m" in module:
                started = module[module.index(b"-m") + 1].decode()
                yield name if isinstance(self.process, Forked) else started.rpartition(".")[2], pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stop(self) -> int:
        """Send SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        status = self.process.wait(STOP_SECONDS)
        self._reader.join(300)
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(300)
        self._reader.join(300)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)
            if LISTENING.search(line):
                self._listening.set()
        self._listening.set()


@contextmanager
def freight_serve(
    model: str | Path, options: Sequence[str] = (), flags: Sequence[str] = (), forked: bool = True
) -> Iterator[str]:
    """The URL of a server that is ready. At the end it gets SIGTERM, and must end with status 0."""
    with ServeProcess(model, options, flags, forked) as server:
        yield server.wait_until_healthy()
        assert server.stop() == 0, server.said[-2000:]


def health(url: str) -> int:
    """The status of /health; 0 where nobody answers."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def completion_of(url: str) -> str:
    """The answer to one greedy request, and the fingerprint of what gave it."""
    body = {"model": "demo", "prompt": "def main(", "max_tokens": 12, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.loads(answer.read())
    return f"{found['choices'][0]['text']} {found['system_fingerprint']}"


def children_of(pid: int) -> list[int]:
    """The processes whose parent `pid` is, by /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found.append(int(folder.name))
    return found


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie that nobody has asked about yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
