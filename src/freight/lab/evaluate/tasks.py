"""Tasks of lm-eval under two caches: the 16-bit one and the one asked for, with the difference and
its standard error.

Both runs see the same documents, so the difference is taken by document, where most of the spread
between documents cancels. Over n documents, with d = (the document's value under the cache asked
for) - (its value under 16 bits):

    paired     a metric that is the mean over documents, such as `acc`: sqrt(Σ (d - mean d)² / (n -
               1)) / sqrt(n)
    bootstrap  any other, such as `word_perplexity`: documents are drawn n at a time, with
               replacement, the same for both runs, and the metric's aggregation is taken of
               both; the standard deviation of the differences

The caches are run one after the other, so that the weights are in memory once.
"""

from __future__ import annotations

import logging
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from freight.errors import ConfigError, RequestError
from freight.lab.evaluate.report import plain_args
from freight.llm import LLM
from freight.model.open import open_model
from freight.settings.engine import EngineArgs

RESAMPLES = 500  # the standard error of a bootstrap of 500 is right to 3 %

Aggregate = Callable[[list[Any]], float]  # values by document -> the metric
Aggregations = Mapping[str, Mapping[str, Aggregate]]  # by task and metric
Results = Mapping[str, Any]  # what `lm_eval.simple_evaluate` returns


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task. `reference` is under the 16-bit cache, `value` under the one asked
    for.

    The three standard errors are those of `reference`, `value` and `difference`, None where there
    are fewer than two documents or no values by document (groups of tasks). `method` is "paired" or
    "bootstrap", or None with them. `num_changed` documents have another value.
    """

    task: str
    metric: str
    filter_name: str
    num_documents: int | None
    reference: float
    value: float
    difference: float
    reference_stderr: float | None = None
    value_stderr: float | None = None
    difference_stderr: float | None = None
    method: str | None = None
    num_changed: int | None = None


@dataclass(frozen=True)
class TaskComparison:
    """`caches` are the facts of the two caches, the 16-bit one first, by the names of
    `LLM.kv_cache_info`.
    """

    caches: Sequence[Mapping[str, Any]]
    tasks: list[TaskScore]


def compare_tasks(
    args: EngineArgs,
    cache: tuple[str, str],
    tasks: Sequence[str],
    include_path: str | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
) -> TaskComparison:
    """Run `tasks` under a cache in the compute dtype and under `cache`, which is (kv_cache_dtype,
    kv_scales).

    tasks: names or patterns of lm-eval, or of task files in the folder `include_path`. limit:
    documents of each task. Raises ConfigError
    without lm-eval, for a task that is not known or cannot be loaded or asks for what Freight does
    not compute, and for a cache that is the 16-bit one, before any weight is read.
    """
    harness, model, check = _harness()
    manager, names = _find(harness.tasks.TaskManager, tasks, include_path)
    aggregations = _aggregations(manager, names, check)
    asked = replace(args.with_cache(cache[0]), kv_scales=cache[1])
    opened = open_model(asked)
    plain = plain_args(opened)
    if opened.resolve(asked).kv.stores == opened.resolve(plain).kv.stores:
        raise ConfigError(
            f"--tasks compares a cache with {plain.kv_cache_dtype}: ask for another --kv-cache-dtype"
        )
    caches = []
    results = []
    for setting in (plain, asked):
        llm = LLM(**vars(setting))
        caches.append(llm.kv_cache_info())
        run = harness.simple_evaluate(
            model=model(args.model, llm=llm),
            tasks=names,
            task_manager=manager,
            limit=limit,
            num_fewshot=num_fewshot,
            bootstrap_iters=0,
            log_samples=True,
        )
        results.append(run)
        del llm
    return TaskComparison(caches, compare_results(results[0], results[1], aggregations))


def _harness() -> tuple[Any, Any, Any]:
    """Return lm-eval, the adapter's model and its check. Raises ConfigError without lm-eval."""
    from freight.adapters.lm_eval import FreightLM, check_generation_kwargs

    for name in ("lm_eval", "lm_eval.evaluator", "lm_eval.tasks"):
        logging.getLogger(name).setLevel(logging.WARNING)
    import lm_eval.tasks  # after the adapter, which says what to install

    return lm_eval, FreightLM, check_generation_kwargs


def _find(
    manager_of: Callable[..., Any], tasks: Sequence[str], include_path: str | None
) -> tuple[Any, list[str]]:
    """Return a task manager that knows `tasks`, and their names."""
    if include_path is not None:
        if not Path(include_path).is_dir():
            raise ConfigError(
                f"--include-path {include_path} is not a folder; give one that has task files (.yaml)"
            )
        # without lm-eval's task files, which take seconds to read
        manager = manager_of(include_path=include_path, include_defaults=False)
        if all(manager.match_tasks([pattern]) for pattern in tasks):
            return manager, _names(manager, tasks)
    manager = manager_of(include_path=include_path)
    return manager, _names(manager, tasks)


def _names(manager: Any, tasks: Sequence[str]) -> list[str]:
    names: list[str] = []
    for pattern in tasks:
        matches = manager.match_tasks([pattern])
        if not matches:
            raise ConfigError(
                f"--tasks {pattern}: lm-eval knows no such task; `lm_eval ls tasks` lists them, and --include-path DIR "
                "adds the task files of a folder"
            )
        names += [name for name in matches if name not in names]
    return names


def _aggregations(
    manager: Any, names: list[str], check: Callable[[Mapping[str, Any]], None]
) -> Aggregations:
    """Load every task, which reads or fetches its documents."""
    try:
        loaded = manager.load(names)["tasks"]
    except Exception as error:  # task files and data sets are programs, and raise what they like
        reason = " ".join(str(error).split()) or repr(error)
        raise ConfigError(f"lm-eval cannot load {', '.join(names)}: {reason}") from error
    for name, task in loaded.items():
        try:
            check(task.config.generation_kwargs or {})
        except RequestError as error:
            raise ConfigError(f"--tasks {name}: {error}") from None
    return {name: task.aggregation() for name, task in loaded.items()}


def compare_results(
    reference: Results,
    other: Results,
    aggregations: Aggregations,
) -> list[TaskScore]:
    """Return a score for every metric of every task and group that both have."""
    scores = []
    for task, metrics in reference["results"].items():
        for key, value in metrics.items():
            metric, _, filter_name = key.partition(",")
            if not filter_name or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            after = other["results"][task][key]
            score = TaskScore(
                task=task,
                metric=metric,
                filter_name=filter_name,
                num_documents=None,
                reference=value,
                value=after,
                difference=after - value,
            )
            pairs = _pairs(reference, other, task, metric, filter_name)
            aggregate = aggregations.get(task, {}).get(metric)
            if pairs and aggregate:
                score = _with_errors(score, pairs, aggregate)
            scores.append(score)
    return scores


def _pairs(
    reference: Results, other: Results, task: str, metric: str, filter_name: str
) -> list[tuple[Any, Any]]:
    """Return the metric's values by document, under both caches."""
    columns = []
    for results in (reference, other):
        column = {}
        for sample in results.get("samples", {}).get(task, []):
            if sample["filter"] == filter_name and metric in sample:
                column[sample["doc_id"]] = sample[metric]
        columns.append(column)
    before, after = columns
    assert before.keys() == after.keys()  # the same task, limit and seed
    return [(before[document], after[document]) for document in sorted(before)]


def _with_errors(
    score: TaskScore, pairs: Sequence[tuple[Any, Any]], aggregate: Aggregate
) -> TaskScore:
    # of NumPy's numbers, too, which JSON does not take
    changed = sum(bool(before != after) for before, after in pairs)
    score = replace(score, num_documents=len(pairs), num_changed=changed)
    if len(pairs) < 2:
        return score
    before, after = zip(*pairs, strict=True)
    method = "bootstrap"
    if _is_mean(before, score.reference) and _is_mean(after, score.value):
        method = "paired"
        differences = [new - old for old, new in pairs]
        errors = list(map(mean_stderr, (before, after, differences)))
    else:
        errors = bootstrap_stderr(pairs, aggregate)
    return replace(
        score,
        reference_stderr=errors[0],
        value_stderr=errors[1],
        difference_stderr=errors[2],
        method=method,
    )


def _is_mean(column: Sequence[Any], value: float) -> bool:
    numbers = all(isinstance(item, int | float) for item in column)
    return numbers and math.isclose(statistics.fmean(column), value, rel_tol=1e-9, abs_tol=1e-12)


def mean_stderr(values: Sequence[float]) -> float:
    """Standard error of a mean: the sample's standard deviation over the root of the count."""
    return statistics.stdev(map(float, values)) / math.sqrt(len(values))


def bootstrap_stderr(
    pairs: Sequence[tuple[Any, Any]], aggregate: Aggregate, seed: int = 0
) -> list[float]:
    """Standard errors of `aggregate` of the first of each pair, of the second, and of their
    difference.
    """
    draw = random.Random(seed)
    drawn = []
    for _ in range(RESAMPLES):
        sample = draw.choices(pairs, k=len(pairs))
        before = float(aggregate([pair[0] for pair in sample]))
        after = float(aggregate([pair[1] for pair in sample]))
        drawn.append((before, after, after - before))
    return [statistics.stdev(column) for column in zip(*drawn, strict=True)]


def as_rows(scores: Sequence[TaskScore], names: tuple[str, str]) -> list[Sequence[str]]:
    """Return rows for a table; the first has the headings. `names` are the caches'."""
    rows: list[Sequence[str]] = [("task", "metric", "documents", *names, "difference", "changed")]
    for score in scores:
        metric = score.metric
        if score.filter_name != "none":
            metric += f" ({score.filter_name})"
        rows.append(
            (
                score.task,
                metric,
                _count(score.num_documents),
                _value(score.reference, score.reference_stderr),
                _value(score.value, score.value_stderr),
                _value(score.difference, score.difference_stderr, sign="+"),
                _count(score.num_changed),
            )
        )
    return rows


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _value(value: float, error: float | None, sign: str = "") -> str:
    text = f"{value:{sign}.4f}"
    return text if error is None else f"{text} ± {error:.4f}"
