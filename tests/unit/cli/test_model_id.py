"""`--model-id` on the verbs that take MODEL beside other arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from freight.cli.main import app

Run = Callable[..., Any]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the verbs were asked for; each ends before it does anything."""
    calls: list[tuple[Any, ...]] = []

    def call(*arguments: Any, **_: Any) -> None:
        calls.append(tuple(map(str, [one for one in arguments if isinstance(one, str | Path)])))
        raise KeyboardInterrupt

    for name in ("quantize.quantize", "transfer.export_scales", "transfer.import_scales"):
        monkeypatch.setattr(f"freight.quantizer.{name}", call)
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


def spellings() -> dict[str, list[set[str]]]:
    """By command, the spellings of each of its options."""
    found: dict[str, list[set[str]]] = {}

    def walk(command: Any, path: str) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{path} {name}".strip())
        if not hasattr(command, "commands"):
            found[path] = [{*option.opts, *option.secondary_opts} for option in command.params]

    walk(get_command(app), "")
    return found


@pytest.mark.parametrize(
    "names",
    [
        ("--model", "--model-id"),
        ("--input-len", "--prompt-tokens"),
        ("--output-len", "--output-tokens"),
        ("--repeats", "--rounds"),
        ("--tokens", "--max-tokens"),
        ("--output-dir", "--save-path"),
    ],
)
def test_one_thing_has_the_same_spellings_in_every_command(names: tuple[str, str]) -> None:
    commands = spellings()
    having = {
        path: options
        for path, options in commands.items()
        if any(map(set(names).intersection, options))
    }
    assert len(having) > 1
    for path, options in having.items():
        if names[0] == "--tokens" and path in ("generate", "chat", "demo"):
            continue  # tokens to generate, which is another thing
        assert any(option.issuperset(names) for option in options), path


def test_the_model_as_either_option_of_neighbours(
    freight: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def opened(args: Any) -> None:
        seen.append(args.model)
        raise KeyboardInterrupt

    monkeypatch.setattr("freight.model.open.open_model", opened)
    for spelling in ("--model", "--model-id"):
        freight("bench", "latency", spelling, "./mine")
        freight("bench", "throughput", spelling, "./mine")
    assert seen == ["./mine"] * 4
    assert "give one of the two" in freight("bench", "latency", "a", "--model", "b").err
    assert "MODEL is 'a'" in freight("convert", "a", "out", "--model", "b").err
