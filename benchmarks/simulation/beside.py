"""Simulated replicas beside real ones: the same requests, at the same moments, to `freight serve` on
this machine.

Guarantees: a simulation gets the lengths and arrivals that the servers got, so a difference is not
one of what was drawn. Each round first asks one at a time on every server at once: what an answer
takes there beyond the plane, `slowdown` of a step and `front` of a request, is what serving adds on
these cores, and its speed at this moment. The load itself is never used to fit anything.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from tempfile import NamedTemporaryFile
from typing import Any

from serve_against_offline import server_process

from freight.errors import FreightError
from freight.lab.bench.answers import Answer
from freight.lab.bench.load import (
    Amount,
    Connections,
    Level,
    Target,
    ask_once,
    find_accepted,
    run_level,
)
from freight.lab.bench.prompts import Ask as Sent
from freight.lab.bench.prompts import Ids, Lengths, Listed
from simulation.plane import Plane
from simulation.replicas import RoundRobin, Served, quantile, simulate
from simulation.traffic import Ask

VOCABULARY = 256  # ids that every model has
SATURATING = 64  # requests at once by which the highest rate is found
ALONE = 8  # requests, one at a time, before each round
FIGURES = ("ttft", "tpot", "latency")
AT = (("p50", 0.5), ("p95", 0.95))


@dataclass(frozen=True)
class Load:
    """lengths in tokens; `requests` in each round, of which each replica gets its share"""

    prompt: Lengths
    output: Lengths
    requests: int
    rounds: int
    seed: int = 0

    def sent(self, seed: object, count: int) -> list[Sent]:
        prompts = Ids(VOCABULARY, self.prompt, self.output)
        return list(islice(prompts.asks(random.Random(str(seed)).randrange(2**32)), count))


@dataclass(frozen=True)
class Alone:
    """What one request at a time takes beyond the plane: a factor of each step, and seconds."""

    slowdown: float
    front: float


@contextmanager
def servers(count: int, options: Sequence[str]) -> Iterator[list[Target]]:
    """`count` of `freight serve`, ready."""
    with ExitStack() as stack:
        targets = []
        for _ in range(count):
            log = stack.enter_context(NamedTemporaryFile("w", suffix=".log"))
            server = stack.enter_context(server_process(options, log))
            target, _ = asyncio.run(find_accepted(server.target, Sent([0] * 8, 2)))
            targets.append(target)
        yield targets


def compare(
    plane: Plane, load: Load, shares: Sequence[float], targets: Sequence[Target]
) -> list[dict[str, Any]]:
    """A row for each share of the highest rate: medians over rounds, measured and simulated."""
    highest = saturation(plane, load) * len(targets)
    rates = [share * highest for share in shares]
    rounds: dict[float, list[_Round]] = {rate: [] for rate in rates}
    for number in range(load.rounds):
        for rate in rates:
            alone = one_at_a_time(plane, load, targets, f"alone {number} {rate}")
            rounds[rate].append(_round(plane, load, targets, rate, number, alone))
    return [
        _row(len(targets), share, rate, rounds[rate])
        for share, rate in zip(shares, rates, strict=True)
    ]


def saturation(plane: Plane, load: Load) -> float:
    """Requests a second of one replica that has them all at once, simulated."""
    asks = [_simulated(i, 0.0, item) for i, item in enumerate(load.sent("all", SATURATING))]
    return SATURATING / simulate(plane, asks, 1, RoundRobin()).end


def one_at_a_time(plane: Plane, load: Load, targets: Sequence[Target], seed: str) -> Alone:
    listed = [load.sent(f"{seed} {index}", ALONE) for index in range(len(targets))]

    async def run() -> list[list[Answer]]:
        item = Level(concurrency=1)
        amount = Amount(requests=ALONE)
        return await asyncio.gather(
            *(
                run_level(t, Listed(s), item, amount, 0)
                for t, s in zip(targets, listed, strict=True)
            )
        )

    answers = asyncio.run(run())
    slowdowns = []
    pairs = []
    for sent, received in zip(listed, answers, strict=True):
        # one at a time: answers come in the order of the requests
        for index, (ask, answer) in enumerate(zip(sent, received, strict=True)):
            _check(answer)
            (simulated,) = simulate(plane, [_simulated(index, 0.0, ask)], 1, RoundRobin()).served
            if simulated.tpot and (measured := _tpot(answer)):
                slowdowns.append(measured / simulated.tpot)
            pairs.append((answer.times[0] - answer.start, simulated.ttft))
    slowdown = statistics.median(slowdowns) if slowdowns else 1.0
    front = statistics.median(measured - slowdown * simulated for measured, simulated in pairs)
    return Alone(slowdown, max(0.0, front))


@dataclass(frozen=True)
class _Round:
    """`sides`: figures 'measured', 'simulated', and 'by_plane', which is simulated without what one
    request at a time has shown.
    """

    sides: dict[str, dict[str, float]]
    alone: Alone


def _round(
    plane: Plane, load: Load, targets: Sequence[Target], rate: float, number: int, alone: Alone
) -> _Round:
    sent = load.sent(f"load {load.seed} {rate} {number}", load.requests)
    gaps = random.Random(f"arrivals {load.seed} {rate} {number}")
    arrival = 0.0
    arrivals = []
    for _ in sent:
        arrival += gaps.expovariate(rate)
        arrivals.append(arrival)
    answers = asyncio.run(_send(targets, sent, arrivals))
    for answer in answers:
        _check(answer)
    asks = [_simulated(i, arrivals[i], item) for i, item in enumerate(sent)]
    slower = plane.slower(alone.slowdown)
    count = len(targets)
    measured = _figures(
        [answer.times[0] - answer.start for answer in answers],
        [value for answer in answers if (value := _tpot(answer)) is not None],
        [answer.end - answer.start for answer in answers],
    )
    simulated = simulate(slower, asks, count, RoundRobin(), alone.front)
    by_plane = simulate(plane, asks, count, RoundRobin())
    sides = {
        "measured": measured,
        "simulated": _of(simulated.served),
        "by_plane": _of(by_plane.served),
    }
    return _Round(sides, alone)


async def _send(
    targets: Sequence[Target], sent: Sequence[Sent], arrivals: Sequence[float]
) -> list[Answer]:
    """Send each to the next server, at its time of arrival."""
    pools = [Connections(target.address) for target in targets]
    begin = time.perf_counter() + 0.05

    async def one(index: int) -> Answer:
        which = index % len(targets)
        start = begin + arrivals[index]
        await asyncio.sleep(max(0.0, start - time.perf_counter()))
        return await ask_once(targets[which], pools[which], sent[index], start)

    try:
        return await asyncio.gather(*(one(index) for index in range(len(sent))))
    finally:
        for pool in pools:
            pool.close()


def _simulated(number: int, arrival: float, item: Sent) -> Ask:
    return Ask(number, arrival, len(item.content), item.max_tokens)


def _check(answer: Answer) -> None:
    if answer.error or answer.num_tokens != answer.max_tokens:
        raise FreightError(
            f"an answer is not whole ({answer.num_tokens} of {answer.max_tokens} tokens): {answer.message}"
        )


def _tpot(answer: Answer) -> float | None:
    count = answer.num_tokens - 1
    return (answer.times[-1] - answer.times[0]) / count if count else None


def _of(served: Sequence[Served]) -> dict[str, float]:
    tpot = [item.tpot for item in served if item.tpot is not None]
    return _figures([item.ttft for item in served], tpot, [item.latency for item in served])


def _figures(*lists: Sequence[float]) -> dict[str, float]:
    """Milliseconds: 'ttft p50' and so on."""
    return {
        f"{name} {label}": 1e3 * quantile(sorted(values), share)
        for name, values in zip(FIGURES, lists, strict=True)
        for label, share in AT
    }


def _row(count: int, share: float, rate: float, rounds: Sequence[_Round]) -> dict[str, Any]:
    """Differences are taken within each round, and their median over rounds."""

    def median(side: str, figure: str) -> float:
        return statistics.median(item.sides[side][figure] for item in rounds)

    def difference(side: str, figure: str) -> float:
        return statistics.median(
            item.sides[side][figure] / item.sides["measured"][figure] - 1 for item in rounds
        )

    return {
        "replicas": count,
        "share_of_highest_rate": share,
        "requests_per_second": rate,
        "rounds": len(rounds),
        "slowdown": statistics.median(item.alone.slowdown for item in rounds),
        "front_ms": 1e3 * statistics.median(item.alone.front for item in rounds),
        "figures": {
            figure: {
                "measured_ms": median("measured", figure),
                "simulated_ms": median("simulated", figure),
                "difference": difference("simulated", figure),
                "by_plane_ms": median("by_plane", figure),
                "difference_by_plane": difference("by_plane", figure),
            }
            for figure in rounds[0].sides["measured"]
        },
    }
