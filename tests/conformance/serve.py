"""`freight serve` as a process of its own, from the line that says where it listens to its exit status."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

START_SECONDS = 120.0
STOP_SECONDS = 60.0
LISTENING = re.compile(r"listening on (http://127\.0\.0\.1:\d+)")


@contextmanager
def freight_serve(folder: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """The URL of a server that is ready. At the end it gets SIGTERM, and must end with status 0."""
    command = [sys.executable, "-m", "freight", "serve", str(folder), "--port", "0", *options]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FREIGHT_")}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environ)
    said: list[str] = []
    listening = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if LISTENING.search(line):
                listening.set()
        listening.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        listening.wait(START_SECONDS)
        found = LISTENING.search("".join(said))
        assert found, f"freight serve did not say where it listens: {''.join(said)[-2000:]}"
        _wait_until_healthy(found[1], process, said)
        yield found[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_SECONDS) == 0, "".join(said)[-2000:]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
        reader.join(10)
        assert process.stderr is not None
        process.stderr.close()


def _wait_until_healthy(url: str, process: subprocess.Popen[str], said: Sequence[str]) -> None:
    parts, end = urlsplit(url), time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.1)
    raise AssertionError(f"freight serve did not become healthy: {''.join(said)[-2000:]}")
