"""Replicas of Freight as a simulation by events: Freight's own Scheduler and CacheManager behind a
router, with the time of each step from a plane.

Guarantees: the same arguments give the same figures; every request that is asked ends once, served
or cut; a replica's blocks are free when its last request has ended. Replicas interact through the
router alone. Imports no torch.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from freight.engine.pace import Pace
from freight.engine.step import Step
from simulation.plane import Plane, Work, new_request, sampled, work_of
from simulation.traffic import Ask

Loads = Mapping[int, int]  # replica that is up -> its unfinished requests


class Router(Protocol):
    def choose(self, ask: Ask, loads: Loads) -> int:
        """The replica that gets `ask`, of those in `loads`, which is not empty."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, ask: Ask, loads: Loads) -> int:
        up = list(loads)
        self._turn += 1
        return up[(self._turn - 1) % len(up)]


class LeastLoaded:
    """The one with the fewest unfinished requests, of equal ones any."""

    def __init__(self, seed: int = 0) -> None:
        self._numbers = random.Random(f"least {seed}")

    def choose(self, ask: Ask, loads: Loads) -> int:
        least = min(loads.values())
        return self._numbers.choice([index for index, load in loads.items() if load == least])


class PrefixAware:
    """Of those that have had the prefix the least loaded, unless it has more than `slack` requests
    above the least; else the least loaded. It knows what it sent where, not what is still cached.
    """

    def __init__(self, seed: int = 0, slack: int = 4) -> None:
        self._others = LeastLoaded(seed)
        self._slack = slack
        self._had: dict[int, set[int]] = {}  # prefix -> replicas that were sent it

    def choose(self, ask: Ask, loads: Loads) -> int:
        had = self._had.setdefault(ask.prefix, set())
        known = {index: loads[index] for index in sorted(had) if index in loads}
        if ask.shared and known:
            best = self._others.choose(ask, known)
            if loads[best] <= min(loads.values()) + self._slack:
                return best
        best = self._others.choose(ask, loads)
        had.add(best)
        return best


ROUTERS = ("round-robin", "least-loaded", "prefix")


def new_router(name: str, seed: int = 0) -> Router:
    if name == "round-robin":
        return RoundRobin()
    return LeastLoaded(seed) if name == "least-loaded" else PrefixAware(seed)


@dataclass(frozen=True)
class Served:
    """A request that ended. Seconds since the start of the simulation.

    first   its first token
    resent  how often it was sent again before that, because its replica was lost
    cut     its replica was lost after its first token: the client sees an error
    """

    ask: Ask
    first: float
    end: float
    resent: int = 0
    cut: bool = False

    @property
    def ttft(self) -> float:
        return self.first - self.ask.arrival

    @property
    def latency(self) -> float:
        return self.end - self.ask.arrival

    @property
    def tpot(self) -> float | None:
        count = self.ask.num_output - 1
        return (self.end - self.first) / count if count else None


@dataclass
class Account:
    """What the replicas did, summed over them. Seconds.

    by_term     of busy time, by what the plane says that it went into
    kept_waiting  of busy time in which requests waited, by what kept the first of them: "memory for
                KV", "max_num_seqs", or "prefill" (the tokens of the step were used up)
    """

    steps: int = 0
    by_term: Work = field(default_factory=Work)
    kept_waiting: dict[str, float] = field(default_factory=dict)
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    generated: int = 0

    @property
    def busy(self) -> float:
        return sum(self.by_term)


class _Replica:
    """One engine: what `Engine` does with its scheduler, without a model."""

    def __init__(self, plane: Plane, account: Account) -> None:
        self._plane = plane
        self._account = account
        self.cache, self.scheduler = plane.scheduler()
        self._pace = (
            Pace(plane.max_step_seconds, plane.max_num_batched_tokens)
            if plane.max_step_seconds
            else None
        )
        self._step: Step | None = None
        self._seconds = 0.0
        self.asks: dict[str, tuple[Ask, int]] = {}  # unfinished, with how often they were resent
        self._first: dict[str, float] = {}

    @property
    def is_busy(self) -> bool:
        return self._step is not None

    def add(self, ask: Ask, resent: int) -> None:
        name = str(ask.number)
        self.scheduler.add(new_request(name, ask.tokens(), ask.num_output))
        self.asks[name] = ask, resent

    def begin(self) -> float | None:
        """Seconds of the next step, which is under way then; None: there is nothing to compute."""
        scheduler = self.scheduler
        account = self._account
        most = None if self._pace is None else self._pace.tokens(scheduler.num_decoding)
        step = scheduler.schedule(most)
        if not step.chunks:
            return None
        by_term = self._plane.by_term(work_of(step, self._plane.bytes_per_token))
        seconds = sum(by_term)
        if self._pace is not None:
            self._pace.note(seconds, sum(c.num_tokens for c in step.chunks if c.num_tokens > 1))
        account.steps += 1
        account.by_term = account.by_term.plus(by_term)
        if scheduler.num_waiting:
            cause = self._what_keeps(step, most)
            account.kept_waiting[cause] = account.kept_waiting.get(cause, 0.0) + seconds
        self._step = step
        self._seconds = seconds
        return seconds

    def _what_keeps(self, step: Step, most: int | None) -> str:
        if self.scheduler.num_running >= self._plane.max_num_seqs:
            return "max_num_seqs"
        budget = min(most or self._plane.max_num_batched_tokens, self._plane.max_num_batched_tokens)
        return "prefill" if step.num_tokens >= budget else "memory for KV"

    def end(self, now: float) -> list[Served]:
        """Take in the step that is over; returns the requests that ended with it."""
        step = self._step
        self._step = None
        assert step is not None
        served = []
        for request in self.scheduler.apply(step, sampled(step)):
            name = request.request_id
            self._first.setdefault(name, now)
            if request.is_finished:
                ask, resent = self.asks.pop(name)
                served.append(Served(ask, self._first.pop(name), now, resent))
        return served

    def first_token(self, name: str) -> float | None:
        return self._first.get(name)

    def close(self) -> None:
        """Count what the scheduler did, and give everything back."""
        totals = self.scheduler.totals
        account = self._account
        account.prefix_queries += totals.prefix_queries
        account.prefix_hits += totals.prefix_hits
        account.preemptions += totals.preemptions
        account.generated += totals.generated
        for name in list(self.asks):
            self.scheduler.abort(name)
        assert self.cache.num_held == 0, f"{self.cache.num_held} blocks are held by nobody"


@dataclass(frozen=True)
class Loss:
    """`count` replicas end at `at` seconds, and are there again, with empty caches, `restart`
    seconds later.
    """

    at: float
    restart: float
    count: int = 1


@dataclass(frozen=True)
class Outcome:
    """All requests, in the order in which they ended, and what the replicas did."""

    served: Sequence[Served]
    account: Account
    num_replicas: int
    end: float


ARRIVAL, STEP, LOSS, RETURN = range(4)  # of events at the same time the first goes first


class Simulation:
    """`asks` over `num_replicas` of `plane`. Run once.

    front  seconds from a client to an engine and back, which every request takes besides
    """

    def __init__(
        self,
        plane: Plane,
        asks: Sequence[Ask],
        num_replicas: int,
        router: Router,
        front: float = 0.0,
        loss: Loss | None = None,
    ) -> None:
        self._plane = plane
        self._router = router
        self._front = front
        self._account = Account()
        self._up = {index: _Replica(plane, self._account) for index in range(num_replicas)}
        self._homeless: list[tuple[Ask, int]] = []  # asked while no replica was up
        self._served: list[Served] = []
        self._now = 0.0
        self._num_events = 0
        self._events: list[tuple[float, int, int, Any]] = []
        self._loss = loss
        for ask in asks:
            self._at(ask.arrival, ARRIVAL, (ask, 0))
        if loss is not None:
            for index in range(min(loss.count, num_replicas)):
                self._at(loss.at, LOSS, index)

    def run(self) -> Outcome:
        num_replicas = len(self._up)
        while self._events:
            self._now, kind, _, what = heapq.heappop(self._events)
            if kind == ARRIVAL:
                self._route(*what)
            elif kind == STEP:
                self._end_step(*what)
            elif kind == LOSS:
                self._lose(what)
            else:
                self._return(what)
        for replica in self._up.values():
            assert not replica.asks, f"requests {list(replica.asks)[:5]} never ended"
            replica.close()
        return Outcome(self._served, self._account, num_replicas, self._now)

    def _at(self, time: float, kind: int, what: Any) -> None:
        self._num_events += 1  # no two events compare by `what`
        heapq.heappush(self._events, (time, kind, self._num_events, what))

    def _route(self, ask: Ask, resent: int) -> None:
        if not self._up:
            self._homeless.append((ask, resent))
            return
        loads = {index: len(item.asks) for index, item in self._up.items()}
        index = self._router.choose(ask, loads)
        self._up[index].add(ask, resent)
        if not self._up[index].is_busy:
            self._begin(index)

    def _begin(self, index: int) -> None:
        replica = self._up[index]
        seconds = replica.begin()
        if seconds is not None:
            self._at(self._now + seconds, STEP, (index, replica))

    def _end_step(self, index: int, replica: _Replica) -> None:
        if self._up.get(index) is not replica:
            return  # it was lost during the step
        self._served += [self._with_front(item) for item in replica.end(self._now)]
        self._begin(index)

    def _with_front(self, item: Served) -> Served:
        return replace(item, first=item.first + self._front, end=item.end + self._front)

    def _lose(self, index: int) -> None:
        """Cut what has begun to stream, and send the rest again."""
        assert self._loss is not None
        replica = self._up.pop(index)
        left = list(replica.asks.items())
        for name, (ask, resent) in left:
            first = replica.first_token(name)
            if first is None:
                self._at(self._now, ARRIVAL, (ask, resent + 1))
            else:
                self._served.append(Served(ask, first, self._now, resent, cut=True))
        replica.close()
        self._at(self._now + self._loss.restart, RETURN, index)

    def _return(self, index: int) -> None:
        self._up[index] = _Replica(self._plane, self._account)
        waiting = self._homeless
        self._homeless = []
        for ask, resent in waiting:
            self._route(ask, resent)


def simulate(
    plane: Plane,
    asks: Sequence[Ask],
    num_replicas: int,
    router: Router,
    front: float = 0.0,
    loss: Loss | None = None,
) -> Outcome:
    return Simulation(plane, asks, num_replicas, router, front, loss).run()


# ------------------------------------------------------------------------------------------------
# figures


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between neighbors, as numpy's; of sorted `values`, which are not empty."""
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


@dataclass(frozen=True)
class Times:
    """Seconds at the median, p95 and p99 of whole answers: to the first token, per later token, to
    the end.
    """

    count: int
    ttft: tuple[float, float, float]
    tpot: tuple[float, float, float]
    latency: tuple[float, float, float]

    @staticmethod
    def of(served: Sequence[Served]) -> Times:
        def at(values: Sequence[float]) -> tuple[float, float, float]:
            ordered = sorted(values) or [0.0]
            return quantile(ordered, 0.5), quantile(ordered, 0.95), quantile(ordered, 0.99)

        whole = [item for item in served if not item.cut]
        tpot = [item.tpot for item in whole if item.tpot is not None]
        return Times(
            len(whole),
            at([item.ttft for item in whole]),
            at(tpot),
            at([item.latency for item in whole]),
        )


def arrived(served: Sequence[Served], begin: float, end: float) -> list[Served]:
    return [item for item in served if begin <= item.ask.arrival < end]
