"""`freight quantize` ended by SIGTERM or SIGKILL at any moment: what is left, and what the next run
makes of it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.forked_server import Forked
from tests.serving import CAN_FORK

from freight import LLM, SamplingParams

pytestmark = pytest.mark.clock

BASE = Path(__file__).parents[1] / "fixtures" / "base_bf16"
Process = Forked | subprocess.Popen[str]
Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(out, *options, slow=False, anew=False): the command under way, its errors as text.

    `slow`: it stops once it has written something, and says so. `anew`: an interpreter that starts,
    and is not forked.
    """
    processes: list[Process] = []

    def begin(out: str, *options: str, slow: bool = False, anew: bool = False) -> Process:
        arguments = ["quantize", str(BASE), str(tmp_path / out), "--kv-cache", "none", *options]
        module = "tests.slow_writer" if slow else "freight.__main__"
        if CAN_FORK and not anew:
            processes.append(Forked(arguments, os.environ, module))
        else:
            command = [sys.executable, "-m", module, *arguments]
            pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
            environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
            processes.append(
                subprocess.Popen(command, text=True, start_new_session=True, env=environ, **pipes)
            )  # type: ignore[call-overload]
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.wait(300)
        assert process.stderr is not None
        process.stderr.close()


def end(process: Process) -> tuple[int, str]:
    """Its status and what it said, once it has ended."""
    assert process.stderr is not None
    errors = process.stderr.read()
    return process.wait(300), errors


def partials(folder: Path) -> list[Path]:
    return sorted(folder.rglob(".freight.*"))


def writing(process: Process) -> None:
    """Wait until it has written something."""
    assert process.stderr is not None
    for line in process.stderr:
        if line == "wrote\n":
            return
    raise AssertionError("it has ended")


def check_loads(out: Path) -> None:
    llm = LLM(str(out), skip_tokenizer_init=True, kv_cache_memory="1MiB")
    assert llm.generate([[3, 4, 5]], SamplingParams(max_tokens=2, detokenize=False))[0].finished


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_while_it_writes_leaves_nothing(
    start: Start, tmp_path: Path, number: signal.Signals, status: int, existing: bool
):
    if existing:
        (tmp_path / "out").mkdir()
    process = start("out", slow=True, anew=number == signal.SIGTERM and not existing)
    writing(process)
    assert len(partials(tmp_path)) == 2  # the folder and its lock
    process.send_signal(number)
    ended, errors = end(process)
    assert ended == status
    assert "Traceback" not in errors
    if number != signal.SIGINT:
        assert errors.splitlines()[-1] == f"freight: ended by {number.name}"
    assert [path.name for path in tmp_path.iterdir()] == ["out"] * existing
    assert not partials(tmp_path)


@pytest.mark.slow
def test_sigterm_at_random_moments(start: Start, tmp_path: Path):
    """Each run is whole or has left nothing, whatever it was doing."""
    rng = random.Random(0)
    begun = time.monotonic()
    assert end(start("first", anew=True))[0] == 0
    full = time.monotonic() - begun
    whole = {path.name for path in (tmp_path / "first").iterdir()}
    for index in range(4):
        process = start(f"out{index}", anew=True)
        time.sleep(rng.uniform(0.1, full))
        process.send_signal(signal.SIGTERM)
        status, errors = end(process)
        assert status in (0, 143, -signal.SIGTERM)  # the last: before Python runs any of our code
        assert "Traceback" not in errors
        out = tmp_path / f"out{index}"
        assert not out.exists() or {path.name for path in out.iterdir()} == whole
        assert not partials(tmp_path)


@pytest.mark.parametrize("existing", [False, True], ids=["new", "empty folder"])
def test_the_next_run_removes_what_sigkill_left(start: Start, tmp_path: Path, existing: bool):
    if existing:
        (tmp_path / "out").mkdir()
    process = start("out", slow=True)
    writing(process)
    process.kill()
    process.wait(300)
    assert partials(tmp_path)
    status, errors = end(start("out"))
    assert status == 0, errors
    assert "removed" in errors
    assert not partials(tmp_path)
    check_loads(tmp_path / "out")


def test_a_living_run_is_left_alone(start: Start, tmp_path: Path):
    """Another output goes on independently; the same one is refused at once."""
    process = start("out", slow=True)
    writing(process)
    before = partials(tmp_path)
    status, errors = end(start("other"))
    assert status == 0, errors
    status, errors = end(start("out"))
    assert status == 2
    assert "error: another run writes" in errors
    assert str(before[0]) in errors.replace("\n", "")
    assert partials(tmp_path) == before
    assert process.poll() is None
    process.kill()
    process.wait(300)
    assert end(start("out"))[0] == 0
    assert not partials(tmp_path)
    check_loads(tmp_path / "out")


def test_two_at_once(start: Start, tmp_path: Path):
    """Into one new folder: one of them writes it whole, the other is refused or finds it there."""
    both = [start("out"), start("out")]
    found = [end(process) for process in both]
    assert any(status == 0 for status, _ in found), found
    for status, text in found:
        assert status == 0 or "error: " in text
        assert "Traceback" not in text
    assert not partials(tmp_path)
    check_loads(tmp_path / "out")
