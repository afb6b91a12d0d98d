"""How fast blocks may be read, and whether reading them is worth it. Imports no torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from freight.cache.store.tiers import Tier

# Share of the time of steps in which a request decodes that reading may take: a step waits for its
# slowest thread, and this is what it may lose.
SHARE = 0.04
_SAVED = 0.05  # seconds of reading that may be saved up
_FRESH = 60.0  # seconds that a measured rate is believed: a disk may have been slow once


class ReadBudget:
    """The seconds that the reading thread may spend: all it likes while nothing is decoded, else
    `SHARE` of the time that goes by.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._left = 0.0
        self._last: float | None = None
        self.is_limited = False

    def step(self, decodes: bool) -> None:
        """Note that a step begins; `decodes`: some request decodes in it."""
        now = self._clock()
        with self._changed:
            if self._last is not None:
                self._left = min(self._left + SHARE * (now - self._last), _SAVED)
            self._last = now
            self.is_limited = decodes
            self._changed.notify_all()

    def wait(self, is_wanted: Callable[[], bool]) -> None:
        """Wait until there is something to spend, or it is not wanted any more."""
        with self._changed:
            while self.is_limited and self._left <= 0 and is_wanted():
                self._changed.wait(0.1)

    def spend(self, seconds: float) -> None:
        with self._changed:
            if self.is_limited:
                self._left -= seconds


class Rates:
    """What reading and computing were measured to take."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read: dict[Tier, tuple[float, float, float]] = {}  # bytes, seconds, when
        self._computed: tuple[float, float] = 0.0, 0.0  # tokens, seconds

    def note_read(self, tier: Tier, num_bytes: int, seconds: float) -> None:
        before, spent, _ = self._read.get(tier, (0.0, 0.0, 0.0))
        # half of what was before: the last ones count most
        self._read[tier] = before / 2 + num_bytes, spent / 2 + seconds, self._clock()

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        before, spent = self._computed
        self._computed = before / 2 + num_tokens, spent / 2 + seconds

    def to_compute(self, num_tokens: int) -> float:
        """Return the seconds that tokens of a prompt take; 0 before any were measured."""
        tokens, seconds = self._computed
        return num_tokens * seconds / tokens if tokens else 0.0

    def is_worth(self, sizes: Mapping[Tier, int], num_tokens: int, is_limited: bool) -> bool:
        """Return whether to read blocks of `sizes` bytes, by tier, takes less time than to compute
        their `num_tokens` tokens. What was not measured yet, or long ago, is tried.
        """
        if self._computed[0] == 0:
            return True
        to_read = 0.0
        for tier, size in sizes.items():
            num_bytes, spent, when = self._read.get(tier, (0.0, 0.0, 0.0))
            if num_bytes and self._clock() - when < _FRESH:
                to_read += size * spent / num_bytes
        return to_read / (SHARE if is_limited else 1.0) < self.to_compute(num_tokens)
