"""Processes that never outlive the one that started them, not even while they are stopped.

The kernel ends a child with SIGKILL, which acts on a stopped process too, once the *thread* that
started it has ended. So every child is started by one thread that lasts as long as its process
(`from_lasting_thread`), and asks for this with its first lines (`end_with_parent`), before imports
that take seconds. It compares its parent with the one whose id is in its environment
(`with_parent`), which may have ended before. Only Linux has such a signal; elsewhere a child ends
once it finds its connection closed. Imports what every interpreter has, so that it is loaded at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cache
from queue import SimpleQueue
from typing import TypeVar

PARENT = "FREIGHT_PARENT"  # in a child's environment: the id of the process that started it
_PR_SET_PDEATHSIG = 1
# Ctrl-C and the end of a terminal reach children too; they wait until these set what they do
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

T = TypeVar("T")


def end_with_parent() -> None:
    """Have the kernel end this process with its parent; ends it now if the parent has ended.

    To be called by a child before anything else.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = os.environ.pop(PARENT, "")
    if parent and parent != str(os.getppid()):
        os._exit(1)


def with_parent(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with the id of this process, for a child of it."""
    return {**environ, PARENT: str(os.getpid())}


def from_lasting_thread(start: Callable[[], T]) -> T:
    """Return what `start` returns, called by a thread that lasts as long as this process.

    That thread has SIGINT, SIGTERM and SIGHUP blocked, and so has a process that it starts, until
    that one unblocks or ignores them. Raises what `start` raises.
    """
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(start())
        except BaseException as error:
            outcome.set_exception(error)

    _calls().put(call)
    return outcome.result()


@cache
def _calls() -> SimpleQueue[Callable[[], None]]:
    """Return the queue of the lasting thread of this process, which the first call starts."""
    calls: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        while True:
            calls.get()()

    threading.Thread(target=run, name="freight-children", daemon=True).start()
    return calls


os.register_at_fork(after_in_child=_calls.cache_clear)  # a fork has no such thread yet
