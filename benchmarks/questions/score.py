"""Answers scored, and every cache compared with 16 bits on the questions that both answered.

What is written holds verdicts and counts alone, never a question or an answer.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freight.errors import ConfigError
from questions import gsm8k, human_eval, isolate
from questions.answer import CONTROL, REFERENCE
from questions.answers import Answer, read_answers
from questions.paired import LEVEL, MARGIN, Pairs, count_pairs, mcnemar_p, verdict, wilson_interval
from questions.sources import CodeProblem, MathProblem

MATH = "gsm8k"
CODE = "humaneval"
POOLED = "both"
REFERENCE_NAME = "16 bits"


@dataclass
class Programs:
    """Runs programs, each of them once: answers under several caches are often the same."""

    allow_network: bool = False
    network: isolate.Network = "isolated"
    outcomes: dict[str, isolate.Outcome] = field(default_factory=dict)

    def run(self, program: str) -> isolate.Outcome:
        if program not in self.outcomes:
            outcome = isolate.run(program, allow_network=self.allow_network)
            if outcome.network == "not isolated":
                self.network = outcome.network
            self.outcomes[program] = outcome
        return self.outcomes[program]


@dataclass(frozen=True)
class Results:
    """Of one task and cache. Both lists have an entry for each question, None where it has no answer."""

    right: Sequence[bool | None]
    answers: Sequence[Answer | None]

    @property
    def num_answered(self) -> int:
        return sum(value is not None for value in self.right)

    def as_object(self) -> dict[str, Any]:
        answers = [item for item in self.answers if item is not None]
        return {
            "verdicts": "".join("." if value is None else str(int(value)) for value in self.right),
            "answered": self.num_answered,
            "right": sum(value is True for value in self.right),
            "ended_by_length": sum(item.finish_reason == "length" for item in answers),
            "generated_tokens": sum(item.num_tokens for item in answers),
            "fingerprints": sorted({item.fingerprint for item in answers if item.fingerprint}),
        }


@dataclass(frozen=True)
class Comparison:
    """A cache beside 16 bits. differing: answers whose texts differ. first_difference: the median of the
    characters before the first that differs, of those; None: there are none.
    """

    pairs: Pairs
    differing: int
    first_difference: float | None

    def as_object(self, cache: str) -> dict[str, Any]:
        pairs = self.pairs
        counts = {
            "questions": pairs.num_questions,
            "both": pairs.both,
            "only_reference": pairs.only_a,
            "only_cache": pairs.only_b,
            "neither": pairs.neither,
            "differing_answers": self.differing,
            "median_equal_characters": self.first_difference,
            "verdict": verdict(pairs, cache, REFERENCE_NAME),
        }
        if not pairs.num_questions:
            return counts
        decisive = pairs.interval(LEVEL)
        wide = pairs.interval(0.95)
        return counts | {
            "difference": pairs.difference,
            "interval_90": [decisive.low, decisive.high],
            "interval_95": [wide.low, wide.high],
            "mcnemar_p": mcnemar_p(pairs.only_a, pairs.only_b),
        }


def find_answers(folder: Path, caches: Sequence[str]) -> dict[str, dict[str, Answer]]:
    """cache -> custom_id -> answer, of all files FILE.CACHE.jsonl. Raises ConfigError if there is none
    under 16 bits, for answers of several models, and for a question that two files answer.
    """
    answers: dict[str, dict[str, Answer]] = {}
    for cache in caches:
        merged: dict[str, Answer] = {}
        for path in sorted(folder.glob(f"*.{cache}.jsonl")):
            more = read_answers(path)
            twice = sorted(merged.keys() & more.keys())
            if twice:
                raise ConfigError(
                    f"{path} answers {twice[0]}, as another file under {cache} does: move one of them away"
                )
            merged |= more
        if merged:
            answers[cache] = merged
    if REFERENCE not in answers:
        raise ConfigError(
            f"{folder} has no answers under 16 bits (FILE.{REFERENCE}.jsonl): answer with the cache "
            f"{REFERENCE} first"
        )
    models = {item.model for merged in answers.values() for item in merged.values() if item.model}
    if len(models) > 1:
        raise ConfigError(
            f"{folder} has answers of several models ({', '.join(sorted(models))}): give each model a folder of its own"
        )
    return answers


def score_math(problems: Sequence[MathProblem], answers: Mapping[str, Answer]) -> Results:
    ordered = [answers.get(problem.id) for problem in problems]
    right = [
        None if answer is None else gsm8k.is_right(answer.text, problem.reference)
        for problem, answer in zip(problems, ordered, strict=True)
    ]
    return Results(right, ordered)


def score_code(
    problems: Sequence[CodeProblem], answers: Mapping[str, Answer], programs: Programs
) -> Results:
    ordered = [answers.get(problem.id) for problem in problems]
    right = [
        None if answer is None else programs.run(human_eval.program(problem, answer.text)).passed
        for problem, answer in zip(problems, ordered, strict=True)
    ]
    return Results(right, ordered)


def pooled(results: Sequence[Results]) -> Results:
    """All questions of several tasks, each counted as much as any other."""
    right = [value for item in results for value in item.right]
    answers = [value for item in results for value in item.answers]
    return Results(right, answers)


def compare(reference: Results, other: Results) -> Comparison:
    a = list[bool]()
    b = list[bool]()
    places = []
    rows = zip(reference.right, other.right, reference.answers, other.answers, strict=True)
    for right_a, right_b, answer_a, answer_b in rows:
        if right_a is None or right_b is None:
            continue
        assert answer_a is not None
        assert answer_b is not None
        a.append(right_a)
        b.append(right_b)
        if answer_a.text != answer_b.text:
            places.append(equal_characters(answer_a.text, answer_b.text))
    median = statistics.median(places) if places else None
    return Comparison(count_pairs(a, b), len(places), median)


def equal_characters(a: str, b: str) -> int:
    """Before the first that differs; the length of the shorter text if it begins the other."""
    for place, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return place
    return min(len(a), len(b))


def table(results: Mapping[str, Mapping[str, Results]]) -> list[tuple[str, ...]]:
    """Rows of text, the heading first. results: task -> cache -> Results"""
    rows: list[tuple[str, ...]] = [(
        "questions", "cache", "n", "right, % (95 %)", "difference (90 %)", "only 16 bits right",
        "only this right", "McNemar's p", "texts that differ", "equal before, characters", "cut",
    )]  # fmt: skip
    for task, caches in results.items():
        for cache, item in caches.items():
            if item.num_answered:
                rows.append((task, _label(cache), *_cells(item, caches.get(REFERENCE), cache)))
    return rows


def _label(cache: str) -> str:
    return f"{cache} (control)" if cache == CONTROL else cache


def _cells(item: Results, reference: Results | None, cache: str) -> tuple[str, ...]:
    cut = str(item.as_object()["ended_by_length"])
    if reference is None or cache == REFERENCE:
        count = item.num_answered
        right = _share(sum(value is True for value in item.right), count)
        return (f"{count:,}", right, *["-"] * 6, cut)
    comparison = compare(reference, item)
    pairs = comparison.pairs
    count = pairs.num_questions
    if not count:
        return ("0", *["-"] * 7, cut)
    interval = pairs.interval(LEVEL)
    place = comparison.first_difference
    return (
        f"{count:,}",
        _share(pairs.both + pairs.only_b, count),
        f"{100 * pairs.difference:+.1f} ({100 * interval.low:+.1f} to {100 * interval.high:+.1f})",
        str(pairs.only_a),
        str(pairs.only_b),
        f"{mcnemar_p(pairs.only_a, pairs.only_b):.2f}",
        f"{comparison.differing:,}",
        "-" if place is None else f"{place:.0f}",
        cut,
    )


def _share(right: int, count: int) -> str:
    interval = wilson_interval(right, count, 0.95)
    return f"{100 * right / count:.1f} ({100 * interval.low:.1f}-{100 * interval.high:.1f})"


def sentences(results: Mapping[str, Mapping[str, Results]]) -> list[str]:
    """The verdict of each task and cache that has questions in common with 16 bits."""
    lines = []
    for task, caches in results.items():
        for cache, item in caches.items():
            if cache == REFERENCE or REFERENCE not in caches:
                continue
            pairs = compare(caches[REFERENCE], item).pairs
            if pairs.num_questions:
                lines.append(f"{task}: {verdict(pairs, _label(cache), REFERENCE_NAME)}")
    return lines


def as_object(
    results: Mapping[str, Mapping[str, Results]], network: isolate.Network
) -> dict[str, Any]:
    """For JSON: verdicts of every question as 0, 1 and '.' (no answer), and the comparisons."""
    tasks = {
        task: {cache: item.as_object() for cache, item in caches.items()}
        for task, caches in results.items()
        if task != POOLED
    }
    comparisons = {
        task: {
            cache: compare(caches[REFERENCE], item).as_object(cache)
            for cache, item in caches.items()
            if cache != REFERENCE
        }
        for task, caches in results.items()
    }
    return {
        "reference": REFERENCE,
        "control": CONTROL,
        "margin": MARGIN,
        "network": network,
        "tasks": tasks,
        "comparisons": comparisons,
    }
