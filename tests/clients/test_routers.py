"""Routers from PyPI, unchanged, in front of two servers: answers are those of a server asked
directly.
"""

from __future__ import annotations

import http.client
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.clients.conftest import Clients

START_SECONDS = 120
ROUTERS = {
    "sglang-router": ["smg", "launch"],
    "vllm-router": ["vllm-router"],
}


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as found:
        port: int = found.getsockname()[1]
    return port


def get(url: str, path: str) -> tuple[int, str]:
    """Status and body; 0 where nobody answers."""
    parts = urlsplit(url)
    with closing(
        http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    ) as connection:
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError:
            return 0, ""


def completions(server: str) -> int:
    """How many requests a server has answered."""
    lines = [
        line
        for line in get(server, "/metrics")[1].splitlines()
        if line.startswith("vllm:request_success_total")
    ]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


@contextmanager
def routed(command: list[str], servers: list[str], policy: str, log: Path) -> Iterator[str]:
    """The URL of a router that knows both servers."""
    port = free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    options += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    with log.open("wb") as written:
        router = subprocess.Popen(
            [*command, *options, "--worker-urls", *servers], stdout=written, stderr=written
        )
    try:
        while not all(
            server in get(url, "/workers")[1] + get(url, "/list_workers")[1] for server in servers
        ):
            assert router.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.1)
        yield url
    finally:
        router.terminate()
        try:
            router.wait(20)
        except subprocess.TimeoutExpired:
            router.kill()
            router.wait(10)


@pytest.mark.parametrize("policy", ["round_robin", "cache_aware"])
@pytest.mark.parametrize("name", ROUTERS)
def test_answers_come_through_a_router(
    name: str,
    policy: str,
    clients: Clients,
    servers: list[str],
    answers: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    direct = answers(servers[0])
    assert all(whole == streamed and whole for whole, streamed, *_ in direct[:-1])
    assert direct[-1] == "messages"  # which field is at fault
    before = [completions(server) for server in servers]
    first, *rest = ROUTERS[name]
    with routed(
        [str(clients.command(first)), *rest], servers, policy, tmp_path / "router.log"
    ) as url:
        assert answers(url) == direct, (tmp_path / "router.log").read_text()[-4000:]
    asked = [completions(server) - count for server, count in zip(servers, before, strict=True)]
    assert sum(asked) == 2 * (len(direct) - 1)
    assert policy == "cache_aware" or all(asked)
