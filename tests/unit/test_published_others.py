"""Results of other kinds: what commands printed, published, read again, and the sections made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import publish
import published
import pytest
from published import Ladder, Machine, Model, Oracle, Retrieval, Tasks
from published_others import other_sections

COMMON: dict[str, Any] = {
    "model": Model("tiny", "Tiny 1M", "tiny 1.0", "MIT", "ab" * 32),
    "machine": Machine("A Processor (R)", "cpu-avx512", "1.0", "2.0", "3.11.7"),
    "date": "2026-11-29",
}


def compared(only_reference: int, only_cache: int, both: int) -> dict[str, Any]:
    return {
        "questions": 4,
        "both": both,
        "only_reference": only_reference,
        "only_cache": only_cache,
        "neither": 4 - both - only_reference - only_cache,
        "difference": (only_cache - only_reference) / 4,
        "interval_90": [-0.4, 0.3],
        "interval_95": [-0.5, 0.4],
        "mcnemar_p": 1.0,
        "differing_answers": 2,
        "verdict": "whether fp8 is within 2 points of 16 bits cannot be said yet",
    }


def answers(verdicts: str) -> dict[str, Any]:
    return {
        "verdicts": verdicts,
        "answered": len(verdicts) - verdicts.count("."),
        "ended_by_length": 1,
        "generated_tokens": 70,
    }


def scores() -> dict[str, Any]:
    return {
        "reference": "bf16",
        "control": "f32",
        "margin": 0.02,
        "tasks": {
            "gsm8k": {"bf16": answers("1101."), "fp8": answers("1011.")},
            "humaneval": {"bf16": answers("11"), "fp8": answers("..")},
        },
        "comparisons": {
            "gsm8k": {"fp8": compared(1, 1, 2)},
            "humaneval": {"fp8": {"questions": 0}},
            "both": {"fp8": compared(1, 1, 2)},
        },
    }


def ladder() -> dict[str, Any]:
    step = {
        "cache": "int4",
        "kl": 0.1,
        "kl_interval": [0.05, 0.15],
        "change": -0.02,
        "change_interval": None,
        "same_top": 0.9,
        "by_question": [-2.0, -1.0, 0.0],
    }
    return {"num_tokens": 300, "steps": [step]}


def oracle() -> dict[str, Any]:
    return {
        "num_tokens": 4096,
        "window": 341,
        "oracle": {"token": {"kl": 0.004, "perplexity": 20.0}},
        "freight": {"token": {"kl": 0.0041, "perplexity": 20.01}},
    }


def long(dtype: str, found: float) -> dict[str, Any]:
    def estimate(mean: float) -> dict[str, Any]:
        return {"mean": mean, "interval": [mean - 0.1, mean + 0.1], "num_units": 12}

    depth = {
        "depth": 1024,
        "num_questions": 48,
        "found": estimate(found),
        "gain": estimate(5.0),
        "found_change": estimate(0.0),
        "gain_change": estimate(-0.01),
    }
    quantized = dtype != "bfloat16"
    run = {
        "kv_cache_dtype": dtype,
        "granularity": "token" if quantized else None,
        "scale_source": "dynamic" if quantized else None,
        "depths": [depth],
    }
    return {"contexts": 12, "runs": [long_reference(depth), run] if quantized else [run]}


def long_reference(depth: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_cache_dtype": "bfloat16",
        "granularity": None,
        "scale_source": None,
        "depths": [depth],
    }


def test_every_kind_is_published_and_read_as_it_was(tmp_path: Path) -> None:
    results = [
        publish.tasks_of(scores(), COMMON, "score"),
        publish.ladder_of(ladder(), COMMON, "judge", "GSM8K"),
        publish.oracle_of(oracle(), COMMON, ["evaluate", "oracle"], "prose"),
        publish.retrieval_of([long("fp8_e4m3fn", 0.75), long("int8", 0.5)], COMMON, ["long"], 8192),
    ]
    paths = [published.write(result, tmp_path) for result in results]
    assert len(set(paths)) == 4
    for kind, result in zip((Tasks, Ladder, Oracle, Retrieval), results, strict=True):
        assert published.read_all(kind, tmp_path) == [result]


def test_the_figures_of_tasks_are_counted_from_the_comparison() -> None:
    result = publish.tasks_of(scores(), COMMON, "score")
    assert [task.name for task in result.tasks] == ["gsm8k", "humaneval", "both"]
    math, code, both = result.tasks
    (score,) = math.scores
    assert (score.right, score.reference_right, score.num_questions) == (3, 3, 4)
    assert (math.total, math.answered) == (5, 4)
    assert code.scores == ()  # nothing that both answered
    assert both.total == 7
    assert both.scores[0].right_by_question == "1011..."


def test_the_reference_of_retrieval_is_listed_once() -> None:
    files = [long("fp8_e4m3fn", 0.75), long("int8", 0.5)]
    result = publish.retrieval_of(files, COMMON, ["long"], 8192)
    assert [cache.cache for cache in result.caches] == [
        "bfloat16",
        "fp8_e4m3fn, token, dynamic",
        "int8, token, dynamic",
    ]


def test_the_sections_have_the_figures(tmp_path: Path) -> None:
    published.write(publish.tasks_of(scores(), COMMON, "score"), tmp_path)
    published.write(publish.ladder_of(ladder(), COMMON, "judge", "GSM8K"), tmp_path)
    published.write(publish.oracle_of(oracle(), COMMON, ["evaluate"], "prose"), tmp_path)
    files = [long("fp8_e4m3fn", 0.75)]
    published.write(publish.retrieval_of(files, COMMON, ["long"], 8192), tmp_path)
    tasks, steps, retrieval, apart = other_sections(tmp_path)
    assert "+0.0 (-40.0 to +30.0)" in tasks
    assert "- GSM8K: whether fp8 is within 2 points of 16 bits cannot be said yet." in tasks
    assert "0.10000 ± 0.05000" in steps
    assert "-1.000" in steps  # of a solution: the mean of three
    assert "75.0% (-0.0100 ± 0.1000)" in retrieval
    assert "+2.5%" in apart


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(SystemExit, match="llama is unknown: choose among smollm2"):
        publish.main(["ladder", "llama", "ladder.json"])
