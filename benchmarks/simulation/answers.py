"""What a fleet costs and holds, from simulated replicas: figures with what they assume and what binds
them. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from simulation.plane import Plane
from simulation.replicas import (
    Loss,
    Outcome,
    Served,
    Times,
    arrived,
    new_router,
    simulate,
)
from simulation.traffic import Traffic

WARM_UP = 1 / 3  # of the time simulated: requests that arrive in it are not in the figures
LEAST_SECONDS = 30.0  # of time simulated of many replicas, whose many requests make up for it
LEAST_REQUESTS = 20  # that are simulated, where few come
BEYOND = 1.1  # times what the work alone allows: that no engine keeps
LEAST_LIMITS = 10  # times the limit of TTFT
OFTEN = 0.25  # of busy time: requests that wait for so long wait for what binds
IDLE = 0.3  # of the time: replicas that are idle for longer are bound by no work of theirs
HALVINGS = 6  # of a range of rates
CAUSES = {  # a term of the plane -> what the device spends it on
    "steps": "weights' bandwidth and launches",
    "prefill_steps": "weights' bandwidth and launches",
    "prefill_tokens": "prefill compute",
    "prefill_pairs": "prefill compute",
    "sequences": "work per sequence",
    "cached_bytes": "bandwidth for cached keys and values",
}


@dataclass(frozen=True)
class Limits:
    """Seconds at p95."""

    ttft: float
    tpot: float

    def missed(self, times: Times) -> list[str]:
        results = []
        if times.ttft[1] > self.ttft:
            results.append("p95 TTFT")
        if times.tpot[1] > self.tpot:
            results.append("p95 TPOT")
        return results

    def __str__(self) -> str:
        return f"p95 TTFT <= {self.ttft:g} s and p95 TPOT <= {1e3 * self.tpot:g} ms"


@dataclass(frozen=True)
class Setup:
    """What every answer starts from.

    seconds  of traffic that are simulated of one replica
    most     replicas that are simulated; a larger fleet is that many times what they do
    """

    plane: Plane
    traffic: Traffic
    limits: Limits
    router: str = "least-loaded"
    seconds: float = 120.0
    most: int = 100
    front: float = 0.0

    def simulated(self, num_replicas: int) -> int:
        return min(num_replicas, self.most)

    def seconds_of(self, num_replicas: int) -> float:
        """In less time than several limits, a queue that grows would not be seen."""
        least = max(LEAST_SECONDS, LEAST_LIMITS * self.limits.ttft)
        return max(least, self.seconds / self.simulated(num_replicas))

    def assumptions(self) -> list[str]:
        plane = self.plane
        error = (
            f"; fit off by {plane.error[0]:.1%} at the median, {plane.error[1]:.1%} at most"
            if plane.error
            else ""
        )
        return [
            f"engine: {plane.name}; {plane.cache_tokens:,} tokens of cache, "
            f"{plane.max_num_seqs} sequences and {plane.max_num_batched_tokens:,} tokens a step at most",
            f"step time: {plane.source}{error}",
            f"traffic: {self.traffic.describe()}; seed {self.traffic.seed}",
            f"routing: {self.router}; {1e3 * self.front:g} ms outside of the engine",
            f"limits: {self.limits}",
        ]


@dataclass(frozen=True)
class Level:
    """A fleet under one load. `rate` in requests a second and replica."""

    num_replicas: int
    simulated: int
    rate: float
    times: Times
    outcome: Outcome

    @property
    def busy(self) -> float:
        """Share of the time in which the replicas compute."""
        return self.outcome.account.busy / (self.simulated * self.outcome.end)

    @property
    def hits(self) -> float:
        account = self.outcome.account
        return account.prefix_hits / account.prefix_queries if account.prefix_queries else 0.0

    def shares(self) -> dict[str, float]:
        """Of busy time, by what it was spent on; the largest first."""
        account = self.outcome.account
        results = dict[str, float]()
        for term, seconds in account.by_term._asdict().items():
            results[CAUSES[term]] = results.get(CAUSES[term], 0.0) + seconds / account.busy
        return dict(sorted(results.items(), key=lambda item: -item[1]))

    def waiting(self) -> dict[str, float]:
        """Of busy time, how long requests waited, by what kept the first of them."""
        account = self.outcome.account
        results = {name: time / account.busy for name, time in account.kept_waiting.items()}
        return dict(sorted(results.items(), key=lambda item: -item[1]))

    def to_json(self) -> dict[str, Any]:
        return {
            "replicas": self.num_replicas,
            "replicas_simulated": self.simulated,
            "requests_per_second_and_replica": self.rate,
            **asdict(self.times),
            "busy": self.busy,
            "prefix_hits": self.hits,
            "busy_by_cause": self.shares(),
            "waiting_by_cause": self.waiting(),
            "preemptions": self.outcome.account.preemptions,
        }


def level(
    setup: Setup, num_replicas: int, rate: float, router: str = "", loss: Loss | None = None
) -> Level:
    simulated = setup.simulated(num_replicas)
    seconds = max(setup.seconds_of(num_replicas), LEAST_REQUESTS / (rate * simulated))
    asks = setup.traffic.asks(rate * simulated, seconds)
    policy = new_router(router or setup.router, setup.traffic.seed)
    outcome = simulate(setup.plane, asks, simulated, policy, setup.front, loss)
    counted = arrived(outcome.served, WARM_UP * seconds, seconds)
    return Level(num_replicas, simulated, rate, Times.of(counted or outcome.served), outcome)


def what_binds(above: Level, limits: Limits) -> str:
    """Why a load is too much: the limit that it misses, and what the time goes into."""
    missed = limits.missed(above.times)
    waiting = above.waiting()
    shares = above.shares()
    cause, share = next(iter(shares.items()))
    if waiting.get("memory for KV", 0.0) >= OFTEN:
        cause = (
            f"memory for KV ({waiting['memory for KV']:.0%} of busy time requests wait for blocks)"
        )
    elif waiting.get("max_num_seqs", 0.0) >= OFTEN:
        cause = (
            f"max_num_seqs ({waiting['max_num_seqs']:.0%} of busy time requests wait for a place)"
        )
    elif above.busy < 1 - IDLE:
        cause = f"queue (replicas are busy {above.busy:.0%} of the time: requests meet in some)"
    else:
        cause = f"{cause} ({share:.0%} of busy time)"
    return f"{cause}; {' and '.join(missed)} first"


@dataclass(frozen=True)
class Capacity:
    """The highest load that keeps the limits, and what binds beyond it; `level` None: not even the
    lowest does.
    """

    level: Level | None
    binds: str


def most_rate(setup: Setup) -> float:
    """Requests a second and replica that no engine of this plane can exceed: rows of their own, and
    steps that are shared by as many sequences as there may be.
    """
    plane = setup.plane
    (num_prompt, num_output) = setup.traffic.means()
    unit = plane.seconds
    own = (1 - setup.traffic.share) * num_prompt * unit.prefill_tokens
    per_output = unit.sequences + unit.steps / plane.max_num_seqs
    return 1 / (own + num_output * per_output)


def capacity(setup: Setup, num_replicas: int, near: float | None = None) -> Capacity:
    """By halving between a rate that keeps the limits and one that does not.

    near  a rate that is known of fewer replicas: the search begins around it
    """
    low = 0.0
    high = BEYOND * most_rate(setup)
    best: Level | None = None
    above: Level | None = None
    exact = high / 2**HALVINGS
    if near is not None:
        for guess in (near, min(1.3 * near, high)):
            result = level(setup, num_replicas, guess)
            if setup.limits.missed(result.times):
                above = result
                high = guess
                break
            best = result
            low = guess
    while high - low > exact:
        rate = (low + high) / 2
        result = level(setup, num_replicas, rate)
        if setup.limits.missed(result.times):
            above = result
            high = rate
        else:
            best = result
            low = rate
    if above is None:  # all halves up to the bound keep the limits
        above = level(setup, num_replicas, high)
    return Capacity(best, what_binds(above, setup.limits))


# ------------------------------------------------------------------------------------------------
# the questions


def cost(setup: Setup, sizes: Sequence[int], price: float) -> list[dict[str, Any]]:
    """A million output tokens by number of replicas, at `price` an hour and replica."""
    rows: list[dict[str, Any]] = []
    near = None
    _, num_output = setup.traffic.means()
    known: dict[int, Capacity] = {}  # by replicas simulated
    for count in sizes:
        simulated = setup.simulated(count)
        if simulated not in known:
            known[simulated] = capacity(setup, simulated, near)
        result = known[simulated]
        row: dict[str, Any] = {"plane": setup.plane.name, "replicas": count, "binds": result.binds}
        if result.level is not None:
            near = result.level.rate
            tokens = near * num_output
            row |= result.level.to_json() | {
                "replicas": count,
                "output_tokens_per_second_and_replica": tokens,
                "requests_per_second": near * count,
                "cost_per_million_output_tokens": price / 3600 / tokens * 1e6,
            }
        rows.append(row)
    return rows


def replicas_for(setup: Setup, users: int, per_user: float) -> dict[str, Any]:
    """The fewest replicas for `users` who ask `per_user` times a second each."""
    rate = users * per_user
    single = capacity(setup, 1)
    if single.level is None:
        return {"users": users, "replicas": None, "binds": single.binds}
    result = single.level
    binds = single.binds
    needed = math.ceil(rate / result.rate)
    if needed > setup.most:
        fleet = capacity(setup, setup.most, result.rate)
        if fleet.level is not None:
            result = fleet.level
            binds = fleet.binds
        needed = math.ceil(rate / result.rate)
    else:
        result = level(setup, needed, rate / needed)
        while needed > 1:
            fewer = level(setup, needed - 1, rate / (needed - 1))
            if setup.limits.missed(fewer.times):
                binds = what_binds(fewer, setup.limits)
                break
            needed = needed - 1
            result = fewer
    return result.to_json() | {
        "users": users,
        "requests_per_second": rate,
        "replicas": needed,
        "requests_per_second_and_replica": rate / needed,
        "binds": binds,
    }


def routing(
    setup: Setup, num_replicas: int, shares: Sequence[float], rate: float
) -> list[dict[str, Any]]:
    """Each way of routing by share of common prefixes, at one load."""
    rows = []
    for share in shares:
        traffic = Traffic(setup.traffic.sizes, share, setup.traffic.prefixes, setup.traffic.seed)
        here = Setup(
            setup.plane, traffic, setup.limits, setup.router, setup.seconds, setup.most, setup.front
        )
        for name in ("round-robin", "least-loaded", "prefix"):
            result = level(here, num_replicas, rate, name)
            prefill = result.shares()["prefill compute"] * result.outcome.account.busy
            rows.append(
                result.to_json()
                | {
                    "share": share,
                    "router": name,
                    "prefill_ms_per_request": 1e3 * prefill / len(result.outcome.served),
                    "missed": setup.limits.missed(result.times),
                }
            )
    return rows


def tail(setup: Setup, num_replicas: int, rate: float, restart: float) -> dict[str, Any]:
    """Requests that arrive while a replica is missing, and the same requests without a loss."""
    seconds = max(setup.seconds_of(num_replicas), 3 * restart)
    here = Setup(
        setup.plane, setup.traffic, setup.limits, setup.router,
        seconds * setup.simulated(num_replicas), setup.most, setup.front,
    )  # fmt: skip
    at = WARM_UP * seconds
    whole = level(here, num_replicas, rate)
    lost = level(here, num_replicas, rate, loss=Loss(at, restart))

    def row(served: Sequence[Served]) -> dict[str, Any]:
        return asdict(Times.of(served))

    return {
        "replicas": num_replicas,
        "replicas_simulated": here.simulated(num_replicas),
        "requests_per_second_and_replica": rate,
        "lost_at": at,
        "restart": restart,
        "without": row(arrived(whole.outcome.served, at, at + restart)),
        "with": row(arrived(lost.outcome.served, at, at + restart)),
        "after": row(arrived(lost.outcome.served, at + restart, seconds)),
        "cut": sum(item.cut for item in lost.outcome.served),
        "sent_again": sum(item.resent > 0 for item in lost.outcome.served),
        "missed": setup.limits.missed(Times.of(arrived(lost.outcome.served, at, at + restart))),
        "busy_without": whole.busy,
    }
