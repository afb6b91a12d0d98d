"""tools/coverage_floors.py: a report of coverage.py, and floors above and below it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import coverage_floors
import pytest

TOOL = Path(coverage_floors.__file__)
TOTALS = {"covered_lines": 90, "num_statements": 100, "covered_branches": 14, "num_branches": 20}


def test_shares_are_of_lines_and_of_branches() -> None:
    assert coverage_floors.shares(TOTALS) == {"lines": 90.0, "branches": 70.0}
    assert coverage_floors.shares(dict.fromkeys(TOTALS, 0)) == {"lines": 100.0, "branches": 100.0}


@pytest.mark.parametrize(
    ("floors", "says"),
    [
        (("90", "70"), ""),
        (("90.1", "70"), "coverage of lines is below its floor"),
        (("91", "71"), "coverage of lines and branches is below its floor"),
    ],
)
def test_below_a_floor_it_fails(tmp_path: Path, floors: tuple[str, str], says: str) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"totals": TOTALS}))
    command = [sys.executable, TOOL, report, "--lines", floors[0], "--branches", floors[1]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (1 if says else 0, says)
    assert f"src/freight: 70.0 % of branches, floor {floors[1]} %\n" in done.stdout
