"""1,100 clients with slow bodies, on a server that may have 1,024 open files: it goes on, and says
its limit.
"""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from tests.asking import Server
from tests.refusals import assert_names
from tests.serving import ServeProcess, health

pytestmark = pytest.mark.slow

HOLDER = """
import contextlib, socket, sys, time
lines = b"POST /v1/completions HTTP/1.1", b"Host: a", b"Content-Type: application/json", b"Content-Length: 9999"
head = b"\\r\\n".join((*lines, b"", b""))
def opened():
    while True:
        with contextlib.suppress(OSError):
            sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5)
            sock.sendall(head + b"{")
            return sock
socks = [opened() for _ in range(int(sys.argv[2]))]
print("all", flush=True)
while True:
    for index, sock in enumerate(socks):
        try:
            sock.sendall(b" ")
        except OSError:  # it had to make room: once more
            sock.close()
            socks[index] = opened()
            time.sleep(0.05)
    time.sleep(0.2)
"""


@contextlib.contextmanager
def holders(port: int, counts: tuple[int, ...]) -> Iterator[None]:
    """Processes that hold connections: each may have 1,024 files, too."""
    command = [sys.executable, "-c", HOLDER, str(port)]
    running = [
        subprocess.Popen([*command, str(count)], stdout=subprocess.PIPE, text=True)
        for count in counts
    ]
    try:
        for one in running:
            assert one.stdout is not None
            assert one.stdout.readline() == "all\n"
        yield
    finally:
        for one in running:
            one.kill()
            one.communicate()


def test_slow_bodies_keep_nobody_out() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        process = ServeProcess("demo", ["--kv-cache-memory", "8MiB"])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        server = Server(process.wait_until_healthy())
        with holders(urlsplit(server.url).port or 0, (550, 550)):
            end, longest = time.monotonic() + 10, 0.0
            while time.monotonic() < end:
                begun = time.monotonic()
                assert health(server.url) == 200
                longest = max(longest, time.monotonic() - begun)
            print(f"/health took {longest:.3f} s at most")
            answer = server.ask("/v1/completions", {"prompt": "def main(", "max_tokens": 4})
            assert answer.status == 200
            assert server.metric("http_requests_total", handler="/health", status="200") > 0
        assert process.stop() == 0, process.said[-2000:]
        assert_names(process.said, "944", "1024", "--max-connections")
        assert "Traceback" not in process.said
    finally:
        process.close()
