"""tools/kernel_coverage.py: what gcov says of two files becomes one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kernel_coverage


def report(name: str, counts: dict[int, int]) -> dict[str, Any]:
    lines = [{"line_number": number, "count": count} for number, count in counts.items()]
    return {"files": [{"file": name, "lines": lines}]}


def test_a_header_s_line_counts_once_and_other_sources_do_not() -> None:
    found: kernel_coverage.Lines = {}
    reports = [
        report("/csrc/a.h", {1: 0, 2: 0, 3: 0, 7: 0}),
        report("/csrc/a.h", {1: 5, 2: 0, 3: 0, 7: 0}),
        report("/csrc/b.cpp", {4: 1}),
        report("/usr/include/vector", {1: 0}),
    ]
    kernel_coverage.add(found, reports, Path("/csrc"))
    rows, total = kernel_coverage.table(found)
    assert [row.split() for row in rows] == [
        ["a.h", "4", "25.0", "%", "2-3,", "7"],
        ["b.cpp", "1", "100.0", "%"],
        ["csrc", "5", "40.0", "%"],
    ]
    assert total == 40.0
