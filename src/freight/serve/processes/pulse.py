"""Detection of a stalled engine: progress measured in its process, silence measured in the parent.

The parent pings, and the command thread of the engine's process answers, even during a step. So a
long step is not silence, but a process that was stopped, is swapped out or is deadlocked is silent.
A step that hangs while the command thread still answers shows in the answer: the time for which
the process has used no CPU. Pure: times come from outside.
"""

from __future__ import annotations

STALL_TIMEOUT = 60.0  # seconds of silence after which an engine counts as stalled, by default
# Share of a core: a computing process uses more, one that only answers a ping a second uses less.
_WORKS = 0.005
_LONGEST_ON_GPU = 600.0  # seconds: no step takes that long, even if it compiles kernels
# Seconds. Pings come every second; after a longer gap, all processes stood still together.
_BETWEEN_PINGS = 2.0


class Progress:
    """The engine's side: the time for which the current turn has made no progress.

    on_gpu  the host spins while it waits for a GPU, so its CPU time proves nothing: a very long
            turn counts as stuck
    """

    def __init__(self, on_gpu: bool = False) -> None:
        self._on_gpu = on_gpu
        self._turn: float | None = None
        # Seconds of this turn, and the latest of them without progress.
        self._long = self._still = 0.0
        self._seen = self._used = 0.0

    def stuck(self, began: float | None, now: float, used: float) -> float:
        """Return the seconds without progress. Called at every ping.

        began  the start of the stepping thread's turn; None while it waits for work
        now    the present, on the same clock
        used   CPU seconds of the process so far

        A gap between two calls counts as _BETWEEN_PINGS at most: the machine or the container may
        have been paused.
        """
        passed = min(now - self._seen, _BETWEEN_PINGS)
        has_computed = used - self._used > _WORKS * passed
        self._long += passed
        self._still += passed
        if began != self._turn:
            self._long = 0.0
            self._still = 0.0
        elif has_computed:
            self._still = 0.0
        self._turn = began
        self._seen = now
        self._used = used
        if began is None:
            return 0.0
        if self._on_gpu and self._long > _LONGEST_ON_GPU:
            return self._long
        return self._still


class Silence:
    """The parent's side: the time without a sign of life from the engine's process.

    every  seconds between ticks
    """

    def __init__(self, interval: float) -> None:
        self._every = interval
        self._quiet = self._stuck = 0.0
        self._at: float | None = None

    def heard(self) -> None:
        """Reset the silence: the process sent something."""
        self._quiet = 0.0

    def pong(self, stuck: float) -> None:
        """Record the answer to a ping: the seconds without progress in the engine."""
        self._stuck = stuck

    def tick(self, now: float) -> float:
        """Return the seconds of silence so far. Called about every `every` seconds.

        Time in which this process itself stood still does not count: the messages that came
        meanwhile have not been read yet.
        """
        if self._at is not None:
            self._quiet += min(now - self._at, 2 * self._every)
        self._at = now
        return max(self._quiet, self._stuck)
