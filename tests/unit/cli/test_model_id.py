"""`--model-id` on the verbs that take MODEL beside other arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the verbs were asked for; each ends before it does anything."""
    calls: list[tuple[Any, ...]] = []

    def call(*arguments: Any, **_: Any) -> None:
        calls.append(tuple(map(str, [one for one in arguments if isinstance(one, str | Path)])))
        raise KeyboardInterrupt

    for name in ("quantize.quantize", "transfer.export_scales", "transfer.import_scales"):
        monkeypatch.setattr(f"freight.calibrate.{name}", call)
    return calls


@pytest.mark.parametrize(
    ("positional", "by_option", "arguments"),
    [
        ("quantize demo out", "quantize --model-id demo out", ("demo", "out")),
        ("scales export demo s.json", "scales export --model-id demo s.json", ("demo", "s.json")),
        (
            "scales import s.json demo out",
            "scales import s.json out --model-id demo",
            ("s.json", "demo", "out", "compressed-tensors"),
        ),
    ],
)
def test_the_model_as_an_option(
    freight: Run,
    asked: list[tuple[Any, ...]],
    positional: str,
    by_option: str,
    arguments: tuple[str, ...],
) -> None:
    for line in (positional, by_option):
        assert freight(*line.split()).code == 130
    without = [word for word in by_option.split() if word not in ("--model-id", "demo")]
    assert freight(*without, FREIGHT_MODEL_ID="demo").code == 130
    assert freight(*positional.split(), FREIGHT_MODEL_ID="other").code == 130
    assert asked == [arguments] * 4


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("quantize a out --model-id b", "MODEL is 'a' and --model-id 'b': give one of the two"),
        ("quantize a", "OUT is missing: give MODEL OUT"),
        ("quantize --model-id a", "OUT is missing: give MODEL OUT"),
        ("scales export --model-id a", "FILE.json is missing: give MODEL FILE.json"),
        ("scales import --model-id a", "FILE.json is missing: give FILE.json MODEL OUT"),
        ("scales import s.json a out --model-id b", "MODEL is 'a' and --model-id 'b'"),
    ],
)
def test_one_too_few_or_too_many_is_refused(
    freight: Run, asked: list[tuple[Any, ...]], line: str, says: str
) -> None:
    answer = freight(*line.split())
    assert answer.code == 2
    assert says in answer.err
    assert not asked
