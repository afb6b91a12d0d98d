"""The share of alike cases that `make test` runs (`tests/covering.py`)."""

from __future__ import annotations

from itertools import product

from tests.covering import share

CASES = {
    f"test[{model}-{kernels}]": (model, kernels) for model, kernels in product(range(30), "ab")
}


def test_a_share_has_its_size_and_every_value_of_a_short_axis() -> None:
    chosen = share(CASES, 3)
    assert len(set(chosen)) == len(chosen) == 20
    assert {CASES[name][1] for name in chosen} == {"a", "b"}


def test_a_share_is_the_same_in_any_order_of_cases_and_differs_between_functions() -> None:
    assert share(dict(reversed(CASES.items())), 3) == share(CASES, 3)
    renamed = {f"other {name}": case for name, case in CASES.items()}
    assert {renamed[name] for name in share(renamed, 3)} != {
        CASES[name] for name in share(CASES, 3)
    }


def test_one_case_is_its_own_share() -> None:
    assert share({"test[x]": ("x",)}, 3) == ["test[x]"]
