"""Whether the engine's process gets on: what it measures of itself, and what is made of its silence.

The one that asks pings, and the thread of the engine's process that reads commands answers, also while a
step runs. So a long step is no silence, and a process that was stopped, is swapped out or is
deadlocked is one. A step that hangs while that thread still answers shows in the answer: it has
used no processor for so long. Pure: times come from outside.
"""

from __future__ import annotations

_WORKS = 0.005  # of a processor: what computes uses more, and what answers a ping a second less
_LONGEST_ON_GPU = 600.0  # seconds: no step takes as long, kernels compiled within it included
_BETWEEN_PINGS = (
    2.0  # seconds: they come each second; what is longer, all processes stood still together
)


class Progress:
    """The engine's side: for how long the turn under way has stood still.

    on_gpu  the host waits for a GPU by spinning, so the time of its processor says nothing; a very
            long turn does
    """

    def __init__(self, on_gpu: bool = False) -> None:
        self._on_gpu = on_gpu
        self._turn: float | None = None
        self._long = self._still = (
            0.0  # seconds of this turn, and those of them without progress until now
        )
        self._seen = self._used = 0.0

    def stuck(self, began: float | None, now: float, used: float) -> float:
        """Seconds without progress; called again and again.

        began: when the turn of the stepping thread began, None while it waits for work; `now` of
        the same clock; used: seconds of processors that the process has used

        Time in which nobody asked hardly counts: the machine or the container may have been paused.
        """
        passed = min(now - self._seen, _BETWEEN_PINGS)
        self._long = self._long + passed if began == self._turn else 0.0
        has_computed = used - self._used > _WORKS * passed
        self._still = 0.0 if began != self._turn or has_computed else self._still + passed
        self._turn, self._seen, self._used = began, now, used
        if began is None:
            return 0.0
        return self._long if self._on_gpu and self._long > _LONGEST_ON_GPU else self._still


class Silence:
    """The side that asks: for how long the engine's process has given no sign of life. every:
    seconds between ticks.
    """

    def __init__(self, every: float) -> None:
        self._every = every
        self._quiet = self._stuck = 0.0
        self._at: float | None = None

    def heard(self) -> None:
        """Anything came from the process."""
        self._quiet = 0.0

    def told(self, stuck: float) -> None:
        """It answered a ping: its steps have stood still for so long."""
        self._stuck = stuck

    def tick(self, now: float) -> float:
        """Called about every `every` seconds; the seconds of silence so far.

        Time in which this process itself stood still does not count: what came meanwhile has not
        been read yet.
        """
        if self._at is not None:
            self._quiet += min(now - self._at, 2 * self._every)
        self._at = now
        return max(self._quiet, self._stuck)
