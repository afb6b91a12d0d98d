"""Turns: one engine for several callers. Calls from several threads are served one after another,
in order of arrival.

An engine does one thing at a time, and its callers come from everywhere: threads, streams that are
read in turn, generators that the garbage collector closes in the middle of something else. The
rule: what has to have the engine alone goes through `run`, first come, first served, a step at a
time; requests that are no longer wanted are put on a list, which never waits, and the next turn
frees them.

It also holds where a signal handler raises (Ctrl-C). CPython runs handlers when a Python function
begins, when a call returns and when a loop goes round. So what must not be left out stands in a
`finally` as one call of a built-in method: `list.remove` here, `released.extend` in callers. A lock
whose release is Python code could stay locked.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from freight.errors import RequestError

T = TypeVar("T")

_SHORTEST_PAUSE = 5e-5  # seconds between two looks of a thread that waits
_LONGEST_PAUSE = 2e-3


class Turns:
    """`free` forgets a request of the engine. It is called in a turn, and may be called twice for
    one request.

    A caller that is done with its requests puts their ids into `released` and calls `tidy`.
    """

    def __init__(self, free: Callable[[str], None]) -> None:
        self.released: deque[str] = deque()
        self._free = free
        self._queue: list[int] = []  # threads by arrival; the first has the engine

    def run(self, action: Callable[[], T]) -> T:
        """Call `action` while no other thread has the engine. Raises RequestError from within
        another turn.
        """
        me = threading.get_ident()
        if me in self._queue:
            raise RequestError(
                "the engine is busy in this thread: a signal handler or callback cannot call it again"
            )
        try:
            self._queue.append(me)
            pause = _SHORTEST_PAUSE
            while self._queue[0] != me:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            self._free_released()
            result = action()
        finally:
            if me in self._queue:
                self._queue.remove(me)
        self.tidy()
        return result

    def tidy(self) -> None:
        """Free what is released, unless the engine is in use: then its next turn does. Never waits
        for a step.

        An interrupt is raised once all is free.
        """
        interrupt: BaseException | None = None
        while self.released and not self._queue:
            try:
                self.run(lambda: None)
            except BaseException as error:
                if interrupt is not None:
                    raise
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _free_released(self) -> None:
        while self.released:
            self._free(self.released[0])
            # after it is freed: an interrupt in between only frees it twice
            self.released.popleft()
