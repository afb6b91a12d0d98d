"""`make real MODEL=…`: the demo model's tables for another model."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import real_tables
from real_tables import Sizes, cache_memories, commands, main
from tests.unit.cli.conftest import freight

__all__ = ["freight"]  # the fixture is used by tests here

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "src" / "freight" / "demo")


def test_every_table_of_a_folder(
    freight: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """All commands run, in this process and with fewer caches here, and their output is kept beside
    them.
    """
    said = []

    def run(arguments: Sequence[str]) -> tuple[bool, str]:
        answer = freight(*arguments, *(["--caches", "token"] if "--report" in arguments else []))
        said.append(answer.err)
        return answer.code == 0, answer.out + answer.err

    monkeypatch.setattr(real_tables, "run", run)
    monkeypatch.setattr(real_tables, "OUTPUT", 4)
    main(
        [
            DEMO,
            "--tokens",
            "32",
            "--requests",
            "2",
            "--repeats",
            "1",
            "--out",
            str(tmp_path / "out"),
        ]
    )
    tables = (tmp_path / "out" / "tables.md").read_text()
    assert len(said) == 5
    for row in (
        "| 16 bits ",
        "| token ",
        "| token, dynamic ",
        "| fp8_e4m3fn |",
        "decode_tokens_per_second",
    ):
        assert row in tables, said
    assert (tmp_path / "out" / "report" / "report.html").exists()
    assert (tmp_path / "out" / "cache-gain.svg").exists()


def test_the_smaller_memory_binds():
    """It holds two requests of a 16-bit cache and no third one; the larger holds all."""
    request = real_tables.INPUT + real_tables.OUTPUT
    small, large = (memory // 100 for memory in cache_memories(100, 16, 64))
    assert 2 * request <= small < 3 * request
    assert large >= 64 * request


def test_an_int8_cache_is_measured_on_cpus_only():
    made = [
        commands("m", Path("text"), Path("out"), Sizes(8, 2, 1), (1, 2), on_cpu)
        for on_cpu in (True, False)
    ]
    assert [sum("int8" in arguments for _, arguments in one) for one in made] == [1, 0]


def test_what_fails_is_counted_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        real_tables, "run", lambda arguments: (arguments[0] != "evaluate", "said\n")
    )
    with pytest.raises(SystemExit, match="2 of the commands failed"):
        main([DEMO, "--out", str(tmp_path)])
    assert (tmp_path / "tables.md").read_text().count("said") == 5


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    with pytest.raises(SystemExit):
        main([""])
    assert "make real MODEL=OWNER/NAME" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([DEMO, "--data", str(tmp_path / "none")])
    assert "is no file" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="nowhere"):
        main([str(tmp_path / "nowhere")])


def test_make_passes_the_model_and_the_options():
    argv = [
        "make",
        "--dry-run",
        "--assume-old=setup",
        "real",
        "MODEL=org/name",
        "OPTIONS=--tokens 9",
    ]
    said = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert 'model="org/name"' in said
    assert 'tools/real_tables.py "$model" --tokens 9' in said
