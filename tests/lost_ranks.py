"""A rank that is lost at a certain moment, for tests of what the others say."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from freight.engine.leader import Leader


def lose_while_it_reads(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, pid: Callable[[Leader], int]
) -> list[float]:
    """Send a signal to process `pid` soon after the next leader has told its ranks to read weights;
    the list gets the time.
    """
    sent: list[float] = []
    load = Leader.load

    def load_and_lose(self: Leader, *given: int) -> None:
        load(self, *given)
        time.sleep(0.2)  # it begins to read
        self._ranks.sockets[0].settimeout(0.5)  # in place of ten minutes
        sent.append(time.monotonic())
        os.kill(pid(self), number)

    monkeypatch.setattr(Leader, "load", load_and_lose)
    return sent
