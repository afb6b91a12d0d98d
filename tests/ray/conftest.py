"""Freight on a Ray that is started here: `make test-ray`.

Every test but that of Ray Data speaks HTTP to Ray Serve's address, as a client would.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.demo_chat import demo_with_chat_template

CORES = 8  # that Ray is told of: more than there are, since its processes mostly wait
MODEL = {"kv_cache_dtype": "fp8", "kv_cache_memory": "64MiB", "threads": 1}


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """Ray and its proxy on this machine; where it listens."""
    # read when Ray is imported; without it Ray writes a token into the home folder
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    serve = pytest.importorskip("ray.serve", reason="ray[serve] is not installed: make test-ray")
    ray.init(
        num_cpus=CORES,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "5"}},
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_with_chat_template(tmp_path_factory.mktemp("models") / "demo-chat")


@pytest.fixture
def deployed(cluster: str, model: Path) -> Iterator[Callable[..., str]]:
    """`deployed(option=value, …)` starts replicas, and returns where they are reached."""
    from freight.ray import build
    from ray import serve

    def start(**options: Any) -> str:
        given = {"model": str(model), "num_cpus": 1, "front_cpus": 0.5} | MODEL | options
        serve.run(build(given))
        return cluster

    yield start
    serve.delete("default")


def ranks() -> list[int]:
    """The ranks of these engines, but the first of each, which is the engine itself."""
    here, found = engines(), []
    for folder in Path("/proc").glob("[0-9]*"):
        if b"freight.engine.follower" in _command(folder) and _parent(folder) in here:
            found.append(int(folder.name))
    return found


@contextmanager
def timed(seconds: float) -> Iterator[Callable[[], bool]]:
    """Whether there is time left."""
    end = time.monotonic() + seconds
    yield lambda: time.monotonic() < end


def engines() -> dict[int, int]:
    """The engines of replicas on this machine, and the replica of each, by /proc."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        parent = _parent(folder) if b"freight.serve.processes.worker" in _command(folder) else 0
        if parent and b"ray::" in _command(Path(f"/proc/{parent}")):
            found[int(folder.name)] = parent
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    with timed(seconds) as is_left:
        while not condition():
            assert is_left(), "it did not happen in time"
            time.sleep(0.05)


def _command(folder: Path) -> bytes:
    try:
        return (folder / "cmdline").read_bytes()
    except OSError:
        return b""


def _parent(folder: Path) -> int:
    try:
        stat = (folder / "stat").read_text()
    except OSError:
        return 0
    parent = int(stat.rpartition(")")[2].split()[1])
    return parent if parent != os.getpid() else 0
