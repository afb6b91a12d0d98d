"""benchmarks/questions/isolate.py: what a program can do, what it cannot, and what counts as its end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from questions import isolate
from tests.refusals import refuses

from freight.errors import ConfigError


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    try:
        isolate.run("")
    except ConfigError as error:
        if "namespaces" not in str(error):
            raise
        pytest.skip("this machine lets no user make namespaces")


def test_what_ends_without_an_exception_passes() -> None:
    program = """
import collections, functools, hashlib, itertools, math, os, random, re, string, sys, typing
assert sys.stdin.read() == ""
assert os.listdir(".") == []
open("a", "w").write("written")
assert open("a").read() == "written"
assert "HOME" not in os.environ and "PATH" not in os.environ
print("printed " * 1_000_000)
print("printed", file=sys.stderr)
assert hashlib.md5(b"").hexdigest().startswith("d41d8cd9")
if __name__ == "__main__":
    raise AssertionError
"""
    assert isolate.run(program) == isolate.Outcome(True, "", "isolated")


@pytest.mark.parametrize(
    ("program", "detail"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("def broken(:", "SyntaxError"),
        ("input()", "EOFError"),
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("import os\nos._exit(0)", "ended by itself"),
        ("import os\nos.write(1, b'0' * 32)\nos.abort()", "ended by itself"),
        ("bytearray(10 << 30)", "MemoryError"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 9), 1)", "unreachable"),
        ("import os\nwhile True:\n    os.fork()", "BlockingIOError"),
        (
            "f = open('a', 'wb', buffering=0)\nfor _ in range(1024):\n    f.write(bytes(1 << 20))",
            "File too large",
        ),
        # the first process of its namespace is the parent, which it cannot end
        ("import os\nos.kill(1, 9)\nassert os.getppid() != 1", "AssertionError"),
        ("import os\nassert os.listdir('/proc')", "AssertionError"),
    ],
)
def test_what_does_not_end_has_failed(program: str, detail: str) -> None:
    outcome = isolate.run(program)
    assert not outcome.passed
    assert detail in outcome.detail


@pytest.mark.clock
def test_an_endless_program_is_ended() -> None:
    start = time.monotonic()
    outcome = isolate.run("while True: pass", seconds=1)
    assert not outcome.passed
    assert "1 s" in outcome.detail
    assert time.monotonic() - start < 30


def test_nothing_is_written_elsewhere(tmp_path: Path) -> None:
    place = tmp_path / "written"
    tmp_path.chmod(0o777)
    elsewhere = ("/tmp", "/dev/shm", "/proc", "/run")
    for folder in (str(place), *(f"{name}/freight-written" for name in elsewhere)):
        outcome = isolate.run(f"open({folder!r}, 'w')")
        assert outcome.detail.startswith(("OSError", "PermissionError", "FileNotFoundError"))
        assert not Path(folder).exists()


def test_no_namespace_of_its_own_gives_it_capabilities() -> None:
    program = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x10000000) == 0, "no user namespace"
"""
    limit = Path("/proc/sys/user/max_user_namespaces")
    if os.statvfs(limit).f_flag & os.ST_RDONLY:
        pytest.skip("/proc/sys is read-only here")
    assert "no user namespace" in isolate.run(program).detail


def test_a_daemon_ends_with_its_program() -> None:
    mark = f"outlives_{time.monotonic_ns()}"
    program = f"""
import os, sys, time
child = "import os, time; open('alive', 'w'); time.sleep(600)  # {mark}"
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", child])
    os._exit(0)
while not os.path.exists("alive"):
    time.sleep(0.01)
"""
    assert isolate.run(program).passed
    running = [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark in _read(path)]
    assert not running


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended in the meantime
        return ""


def test_its_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    make = isolate.tempfile.mkdtemp

    def mkdtemp(*args: str, **options: str) -> str:
        names.append(make(*args, **options))
        return str(names[-1])

    monkeypatch.setattr(isolate.tempfile, "mkdtemp", mkdtemp)
    assert isolate.run("open('a', 'w')").passed
    assert len(names) == 1
    assert not Path(names[0]).exists()


def test_without_namespaces_it_is_refused_unless_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system call that no kernel has stands in for an old kernel."""
    source = isolate._JAIL.read_text()
    old = tmp_path / "jail.py"
    old.write_text(source.replace("MOUNT_SETATTR = 442", "MOUNT_SETATTR = 100442"))
    assert old.read_text() != source
    monkeypatch.setattr(isolate, "_JAIL", old)
    with refuses(ConfigError, "namespaces", "--allow-network"):
        isolate.run("")
    assert isolate.run("", allow_network=True) == isolate.Outcome(True, "", "not isolated")
    assert not isolate.run("assert False", allow_network=True).passed
