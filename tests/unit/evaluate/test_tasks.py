"""The comparison of lm-eval's tasks: which standard error a difference gets, against its
definition.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.lab.evaluate.tasks import TaskScore, as_rows, bootstrap_stderr, compare_results

METRIC = "acc"
numbers = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=40)


def results(values: Sequence[Any], total: float) -> dict[str, Any]:
    """As lm-eval gives them, for one task."""
    samples = [{"doc_id": i, "filter": "none", METRIC: value} for i, value in enumerate(values)]
    return {
        "results": {"t": {"alias": "t", "acc,none": total, "acc_stderr,none": "N/A"}},
        "samples": {"t": samples},
    }


def compare(pairs: Sequence[tuple[Any, Any]], aggregate: Any) -> TaskScore:
    columns = [[pair[side] for pair in pairs] for side in (0, 1)]
    before, after = (results(column, aggregate(column)) for column in columns)
    (score,) = compare_results(before, after, {"t": {METRIC: aggregate}})
    return score


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@given(numbers)
def test_a_mean_gets_the_paired_error(pairs: list[tuple[bool, bool]]):
    score = compare([(float(before), float(after)) for before, after in pairs], mean)
    differences = [float(after) - float(before) for before, after in pairs]
    assert score.method == "paired"
    assert score.difference == pytest.approx(mean(differences))
    assert score.difference_stderr == pytest.approx(
        statistics.stdev(differences) / math.sqrt(len(pairs))
    )
    assert score.num_changed == sum(before != after for before, after in pairs)


def test_documents_are_paired_by_their_number_not_their_order():
    before, after = results([0.0, 1.0, 0.0], 1 / 3), results([0.0, 1.0, 0.0], 1 / 3)
    after["samples"]["t"].reverse()
    (score,) = compare_results(before, after, {"t": {METRIC: mean}})
    assert (score.num_changed, score.difference_stderr) == (0, 0.0)


@settings(max_examples=10)
@given(
    st.lists(st.tuples(st.floats(-3, -1), st.floats(-0.1, 0.1)), min_size=30, max_size=60),
    st.integers(0, 9),
)
def test_a_bootstrap_of_a_mean_is_near_the_formula(values: list[tuple[float, float]], seed: int):
    pairs = [(before, before + change) for before, change in values]
    found = bootstrap_stderr(pairs, mean, seed)[2]
    spread = float(numpy.std([change for _, change in values])) / math.sqrt(len(pairs))
    assert found == pytest.approx(spread, rel=0.25, abs=1e-12)


def test_a_metric_that_is_no_mean_is_drawn():
    def perplexity(items: Sequence[tuple[float, int]]) -> float:
        return math.exp(-sum(item[0] for item in items) / sum(item[1] for item in items))

    score = compare([((-9.0 - i, 3 + i), (-9.5 - i, 3 + i)) for i in range(12)], perplexity)
    assert score.method == "bootstrap"
    assert score.num_changed == 12
    assert 0 < score.difference_stderr < score.reference_stderr  # type: ignore[operator]


def test_one_document_and_a_group_have_no_error():
    assert compare([(1.0, 0.0)], mean).difference_stderr is None
    group = {"results": {"g": {"acc,none": 0.5}}, "samples": {}}
    (score,) = compare_results(group, group, {})
    assert (score.difference, score.difference_stderr, score.num_documents) == (0, None, None)
    assert as_rows([score], ("bfloat16", "fp8"))[1] == (
        "g",
        "acc",
        "",
        "0.5000",
        "0.5000",
        "+0.0000",
        "",
    )
