"""What an engine counts: totals since it started, and when each request reached which point.

Totals only rise. An exception in the middle of a change may leave what that change did uncounted;
nothing is counted twice, because a total rises after what marks its cause as done. Imports no
torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from freight.outputs import RequestTimes


@dataclass(slots=True)
class Totals:
    """Counts since the start, with the meaning that they have in `EngineStats`. The Scheduler
    writes them.
    """

    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt: int = 0
    generated: int = 0
    preemptions: int = 0
    failed: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by: Counter[str] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)

    def count_drafted(self, source: str, count: int) -> None:
        """Count drafts of a step, all of one request."""
        self.drafted += count
        self.drafted_by[source] += count

    def count_accepted(self, source: str) -> None:
        self.accepted += 1
        self.accepted_by[source] += 1


@dataclass(slots=True)
class Stamps:
    """When a request was added, first scheduled, got its first token, and ended, in seconds of the
    engine's clock.

    Of `n` completions: the first that is scheduled, the first that gets a token, the last that
    ends.
    """

    added: float
    scheduled: float | None = None
    first_token: float | None = None
    ended: float | None = None

    def times(
        self, now: float, preemptions: int, drafted: int = 0, accepted: int = 0
    ) -> RequestTimes:
        """Return the times until `now`, or until the end. Their sum is the request's lifetime."""
        end = self.ended
        if end is None:
            end = now
        scheduled = self.scheduled
        if scheduled is None:
            scheduled = end
        first_token = self.first_token
        if first_token is None:
            first_token = end
        return RequestTimes(
            scheduled - self.added,
            first_token - scheduled,
            end - first_token,
            preemptions,
            drafted,
            accepted,
        )
