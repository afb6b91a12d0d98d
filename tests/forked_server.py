"""`freight` forked from a process that has imported what it needs, in place of an interpreter that
begins anew.

To import torch, transformers and fastapi takes a server's processes four to seven seconds of a
core, and their start is not what most tests of servers are about. `Forked` is such a server, with
the interface of `subprocess.Popen` as far as tests need it. It has the same processes as any other
(HTTP, engine, templates, grammars), with nothing shared but what was imported, and they end and can
be killed in the same way. What depends on the start itself — the interpreter's options, what is
imported when, which descriptors are passed on — needs a process that was started: `ServeProcess(…,
forked=False)`.

`python -m tests.forked_server FD` is the process that forks. It has one thread and never computes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from freight.base.descent import ENDING

# before torch: the process that renders templates does not want it, and what transformers finds
# once is kept
_FIRST = ("transformers.utils.chat_parsing", "transformers.utils.chat_template_utils")
_IMPORTED = (
    *("freight.cli.main", "freight.serve.lifecycle"),
    *("freight.serve.rendering.render_process", "freight.serve.processes.worker"),
    *(
        "freight.engine.build",
        "freight.engine.loop",
        "freight.engine.fingerprint",
        "freight.model.open",
    ),
    *(
        "freight.engine.grammar",
        "freight.kernels.cpu.cpu_set",
        "freight.quantizer.quantize",
        "freight.cli.streams",
    ),
    *("llguidance", "uvicorn.protocols.http.httptools_impl"),
)
CAN_FORK = sys.platform == "linux"  # elsewhere libraries that have been loaded may not survive it
_SET_NAME = 15  # PR_SET_NAME
_MOST = 1 << 20  # bytes of a request: arguments and environment


class _Process(ABC):
    """What tests and servers use of a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()  # several threads may wait

    @abstractmethod
    def _ended(self, seconds: float | None) -> int | None:
        """The exit status, waited for so long; None if there is none yet."""

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.returncode is None:
                self.returncode = self._ended(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("freight", timeout or 0.0)
        return self.returncode

    def poll(self) -> int | None:
        if self._lock.acquire(blocking=False):
            try:
                if self.returncode is None:
                    self.returncode = self._ended(0)
            finally:
                self._lock.release()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it may end meanwhile
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forked(_Process):
    """`python -m MODULE ARGUMENTS`, forked; `stderr` is what it writes there, if that was asked
    for.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        module: str = "freight.cli.main",
        pass_fds: Sequence[int] = (),
        piped: bool = True,
        stdout: int | None = None,
        more_memory: int | None = None,
        blocked: bool = False,
        flags: Sequence[str] = (),
    ) -> None:
        """pass_fds: each is an argument as well, which becomes its number in the new process.
        stdout: or none. blocked: signals that end a process wait until the module unblocks them.
        flags: of the interpreter (-O).

        more_memory: bytes of address space that it may take.
        """
        ours, theirs = os.pipe()
        reading, writing = os.pipe() if piped else (-1, os.dup(2))
        printing = os.open(os.devnull, os.O_WRONLY) if stdout is None else os.dup(stdout)
        request = {
            "module": module,
            "argv": list(argv),
            "passed": list(pass_fds),
            "environ": dict(environ),
        }
        request["memory"] = more_memory
        request["blocked"] = blocked
        socket.send_fds(
            _forker(*flags), [json.dumps(request).encode()], [theirs, writing, printing, *pass_fds]
        )
        for fd in (theirs, writing, printing):
            os.close(fd)
        self.stderr = open(reading, encoding="utf-8") if piped else None  # noqa: SIM115 — the reader closes it
        self._pipe = open(ours, "rb", buffering=0)  # noqa: SIM115 — closed at its end
        super().__init__(int(self._line()))

    def _line(self) -> bytes:
        line = self._pipe.readline()
        assert line, "the process that forks has ended"
        return line

    def _ended(self, seconds: float | None) -> int | None:
        if not select.select([self._pipe], [], [], seconds)[0]:
            return None
        status = int(self._line())
        self._pipe.close()
        return status


def run_forked(
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    module: str = "freight.__main__",
    more_memory: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """`python -m MODULE ARGV`, to its end; more_memory: bytes of address space beside those of what
    is imported.
    """
    environ = os.environ if environ is None else environ
    if not CAN_FORK:
        command = [sys.executable, "-m", module, *argv]
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=300, check=False
        )
    with tempfile.TemporaryFile("w+") as out:
        process = Forked(argv, environ, module, stdout=out.fileno(), more_memory=more_memory)
        assert process.stderr is not None
        with process.stderr as errors:
            err = errors.read()
        status = process.wait(300)
        out.seek(0)
        return subprocess.CompletedProcess(["freight", *argv], status, out.read(), err)


def forked(
    command: Sequence[str], pass_fds: Sequence[int], env: Mapping[str, str] | None = None, **_: Any
) -> Forked:
    """In a test, the `subprocess.Popen` of a server's `python … -m MODULE FD`."""
    module, *argv = command[command.index("-m") + 1 :]
    return Forked(argv, os.environ if env is None else env, module, pass_fds, piped=False)


@cache
def _forker(*flags: str) -> socket.socket:
    """The socket of this process's forking process, which ends when this one does; one for each
    combination of flags of the interpreter.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST)
    with theirs:
        command = [sys.executable, *flags, "-m", "tests.forked_server", str(theirs.fileno())]
        root = str(Path(__file__).parents[1])
        environ = os.environ | {"PYTHONPATH": root}
        _kept.append(subprocess.Popen(command, pass_fds=(theirs.fileno(),), cwd=root, env=environ))
    return ours


_kept: list[subprocess.Popen[bytes]] = []  # nobody waits for it


class _Child(_Process):
    """In a forked server, the `subprocess.Popen` of `python … -m MODULE FD`: a fork that calls
    MODULE's `main`.
    """

    def __init__(
        self,
        command: Sequence[str],
        pass_fds: Sequence[int],
        env: Mapping[str, str] | None = None,
        **_: Any,
    ) -> None:
        module, *argv = command[command.index("-m") + 1 :]
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # newer Pythons warn of threads; what they hold, the child does not use
            pid = os.fork()
        if pid == 0:
            _become(module, pass_fds, os.environ if env is None else env)
            sys.argv = [module, *argv]
            _run(module)
        super().__init__(pid)

    def _ended(self, seconds: float | None) -> int | None:
        pid, status = os.waitpid(self.pid, 0 if seconds is None else os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None


def _become(module: str, keep: Sequence[int], environ: Mapping[str, str]) -> None:
    """Make a forked process as one that was started: its name, descriptors, signals and
    environment.
    """
    ctypes.CDLL(None).prctl(_SET_NAME, module.rpartition(".")[2].encode(), 0, 0, 0)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd in (int(fd) for fd in os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)
    os.environ.clear()
    os.environ.update(environ)


def _run(module: str) -> NoReturn:
    """Call the module's `main`, and end the process as an interpreter would."""
    status = 0
    try:
        importlib.import_module(module).main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _fork_on_request(control: socket.socket) -> str:
    """Fork for each request, and report each process's pid and its end. Returns in the children:
    the module to run.
    """
    woken, wake = os.pipe()
    for fd in (woken, wake):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    running: dict[int, int] = {}  # pid -> the pipe on which it is reported
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            os.read(woken, 512)
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    _tell(running.pop(pid), os.waitstatus_to_exitcode(status), last=True)
        if control in ready:
            data, fds, _, _ = socket.recv_fds(control, _MOST, 16)
            if not data:
                sys.exit(0)
            pipe, stderr, stdout, *passed = fds
            request = json.loads(data)
            signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
            pid = os.fork()
            if pid == 0:
                os.dup2(stderr, 2)
                os.dup2(stdout, 1)
                _become(request["module"], passed, request["environ"])
                if not request["blocked"]:
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
                if request["memory"] is not None:
                    _limit(request["memory"])
                numbers = {
                    str(theirs): str(ours)
                    for theirs, ours in zip(request["passed"], passed, strict=True)
                }
                sys.argv = [
                    "freight",
                    *(numbers.get(argument, argument) for argument in request["argv"]),
                ]
                return str(request["module"])
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
            running[pid] = pipe
            for fd in (stderr, stdout, *passed):
                os.close(fd)
            _tell(pipe, pid)


def _limit(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more,) * 2)


def _tell(pipe: int, number: int, last: bool = False) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits
        os.write(pipe, b"%d\n" % number)
    if last:
        os.close(pipe)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.pthread_sigmask(
        signal.SIG_SETMASK, ()
    )  # a test may have started this process as servers start theirs
    os.environ["USE_TORCH"] = "0"
    for name in (*_FIRST, *_IMPORTED):
        importlib.import_module(name)
    importlib.import_module("transformers").PreTrainedTokenizerFast  # noqa: B018 — imported at this
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    gc.collect()
    gc.freeze()
    module = _fork_on_request(control)
    control.detach()  # it is closed
    children: Any = importlib.import_module("freight.serve.processes.children")
    children.subprocess = types.SimpleNamespace(Popen=_Child)
    _run(module)


if __name__ == "__main__":
    main()
