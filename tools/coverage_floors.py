"""Print line and branch coverage of src/freight, and end with status 1 below a floor.

    make coverage
    coverage json -o FILE && python tools/coverage_floors.py FILE [--lines PERCENT] [--branches PERCENT]

A floor is what was reached, rounded down. Without one it is 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path


def shares(totals: Mapping[str, float]) -> dict[str, float]:
    """Return the percentages of lines and of branches, from coverage.py's `totals`."""
    counts = {
        "lines": (totals["covered_lines"], totals["num_statements"]),
        "branches": (totals["covered_branches"], totals["num_branches"]),
    }
    return {name: 100 * run / every if every else 100.0 for name, (run, every) in counts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare coverage with its floors.")
    parser.add_argument("report", type=Path, help="what `coverage json` wrote")
    parser.add_argument("--lines", type=float, default=0.0, help="the least percentage of lines")
    parser.add_argument("--branches", type=float, default=0.0, help="and of branches")
    asked = parser.parse_args()
    result = shares(json.loads(asked.report.read_text(encoding="utf-8"))["totals"])
    floors = {"lines": asked.lines, "branches": asked.branches}
    for name, share in result.items():
        print(f"src/freight: {share:.1f} % of {name}, floor {floors[name]:g} %")
    low = [name for name, share in result.items() if share < floors[name]]
    if low:
        sys.exit(f"coverage of {' and '.join(low)} is below its floor")


if __name__ == "__main__":
    main()
