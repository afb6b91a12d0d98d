"""Forked processes as ranks, for tests of what they share."""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_DEADLINE = 60.0  # seconds for all ranks together


class KilledError(Exception):
    """A rank ended without a result."""


def in_ranks(
    size: int, body: Callable[[int], T], forked: Callable[[], None] = lambda: None
) -> list[T | Exception]:
    """Run body(rank) in `size` forked processes, and return what each returned or raised.

    `forked` is called here once all of them run. A rank that ended by a signal has `KilledError`.
    All of them are gone at the end, one that hangs too.
    """
    ends, children = [], []
    for rank in range(size):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _run(rank, body, writing)
        os.close(writing)
        ends.append(reading)
        children.append(child)
    try:
        forked()
        return [_result(end, time.monotonic() + _DEADLINE) for end in ends]
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for end in ends:
            os.close(end)


def _run(rank: int, body: Callable[[int], Any], writing: int) -> None:
    """Run the body of a forked rank and leave, without what pytest does at an exit."""
    status = 1
    torch.set_num_threads(1)  # a fork has none of the threads that there were
    try:
        try:
            result = body(rank)
        except Exception as error:
            traceback.print_exc()
            result = error
        with os.fdopen(writing, "wb") as stream:
            stream.write(pickle.dumps(result))
        status = 0
    finally:
        os._exit(status)


def _result(end: int, deadline: float) -> Any:
    """Read what a rank returned, until it closes its pipe."""
    data = b""
    while True:
        ready, _, _ = select.select([end], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, "a rank hangs"
        more = os.read(end, 1 << 16)
        if not more:
            return pickle.loads(data) if data else KilledError()
        data += more
