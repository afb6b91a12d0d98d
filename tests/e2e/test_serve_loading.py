"""`freight serve` ended while it imports or loads: one line, an exit status that says so, and
nothing left running.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from tests.unit.server.raw_http import in_time

pytestmark = pytest.mark.clock

COMMAND = (
    sys.executable,
    "-m",
    "freight",
    "serve",
    "demo",
    "--port",
    "0",
    "--kv-cache-memory",
    "1MiB",
)


def start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        COMMAND,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def rest_of(process: subprocess.Popen[str]) -> list[str]:
    """What it says until it and all its processes have ended, which hold the pipe."""
    _, errors = process.communicate(timeout=300)
    assert "Traceback" not in errors, errors
    return [line for line in errors.splitlines() if "listening on" not in line]


def wait_until_it_listens(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "listening on" in line, line


def was_ready(lines: list[str]) -> bool:
    """Whether the model was loaded before the signal came: this machine stood still, or is very
    fast.
    """
    return any("ready: demo" in line for line in lines)


@pytest.mark.parametrize(
    ("number", "status", "group"),
    [
        pytest.param(signal.SIGTERM, 143, False, id="from a supervisor"),
        pytest.param(signal.SIGINT, 130, True, id="from a terminal"),
        pytest.param(signal.SIGTERM, 143, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, False, marks=pytest.mark.slow),
    ],
)
def test_while_the_model_loads(number: signal.Signals, status: int, group: bool):
    """To the process or to its group."""

    def attempt() -> bool:
        process = start()
        wait_until_it_listens(process)
        (os.killpg if group else os.kill)(process.pid, number)
        lines = rest_of(process)
        if was_ready(lines):
            return False
        assert process.returncode == status
        assert [line for line in lines if "ended by" in line] == lines[-1:]
        assert f"ended by {number.name} while the model was loading" in lines[-1]
        return True

    assert in_time(attempt)


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_at_random_moments(number: signal.Signals, status: int):
    """From the start of Python: before it runs any of our code, its own way of ending is all there
    is.
    """
    process = start()
    begun = time.monotonic()
    wait_until_it_listens(process)
    importing = time.monotonic() - begun
    process.kill()
    rest_of(process)
    rng = random.Random(int(number))
    for _ in range(3):
        process = start()
        time.sleep(rng.uniform(0.15, 1.5) * importing)
        os.killpg(process.pid, number)
        lines = rest_of(process)
        if was_ready(lines):
            continue
        assert process.returncode in (status, -number)
        if process.returncode == status and number == signal.SIGTERM:
            assert "ended by SIGTERM" in lines[-1]


def test_a_server_that_is_killed_leaves_a_quiet_engine():
    """The engine's process finds its socket closed when it has something to say."""
    process = start()
    wait_until_it_listens(process)
    time.sleep(0.5)
    process.kill()
    rest_of(process)
    assert process.returncode == -signal.SIGKILL
