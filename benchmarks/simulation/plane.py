"""The time of a step as a plane over what it computes, and its fit to `freight bench latency --json`.

A report of `latency` says how long a batch took until its first tokens, and how long a decode step
took. What was computed in that time follows from the batch: the same prompts go through Freight's
own Scheduler here, and the work of its steps is summed up. So every report gives two equations in
the plane's coefficients. The fit minimizes relative errors, and no coefficient is negative.
Imports no torch.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from freight.cache.groups import Pages
from freight.cache.manager import CacheManager
from freight.engine.request import Request
from freight.engine.scheduler import Scheduler
from freight.engine.step import Step
from freight.errors import ConfigError
from freight.sampling import SamplingParams

BLOCK_SIZE = 16  # tokens, as the engine's default
MOST_SEQS = 64  # that run at once, as the engine's default
NO_LIMIT = 2**40  # tokens of a request
ROUNDS = 15  # of weighing anew; relative: smaller ones count as this
LEAST_ERROR = 1e-6
SAME = 1e-9  # a column that is left of another's direction by less of its length says nothing new


class Work(NamedTuple):
    """What a step computes; and, in `Plane.seconds`, the seconds of one unit of each.

    steps           1: launches, and the weights that every step reads
    prefill_steps   1 in a step with a chunk of more than one token: it is no captured step
    prefill_tokens  of chunks of more than one token
    sequences       chunks, of prompts and of decodes
    cached_bytes    keys and values that attention reads, once for each chunk
    prefill_pairs   of a query and a key, in the attention of chunks of more than one token
    """

    steps: float = 0.0
    prefill_steps: float = 0.0
    prefill_tokens: float = 0.0
    sequences: float = 0.0
    cached_bytes: float = 0.0
    prefill_pairs: float = 0.0

    def plus(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, other: Work) -> Work:
        """Each by each: seconds by term, where one of the two has the seconds of a unit."""
        return Work(*(a * b for a, b in zip(self, other, strict=True)))

    def over(self, number: float) -> Work:
        return Work(*(value / number for value in self))


def work_of(step: Step, bytes_per_token: float) -> Work:
    tokens = pairs = read = 0
    for chunk in step.chunks:
        start = chunk.start
        count = chunk.num_tokens
        read += start + count
        if count > 1:
            tokens += count
            pairs += count * start + count * (count + 1) // 2
    return Work(1, float(tokens > 0), tokens, len(step.chunks), read * bytes_per_token, pairs)


@dataclass(frozen=True)
class Plane:
    """Seconds of a step, and the engine that has such steps.

    source        where the coefficients come from, in a sentence that is printed with every result
    cache_tokens  what the KV cache holds
    max_step_seconds  as `--max-step-seconds`; 0: steps of any length
    error         of the fit, relative: the median and the largest; None: not fitted
    """

    name: str
    source: str
    seconds: Work
    bytes_per_token: float
    cache_tokens: int
    max_num_batched_tokens: int
    max_num_seqs: int = MOST_SEQS
    max_step_seconds: float = 0.0
    error: tuple[float, float] | None = None

    def by_term(self, work: Work) -> Work:
        """The seconds of each term."""
        return self.seconds.times(work)

    def time(self, work: Work) -> float:
        return sum(self.by_term(work))

    def slower(self, factor: float) -> Plane:
        return replace(self, seconds=Work(*(factor * value for value in self.seconds)))

    def scheduler(self) -> tuple[CacheManager, Scheduler]:
        """A cache and a scheduler of this engine, empty. Only the cache limits a request, and one
        that does not fit is an error: `max_model_len` would cut answers.
        """
        return new_scheduler(
            self.cache_tokens, self.max_num_seqs, self.max_num_batched_tokens, NO_LIMIT
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "source": self.source,
            "seconds": self.seconds._asdict(),
            "bytes_per_token": self.bytes_per_token,
            "cache_tokens": self.cache_tokens,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "max_step_seconds": self.max_step_seconds,
            "error": self.error,
        }

    @staticmethod
    def read(path: Path) -> Plane:
        """Raises ConfigError for a file that has no plane."""
        result = _read_json(path)
        try:
            fields = {**result, "seconds": Work(**result["seconds"])}
            fields["error"] = tuple(result["error"]) if result.get("error") else None
            return Plane(**fields)
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"--plane {path} has no plane ({error}): make one with "
                "`python benchmarks/simulate.py fit --output FILE`"
            ) from None


def new_scheduler(
    cache_tokens: int, max_num_seqs: int, step_tokens: int, max_model_len: int
) -> tuple[CacheManager, Scheduler]:
    """Freight's own, over one group of pages that keeps every token."""
    pages = Pages(layers=(0,), bytes_per_token=1, window=None, tokens_per_block=BLOCK_SIZE)
    cache = CacheManager([pages], [cache_tokens // BLOCK_SIZE], BLOCK_SIZE, step_tokens)
    return cache, Scheduler(cache, max_num_seqs, step_tokens, max_model_len)


def new_request(name: str, prompt: tuple[int, ...], num_output: int) -> Request:
    params = SamplingParams(
        temperature=0.0, max_tokens=num_output, ignore_eos=True, detokenize=False
    )
    return Request(name, name, 0, prompt, params, seed=0, stop_token_ids=frozenset())


def sampled(step: Step) -> dict[str, tuple[int]]:
    """A token for each request that gets one: which, no figure depends on."""
    return {chunk.request.request_id: (0,) for chunk in step.chunks if chunk.samples}


# ------------------------------------------------------------------------------------------------
# reports of `freight bench latency --json`


@dataclass(frozen=True)
class Observation:
    """Some steps of which the work and the time together are known."""

    label: str
    work: Work
    seconds: float


def observations(report: Mapping[str, Any]) -> list[Observation]:
    """What one report says: the steps until all have their first token, and a step of decoding.

    Raises ConfigError for a report of something else, or of a model whose layers do not all keep
    every token.
    """
    try:
        batch, before, after = (
            int(report[name]) for name in ("batch_size", "input_len", "output_len")
        )
        per_token = float(report["kv_cache"]["bytes_per_token"])
        first = batch * before / float(report["prefill_tokens_per_second"])
        decode = float(report["decode_step_ms"]) / 1e3
        budget = int(report["max_num_batched_tokens"])
        read = float(report["decode_bytes_per_step"]["kv_cache"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"a report lacks {error}: give the output of `freight bench latency --json`"
        ) from None
    if abs(read - batch * per_token * (before + after / 2)) > 1:
        raise ConfigError(
            f"{report.get('model')}: not every layer keeps every token (a window or a state), "
            "which the plane does not describe: take a model with full attention"
        )
    prefill, decoding = batch_work(batch, before, after, budget, per_token)
    shape = f"{batch} x {before}+{after}"
    return [
        Observation(f"{shape}, until first tokens", prefill, first),
        Observation(f"{shape}, a decode step", decoding, decode),
    ]


def batch_work(
    batch: int, num_prompt: int, num_output: int, budget: int, bytes_per_token: float
) -> tuple[Work, Work]:
    """(the work of all steps until every sequence has a token, the mean of the later full ones)."""
    length = num_prompt + num_output
    room = batch * (length + (batch + 1) * BLOCK_SIZE)  # nobody waits for blocks
    _, scheduler = new_scheduler(room, batch, budget, length)
    for index in range(batch):
        scheduler.add(new_request(str(index), (index,) * num_prompt, num_output))
    prefill = Work()
    full = list[Work]()
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        work = work_of(step, bytes_per_token)
        tokens = sampled(step)
        scheduler.apply(step, tokens)
        if not full:
            prefill = prefill.plus(work)
        if len(tokens) == batch:
            full.append(work)
    if len(full) < 2:
        raise ConfigError(
            f"{batch} x {num_prompt}+{num_output} has no step in which all decode: raise --output-len"
        )
    total = Work()
    for work in full[1:]:
        total = total.plus(work)
    return prefill, total.over(len(full) - 1)


def fit(seen: Sequence[Observation]) -> tuple[Work, list[float]]:
    """The coefficients with the least sum of relative errors, and those errors, signed.

    Not of squares: where other work disturbed a measurement it is far off, and the others decide.
    Of all choices of terms that make every coefficient positive the best is taken: that is the
    least over coefficients that are not negative. Raises ConfigError where no term can be told from
    another.
    """
    columns = [[work / item.seconds for work, item in _column(seen, term)] for term in Work._fields]
    best: tuple[float, list[float]] | None = None
    for used in _subsets(len(columns)):
        if len(used) >= len(seen):
            continue
        result = _least_errors([columns[index] for index in used])
        if result is None or min(result) < 0:
            continue
        values = [0.0] * len(columns)
        for index, value in zip(used, result, strict=True):
            values[index] = value
        total = sum(map(abs, _errors(columns, values)))
        if best is None or total < (1 - SAME) * best[0]:
            best = total, values
    if best is None:
        raise ConfigError(
            f"{len(seen) // 2} reports do not determine a plane: give several, of two batch sizes "
            "and two lengths of prompt at least"
        )
    return Work(*best[1]), _errors(columns, best[1])


def _column(seen: Sequence[Observation], term: str) -> Iterator[tuple[float, Observation]]:
    for item in seen:
        yield getattr(item.work, term), item


def _subsets(count: int) -> Iterator[tuple[int, ...]]:
    """Smaller ones first, so that of equal fits that with the fewest terms is taken."""
    for size in range(1, count + 1):
        yield from itertools.combinations(range(count), size)


def _errors(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    rows = zip(*columns, strict=True)
    return [sum(a * b for a, b in zip(row, values, strict=True)) - 1.0 for row in rows]


def _least_errors(columns: Sequence[Sequence[float]]) -> list[float] | None:
    """The weights of `columns` whose sum has the least sum of distances from ones, by least squares
    that are weighted anew each time; None where they are not independent.
    """
    weights = [1.0] * len(columns[0])
    result = None
    for _ in range(ROUNDS):
        weighted = [[w * a for w, a in zip(weights, item, strict=True)] for item in columns]
        result = _least_squares(weighted, weights)
        if result is None:
            return None
        weights = [max(abs(error), LEAST_ERROR) ** -0.5 for error in _errors(columns, result)]
    return result


def _least_squares(
    columns: Sequence[Sequence[float]], wanted: Sequence[float]
) -> list[float] | None:
    """The weights of `columns` whose sum is nearest to `wanted`; None where they are not
    independent.

    By orthogonal columns (modified Gram-Schmidt): the coefficients differ by 1e15.
    """
    size = len(columns)
    upper = [[0.0] * size for _ in range(size)]
    left = [list(column) for column in columns]
    right = list(wanted)
    target = [0.0] * size
    for i in range(size):
        length = math.hypot(*left[i])
        if length <= SAME * math.hypot(*columns[i]):
            return None
        unit = [value / length for value in left[i]]
        upper[i][i] = length
        for j in range(i + 1, size):
            upper[i][j] = _dot(unit, left[j])
            left[j] = [a - upper[i][j] * b for a, b in zip(left[j], unit, strict=True)]
        target[i] = _dot(unit, right)
        right = [a - target[i] * b for a, b in zip(right, unit, strict=True)]
    results = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(upper[i][j] * results[j] for j in range(i + 1, size))
        results[i] = (target[i] - rest) / upper[i][i]
    return results


def _dot(left: Iterable[float], right: Iterable[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def plane_of(
    reports: Sequence[Mapping[str, Any]], cache_tokens: int | None = None
) -> tuple[Plane, list[Observation], list[float]]:
    """The plane of one engine's reports, the observations, and the fit's errors.

    cache_tokens  what the cache will hold; None: as many as the first report says would fit
    """
    if not reports:
        raise ConfigError("there is no report: give files, or options of `freight bench latency`")
    first = reports[0]
    seen = [item for report in reports for item in observations(report)]
    names = [_name(report) for report in reports]
    if len(set(names)) > 1:
        raise ConfigError(f"the reports are of different engines: {'; '.join(sorted(set(names)))}")
    seconds, errors = fit(seen)
    sizes = [abs(error) for error in errors]
    plane = Plane(
        name=names[0],
        source=f"fitted to {len(reports)} reports of `freight bench latency` on {first['kernels']}, "
        f"{first['threads']} threads",
        seconds=seconds,
        bytes_per_token=float(first["kv_cache"]["bytes_per_token"]),
        cache_tokens=cache_tokens or int(first["tokens_that_fit"]),
        max_num_batched_tokens=int(first["max_num_batched_tokens"]),
        error=(statistics.median(sizes), max(sizes)),
    )
    return plane, seen, errors


def _name(report: Mapping[str, Any]) -> str:
    kv = report["kv_cache"]
    scales = f", {kv['granularity']}" if kv.get("granularity") else ""
    return f"{report['model']}, weights {report['weight_dtype']}, cache {kv['dtype']}{scales}"


def read_reports(path: Path) -> list[Mapping[str, Any]]:
    """One report, a list of them, or one a line."""
    text = _read_text(path)
    try:
        result = json.loads(text)
        return result if isinstance(result, list) else [result]
    except ValueError:
        pass
    try:
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError:
        raise ConfigError(
            f"{path} is not JSON: give the output of `freight bench latency --json`"
        ) from None


def _read_json(path: Path) -> Any:
    text = _read_text(path)
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(f"{path} is not JSON") from None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
