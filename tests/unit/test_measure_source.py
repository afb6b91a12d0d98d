"""tools/measure_source.py: what it counts."""

from __future__ import annotations

import sys
from pathlib import Path

import measure_source
import pytest

SOURCE = '''"""A docstring
of two lines."""

from typing import Any

x = [a for a in range(3)]  # a comment


def f(y: Any) -> int:
    """Another."""
    if y:
        return 1 if x else 2

    def g() -> int:
        return 0

    return g()
'''


def test_lines_of_code_are_counted_without_docstrings_comments_and_blank_lines(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "b.py").write_text("# alone\n" + "y = 1" + f"  # {'w' * 100}\n")
    found = measure_source.measure(tmp_path)
    assert (found.files, found.lines, found.comments, found.long) == (2, 9, 3, 1)
    assert (found.comprehensions, found.conditionals, found.any) == (1, 1, 1)
    assert found.complexity == [2, 1], "g is inside f and not part of its complexity"


def test_packed_assignments_and_prose_are_counted_and_swaps_are_not(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a, b = 1, 2\na, b = b, a\nfound = a\n\n\ndef f(one): ...\n")
    figures = measure_source.measure(tmp_path)
    assert (figures.assignments, figures.packed) == (3, 1)
    assert (figures.names, figures.prose) == (6, 2)


@pytest.mark.parametrize(
    ("folder", "prose"), [("src/freight", 0.01), ("benchmarks", 0.02), ("tools", 0.02)]
)
def test_names_are_no_prose_and_one_assignment_is_a_statement(
    folder: str, prose: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("docstring_lines", "complexity"):  # what is not asked for takes most of the time
        monkeypatch.setattr(measure_source, name, lambda node: ())
    monkeypatch.setattr(measure_source.tokenize, "generate_tokens", lambda readline: ())
    figures = measure_source.measure(measure_source.ROOT / folder)
    assert figures.packed <= 0.015 * figures.assignments
    assert figures.prose <= prose * figures.names


def test_a_folder_without_python_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["measure_source.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="has no Python file"):
        measure_source.main()
