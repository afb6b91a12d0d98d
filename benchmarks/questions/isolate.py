"""Run a program that a model wrote, and learn whether it came to its end.

What holds where the result says `network: isolated` (Linux 5.12 or newer that lets a user make
namespaces):

- There is no network: only a loopback device that is down, in a network namespace of its own.
- No file can be written, created or removed but in an empty folder of 16 MiB in memory, which is the
  working folder and is gone afterwards. Files can be read as far as USER may (below); /proc and /run are
  empty. A socket that is a file elsewhere, such as one in /tmp, can be reached as far as its permissions
  go.
- It sees and signals no process but its own, and all of those end with it.
- It has no capabilities, and gains none by a setuid program or by namespaces of its own (the latter where
  /proc/sys can be written; in some containers it cannot). Where root runs this, it is the user nobody in
  addition; else it has the rights of the caller to read.
- CPU seconds, address space and size of files are limited for each process, and the number of processes;
  there are no core files. At the end of the wall time all are killed. The environment and standard input
  are empty. Memory of all processes together has no limit below their number times that of one.

Where the result says `not isolated`, only the limits, the empty environment and, under root, the user
nobody hold: the program could connect to anything, write wherever that user may, and leave a process
behind. `run` refuses that unless the caller allows it. Neither is a protection from faults of the kernel.

A program is proved to have come to its end by a random token, which is written after it: one that ends
itself early has failed, with whatever status. A program that looks for the token on purpose, in its
caller's frames, would find it.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from freight.errors import ConfigError

Network = Literal["isolated", "not isolated"]
SECONDS = 10.0  # of the wall
MEMORY = 2 << 30  # bytes of address space
_JAIL = Path(__file__).with_name("jail.py")
_LONGEST_VERDICT = 4096  # bytes that are read


@dataclass(frozen=True)
class Outcome:
    """detail: the error that ended the program, in words; empty if it passed"""

    passed: bool
    detail: str
    network: Network


def run(program: str, *, allow_network: bool = False, seconds: float = SECONDS) -> Outcome:
    """Run Python source in a process of its own; it passes if it ends without an exception.

    Raises ConfigError if this machine cannot isolate it and `allow_network` is not set.
    """
    token = secrets.token_hex(16)
    folder = tempfile.mkdtemp(prefix="freight-answer-")
    try:
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as verdict:
            source.write(f"{token}\n{program}".encode("utf-8", "surrogatepass"))
            source.seek(0)
            command = _command(folder, seconds, allow_network)
            timed_out = _run_group(command, source.fileno(), verdict.fileno(), seconds)
            verdict.seek(0)
            lines = verdict.read(_LONGEST_VERDICT).decode("utf-8", "replace")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    state, _, detail = lines.partition("\n")
    if state not in ("isolated", "not isolated"):
        raise ConfigError(
            f"{sys.executable} did not start as user {_user()[0]}: it must be readable and executable "
            "for that user"
        )
    network: Network = "isolated" if state == "isolated" else "not isolated"
    if network == "not isolated" and not allow_network:
        raise ConfigError(
            "this machine lets no user make namespaces, so that programs of a model would run with a "
            "network: --allow-network runs them all the same"
        )
    if detail == token:
        return Outcome(True, "", network)
    ended = "ended by itself" if not timed_out else f"ran for more than {seconds:g} s"
    return Outcome(False, detail or ended, network)


def _command(folder: str, seconds: float, allow_network: bool) -> list[str]:
    user, group = _user()
    for name in ("home", "python"):
        os.mkdir(os.path.join(folder, name))
    if os.geteuid() == 0:
        os.chmod(folder, 0o755)
        os.chown(os.path.join(folder, "home"), user, group)
    # the interpreter itself: a virtual environment's link may be where that user cannot look
    python = os.path.realpath(sys.executable)
    command = [python, "-I", "-S", str(_JAIL), folder, str(user), str(group)]
    return [*command, str(int(seconds) + 1), str(MEMORY), str(int(allow_network))]


def _user() -> tuple[int, int]:
    """The user and group of programs: nobody's if this is root."""
    if os.geteuid() != 0:
        return os.getuid(), os.getgid()
    nobody = pwd.getpwnam("nobody")
    return nobody.pw_uid, nobody.pw_gid


def _run_group(command: list[str], source: int, verdict: int, seconds: float) -> bool:
    """Run a command in a session of its own, which is killed at the end; True if the time was over."""
    process = subprocess.Popen(
        command,
        stdin=source,
        stdout=verdict,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={},
        cwd="/",
    )
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    finally:
        # the group outlives its leader if the program left processes in it
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return False
