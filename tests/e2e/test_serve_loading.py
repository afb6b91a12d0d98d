"""`freight serve` ended while it imports or loads: one line, an exit status that says so, and
nothing left running.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.asking import Server
from tests.serving import ServeProcess
from tests.unit.server.raw_http import in_time, wait_for

pytestmark = pytest.mark.clock

MEMORY = ["--kv-cache-memory", "1MiB"]
FORMS = (["serve", "demo"], ["run", "demo"], ["--model-id", "demo"])


def start(form: Sequence[str] = FORMS[0]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "freight", *form, "--port", "0", *MEMORY]
    return subprocess.Popen(command, text=True, stderr=subprocess.PIPE, start_new_session=True)


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
    ("number", "group"),
    [
        pytest.param(signal.SIGTERM, False, id="from a supervisor"),
        pytest.param(signal.SIGINT, True, id="from a terminal"),
        pytest.param(signal.SIGTERM, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.slow),
    ],
)
def test_while_the_model_loads(number: signal.Signals, group: bool):
    """To the process or to its group."""

    def attempt() -> bool:
        process = start()
        wait_until_it_listens(process)
        (os.killpg if group else os.kill)(process.pid, number)
        lines = rest_of(process)
        if was_ready(lines):
            return False
        assert process.returncode == 128 + number
        assert [line for line in lines if "ended by" in line] == lines[-1:]
        assert f"ended by {number.name} while the model was loading" in lines[-1]
        return True

    assert in_time(attempt)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_at_random_moments(number: signal.Signals):
    """From the start of Python: before it runs any of our code, its own way of ending is all there
    is.
    """
    begun = time.monotonic()
    process = start()
    wait_until_it_listens(process)
    importing = time.monotonic() - begun
    time.sleep(0.5)
    process.kill()
    rest_of(process)  # nothing of the engine's process, which finds its socket closed
    assert process.returncode == -signal.SIGKILL
    rng = random.Random(int(number))
    for least, most in ((0.15, 0.8), (0.8, 1.5)):
        process = start()
        time.sleep(rng.uniform(least, most) * importing)
        os.killpg(process.pid, number)
        lines = rest_of(process)
        if was_ready(lines):
            continue
        assert process.returncode in (128 + number, -number)
        if process.returncode > 0 and number == signal.SIGTERM:
            assert "ended by SIGTERM" in lines[-1]


def blocks(pid: int, number: signal.Signals, mask: str = "SigBlk") -> bool:
    """Whether a signal waits for this process; SigCgt: whether it has a handler."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(mask))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


@contextmanager
def hanging_up(pid: int, every: float = 0.02) -> Iterator[None]:
    """Send SIGHUP without end, while the process is there."""
    enough = threading.Event()

    def send() -> None:
        while not enough.wait(every):
            try:
                os.kill(pid, signal.SIGHUP)
            except ProcessLookupError:
                return

    sending = threading.Thread(target=send)
    sending.start()
    try:
        yield
    finally:
        enough.set()
        sending.join()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_sighup_ends_nothing_from_the_first_instruction_to_the_last(tmp_path: Path) -> None:
    """What came before the keys could be read again is not lost: it means those of now."""
    keys = tmp_path / "keys"
    keys.write_text("ada:sk-ada\n")
    with ServeProcess("demo", [*MEMORY, "--api-key-file", str(keys)]) as server:
        pid = server.process.pid
        wait_for(lambda: blocks(pid, signal.SIGHUP))
        os.kill(pid, signal.SIGHUP)  # one alone is handled later
        wait_for(lambda: "keys were read again" in server.said)
        with hanging_up(pid):
            keys.write_text("bob:sk-bob\n")
            url = server.wait_until_healthy()
            bob = Server(url, {"Authorization": "Bearer sk-bob"})
            wait_for(lambda: bob.ask("/v1/models").status == 200)
            assert server.stop() == 0
    assert "Traceback" not in server.said


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_every_form_of_a_server_ends_with_a_line_while_it_imports(
    form: Sequence[str], number: signal.Signals
) -> None:
    """SIGHUP, which comes first, does nothing."""
    with start(form) as process:
        wait_for(lambda: blocks(process.pid, signal.SIGHUP))
        with hanging_up(process.pid, 0.001):
            time.sleep(0.1)
            assert process.poll() is None
            os.kill(process.pid, number)
            lines = rest_of(process)
    assert process.returncode == 128 + number
    assert f"ended by {number.name}" in lines[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_another_command_ends_with_its_terminal() -> None:
    command = [sys.executable, "-m", "freight", "generate", "demo", "--prompt", "x"]
    with subprocess.Popen([*command, "--max-tokens", "9999"], stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: blocks(process.pid, signal.SIGHUP, "SigCgt"))
        process.send_signal(signal.SIGHUP)
    assert process.returncode == 128 + signal.SIGHUP
