"""Line coverage of csrc/ by the kernels' tests: gcov's counts, one row a file.

    make coverage-kernels
    python tools/kernel_coverage.py [--build portable] [--floor PERCENT]

It compiles one build, the best that runs here unless named, with GCC's counters into
build/gcov/BUILD, runs the tests of tests/kernels on it, and adds up what gcov says. A line of a
header counts as run if any file that includes it ran it. Ends with status 1 below the floor. What
belongs to other builds is not compiled, and does not count: the figure is of one build.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "csrc"
# relaxed counters of several threads would be lost otherwise
FLAGS = "--coverage -fprofile-abs-path -fprofile-update=prefer-atomic"

# Tests that count on all builds of an installation, of which there is one here
NOT_COVERED = (
    "test_cpu_library.py::test_the_amx_build_computes_on_tiles",
    "test_cpu_memory.py::test_no_memory_is_an_error_and_not_the_end_of_the_process",
)

Lines = dict[str, dict[int, int]]  # file -> line -> how often it ran


def add(result: Lines, reports: Iterable[Mapping[str, object]], source: Path) -> None:
    """Add gcov's reports to `found`, of files within `source`."""
    for report in reports:
        files = report["files"]
        assert isinstance(files, list)
        for file in files:
            path = Path(file["file"])
            if not path.is_relative_to(source):
                continue
            counts = result.setdefault(str(path.relative_to(source)), {})
            for line in file["lines"]:
                number = line["line_number"]
                counts[number] = counts.get(number, 0) + line["count"]


def ranges(numbers: Iterable[int]) -> str:
    """Return sorted numbers in a short form: 3-5, 8."""
    runs = []
    for _, pairs in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        runs.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
    return ", ".join(runs)


def table(result: Lines) -> tuple[list[str], float]:
    """Return a line for each file and one for all, and the percentage of all."""
    rows = []
    every = 0
    run = 0
    for name, counts in sorted(result.items()):
        missing = [number for number, count in counts.items() if not count]
        every = every + len(counts)
        run = run + len(counts) - len(missing)
        share = 100 * (1 - len(missing) / len(counts)) if counts else 100.0
        rows.append(f"{name:32} {len(counts):6} {share:6.1f} %  {ranges(missing)}".rstrip())
    total = 100 * run / every if every else 0.0
    return [*rows, f"{'csrc':32} {every:6} {total:6.1f} %"], total


def measure(build: str) -> Lines:
    """Compile, run the tests, and return the counts. Raises CalledProcessError."""
    folder = ROOT / "build" / "gcov" / build
    shutil.rmtree(folder, ignore_errors=True)
    configure = ["cmake", "-S", str(SOURCE), "-B", str(folder), f"-DCMAKE_CXX_FLAGS={FLAGS}"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    compile_ = ["cmake", "--build", str(folder), "-j2", "--target", f"freight_{build}"]
    subprocess.run(compile_, check=True, stdout=subprocess.DEVNULL)
    tests = [sys.executable, "-m", "pytest", "-q"]
    tests += map(str, sorted((ROOT / "tests" / "kernels").glob("test_*.py")))
    tests += [f"--deselect=tests/kernels/{name}" for name in NOT_COVERED]
    environ = os.environ | {"FREIGHT_TEST_KERNELS": str(folder)}
    subprocess.run(tests, check=True, cwd=ROOT, env=environ)
    results: Lines = {}
    for data in sorted(folder.rglob("*.gcda")):
        command = ["gcov", "--json-format", "--stdout", str(data)]
        printed = subprocess.run(command, check=True, cwd=folder, capture_output=True, text=True)
        add(results, map(json.loads, printed.stdout.splitlines()), SOURCE)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the line coverage of csrc/.")
    parser.add_argument(
        "--build", help="portable, avx2, avx_vnni, avx512_vnni, avx512, amx, neon or neon_bf16"
    )
    parser.add_argument("--floor", type=float, default=0.0, help="the least percentage")
    asked = parser.parse_args()
    if asked.build is None:
        from freight.kernels.cpu import library

        asked.build = library.runnable()[0]
    rows, total = table(measure(asked.build))
    print(f"lines of the {asked.build} build that the kernels' tests run:")
    print("\n".join(rows))
    if total < asked.floor:
        sys.exit(f"{total:.1f} % is below the floor of {asked.floor} %")


if __name__ == "__main__":
    main()
