"""tools/mutations.txt names lines of the source as they are."""

from __future__ import annotations

from pathlib import Path

import mutations

ROOT = Path(__file__).parents[2]


def test_each_line_to_change_stands_once_in_its_file():
    for mutation in mutations.read((ROOT / "tools/mutations.txt").read_text(encoding="utf-8")):
        source = (ROOT / mutation.file).read_text(encoding="utf-8")
        assert source.count(mutation.old) == 1, mutation.name
        assert all((ROOT / tests).exists() for tests in mutation.tests), mutation.name
