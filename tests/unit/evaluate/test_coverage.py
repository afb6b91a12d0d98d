"""How often a 95 % interval holds the true value: windows drawn from real figures of the demo on
three texts.

`windows.json` is what `python tools/measure_windows.py` prints.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from freight.lab.evaluate.safety import MIN_UNITS
from freight.lab.evaluate.statistics import (
    effective_units,
    independent_units,
    mean_interval,
    student,
)

DRAWS = 2000
TEXTS = json.loads((Path(__file__).parent / "windows.json").read_text())["texts"]
Array = NDArray[np.float64]


def population(text: str, figure: str) -> tuple[Array, Array]:
    """Sums and counts by window. The change of perplexity is paired: differences within each
    window.
    """
    columns = {name: np.array(values) for name, values in TEXTS[text].items()}
    sums = columns["loss"] - columns["reference"] if figure == "change" else columns[figure]
    return sums, columns["count"]


def coverage(text: str, figure: str, units: int) -> float:
    sums, counts = population(text, figure)
    drawn = np.random.default_rng(0).integers(0, len(counts), (DRAWS, units))
    ends = mean_interval(sums[drawn], counts[drawn])
    assert ends is not None
    true = sums.sum() / counts.sum()
    return float(np.mean((ends[0] <= true) & (true <= ends[1])))


@pytest.mark.parametrize("units", [12, 20, 58])
@pytest.mark.parametrize("figure", ["change", "kl", "same"])
@pytest.mark.parametrize("text", TEXTS)
def test_an_interval_of_95_percent_holds_the_true_value_in_93_to_97(
    text: str, figure: str, units: int
):
    assert len(TEXTS[text]["count"]) >= 58
    assert 0.93 <= coverage(text, figure, units) <= 0.97


def test_fewer_units_have_no_interval():
    sums, counts = population("code", "kl")
    assert mean_interval(sums[: MIN_UNITS - 1], counts[: MIN_UNITS - 1]) is None
    assert mean_interval(sums[:MIN_UNITS], counts[:MIN_UNITS]) is not None


def test_quantiles_are_those_of_the_printed_table():
    """97.5 % quantiles of Student's t as printed in Abramowitz and Stegun, table 26.10."""
    for degrees, printed in ((11, 2.201), (19, 2.093), (30, 2.042), (60, 2.000), (120, 1.980)):
        assert student(degrees) == pytest.approx(printed, abs=5.1e-4)


def test_windows_of_different_length_count_by_their_tokens():
    """Doubling a window's tokens and sums doubles its weight: the mean is per token."""
    draw = np.random.default_rng(1)
    counts = draw.integers(10, 1000, 40).astype(float)
    sums = counts * (0.3 + 0.1 * draw.standard_normal(40))
    ends = mean_interval(sums, counts)
    assert ends is not None
    assert (ends[0] + ends[1]) / 2 == pytest.approx(sums.sum() / counts.sum())
    exact = mean_interval(counts * 0.3, counts)
    assert exact is not None
    assert exact[1] - exact[0] == pytest.approx(0, abs=1e-12), (
        "equal means in all windows leave nothing to doubt"
    )


def test_a_unit_that_repeats_an_earlier_one_counts_as_part_of_it():
    first, second = list(range(100)), list(range(200, 300))
    assert independent_units([first, second]) == [0, 1]
    assert independent_units([first, second, first, second[3:], list(range(400, 450))]) == [
        0,
        1,
        0,
        1,
        2,
    ]
    assert independent_units([[1, 2, 3] * 30, [2, 3, 1] * 30, [3, 1, 2] * 2]) == [0, 0, 1], (
        "6 tokens are one run"
    )
    half = first[:50] + second[:50]
    assert independent_units([half, first, second]) == [0, 1, 2], "half of a unit may be a template"
    assert independent_units([half, first, [*first, 7]]) == [0, 1, 1]
    assert independent_units([[5], [5], [6], []]) == [0, 0, 1, 2]


def test_copies_do_not_narrow_an_interval():
    """12 different units and 10 copies of each: the interval is that of the 12."""
    rng = np.random.default_rng(0)
    sums, ids = rng.normal(size=12), [list(rng.integers(0, 1000, 64)) for _ in range(12)]
    units = np.array(independent_units(ids * 10))
    assert units.tolist() == list(range(12)) * 10
    merged = mean_interval(
        np.bincount(units, weights=np.tile(sums, 10)), np.bincount(units).astype(float)
    )
    assert merged == pytest.approx(mean_interval(sums, np.ones(12)))


def test_a_short_last_window_is_hardly_a_unit_more():
    """Eleven windows and a rest of 15 tokens have no interval; a rest of a half is most of one."""
    sums = np.random.default_rng(2).normal(1.0, 0.2, 13)
    full = np.full(11, 1024.0)
    assert mean_interval(sums[:12], np.append(full, 15.0)) is None
    assert mean_interval(sums[:12], np.append(full, 700.0)) is not None
    assert effective_units(np.append(full, 15.0)) == pytest.approx(11.03, abs=0.01)
    assert effective_units(np.append(np.ones(11), 1e9)) == pytest.approx(1.0), "one document is all"
    assert mean_interval(sums[:12], np.append(np.ones(11), 1e9)) is None
