"""The figures of a load: percentiles of times, rates, errors by kind, and ratios of two servers
with an interval.

Guarantees: errors are in no time and no rate of tokens, and are counted; a ratio is taken within
each round first, because the speed of a machine that others use too changes between rounds. The
interval is that of order statistics: it assumes nothing about how the ratios are distributed, and
says its own coverage, which few rounds keep below 95 %.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product

import numpy as np

from freight.base.fields import JsonObject
from freight.lab.bench.answers import Answer
from freight.lab.bench.load import Level

PERCENTILES = {"median": 50.0, "p90": 90.0, "p99": 99.0}
TIMES = ("ttft_ms", "itl_ms", "e2e_ms")
COMPARED = {  # what ratios are taken of; True: more is better
    "ttft_ms_median": False,
    "itl_ms_median": False,
    "itl_ms_p99": False,
    "e2e_ms_median": False,
    "output_tokens_per_second": True,
}
_Compared = dict[str, float | None]


@dataclass(frozen=True)
class Run:
    """One server under one load in one round."""

    url: str
    level: Level
    round: int
    answers: Sequence[Answer]


@dataclass(frozen=True)
class Samples:
    """Milliseconds of everything that is timed, over the complete answers.

    ttft  from when a request was due to its first token
    itl   between tokens: every gap; for an event of k tokens, k times a k-th of its gap
    tpot  an answer's time from its first to its last token, over its tokens but the first
    e2e   from when a request was due to the end of its answer
    unit  "token", or "event" where a server does not say how many tokens an event has: `itl` is
          then between events
    """

    ttft: Sequence[float]
    itl: Sequence[float]
    tpot: Sequence[float]
    e2e: Sequence[float]
    unit: str

    @staticmethod
    def of(answers: Iterable[Answer]) -> Samples:
        good = [answer for answer in answers if not answer.error]
        by_token = all(answer.counts is not None for answer in good)
        itl: list[float] = []
        ttft = []
        tpot = []
        e2e = []
        for answer in good:
            counts = (answer.counts if by_token else None) or (1,) * len(answer.times)
            for (before, after), count in zip(pairwise(answer.times), counts[1:], strict=True):
                itl += [1e3 * (after - before) / count] * count
            ttft.append(1e3 * (answer.times[0] - answer.start))
            e2e.append(1e3 * (answer.end - answer.start))
            if answer.num_tokens > 1:
                seconds = answer.times[-1] - answer.times[0]
                tpot.append(1e3 * seconds / (answer.num_tokens - 1))
        return Samples(ttft, itl, tpot, e2e, "token" if by_token else "event")


def answers_of(runs: Iterable[Run]) -> list[Answer]:
    """Return the answers of all runs."""
    return list(chain.from_iterable(run.answers for run in runs))


def percentiles(samples: Sequence[float]) -> dict[str, float | None]:
    """Median, p90 and p99, linear between neighbours; None where there is no sample."""
    if not samples:
        return dict.fromkeys(PERCENTILES)
    values: list[float] = np.percentile(samples, list(PERCENTILES.values())).tolist()
    return dict(zip(PERCENTILES, values, strict=True))


def figures(runs: Sequence[Run]) -> JsonObject:
    """Return the row of one server under one load: times over the answers of all its rounds, rates
    as medians of rounds.
    """
    answers = answers_of(runs)
    good = [answer for answer in answers if not answer.error]
    bad = [answer for answer in answers if answer.error]
    samples = Samples.of(answers)
    cached = [answer.num_cached for answer in good if answer.num_cached is not None]
    seconds = [_seconds(run.answers) for run in runs]
    requests = []  # a second, in each round
    tokens = []
    for run, duration in zip(runs, seconds, strict=True):
        counts = [answer.num_tokens for answer in run.answers if not answer.error]
        requests.append(len(counts) / duration if duration else 0.0)
        tokens.append(sum(counts) / duration if duration else 0.0)
    return {
        "requests": len(answers),
        "errors": dict(Counter(answer.error for answer in bad)),
        "error_messages": {answer.error: answer.message for answer in reversed(bad)},
        "seconds": sum(seconds),
        "prompt_tokens": sum(answer.num_prompt for answer in good),
        "cached_tokens": sum(cached) if cached else None,
        "output_tokens": sum(answer.num_tokens for answer in good),
        "short_answers": sum(answer.num_tokens < answer.max_tokens for answer in good),
        "requests_per_second": statistics.median(requests),
        "output_tokens_per_second": statistics.median(tokens),
        "ttft_ms": percentiles(samples.ttft),
        "itl_ms": percentiles(samples.itl),
        "itl_unit": samples.unit,
        "tpot_ms": percentiles(samples.tpot),
        "e2e_ms": percentiles(samples.e2e),
        "late_ms": percentiles([1e3 * (answer.sent - answer.start) for answer in answers]),
    }


def _seconds(answers: Sequence[Answer]) -> float:
    """Return the seconds from when the first request was due to the end of the last."""
    if not answers:
        return 0.0
    return max(answer.end for answer in answers) - min(answer.start for answer in answers)


def ratios(runs: Sequence[Run]) -> list[JsonObject]:
    """Return the first server over each other one, at every load: median over rounds of the ratio
    within a round.
    """
    report: list[JsonObject] = []
    first, *peers = dict.fromkeys(run.url for run in runs)
    for level in dict.fromkeys(run.level for run in runs):
        rounds: dict[int, dict[str, _Compared]] = defaultdict(dict)
        for run in runs:
            if run.level == level:
                rounds[run.round][run.url] = _compared(run)
        for peer, (figure, more_is_better) in product(peers, COMPARED.items()):
            values = []
            for row in rounds.values():
                mine = row[first][figure]
                theirs = row[peer][figure]
                if mine and theirs:
                    values.append(mine / theirs)
            if not values:
                continue
            low, high, coverage = interval(values)
            report.append(
                {
                    "level": str(level),
                    "of": first,
                    "to": peer,
                    "figure": figure,
                    "ratio": statistics.median(values),
                    "low": low,
                    "high": high,
                    "coverage": coverage,
                    "rounds": len(values),
                    "more_is_better": more_is_better,
                }
            )
    return report


def _compared(run: Run) -> _Compared:
    """Return the figures of one round of which ratios are taken, by name."""
    row = figures([run])
    values = {"output_tokens_per_second": row["output_tokens_per_second"]}
    for name in TIMES:
        for part, value in row[name].items():
            values[f"{name}_{part}"] = value
    return values


def interval(values: Sequence[float], coverage: float = 0.95) -> tuple[float, float, float]:
    """Return an interval for the median of what `values` are drawn from: two of them, and the
    probability that it holds it.

    The k-th smallest and the k-th largest, with the largest k whose probability is at least
    `coverage`; the smallest and the largest of all where there is none, as with fewer than six
    values for 95 %.
    """
    assert values
    ordered = sorted(values)
    n = len(values)

    def covered(k: int) -> float:
        """That the median lies between the k-th smallest and the k-th largest, k from 1."""
        return max(0.0, 1.0 - 2.0 * sum(math.comb(n, i) for i in range(k)) / 2.0**n)

    k = max((k for k in range(2, n // 2 + 1) if covered(k) >= coverage), default=1)
    return ordered[k - 1], ordered[n - k], covered(k)
