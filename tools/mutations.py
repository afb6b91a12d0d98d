"""Try whether the tests of `make test` find faults that are put into the source.

    python tools/mutations.py                    all of mutations.txt, two at a time
    python tools/mutations.py --only prefix      those whose name has the word

The tests of the kernels and the equivalences are cross products of many values, of which `make test`
runs a covering array (tests/covering.py), and of other tests a share of the cases that are alike.
Each mutation changes one line of a copy of the source. Its tests run as in `make test`, and where
they pass, once more in full: what the full product finds and the array does not is a hole in the
array.

One build of the CPU kernels is compiled and tested, by default the best one that runs here. A fault
in a line that it does not have is not found: those of AMX elsewhere, some of vectors on AMX. Exits
with 1 if the full product finds more, or if a line to change is not there any more.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from freight.kernels.cpu import library

ROOT = Path(__file__).parents[1]
COPIED = ("src", "csrc", "tests", "tools", "benchmarks", "docs")
QUICK = "not slow and not clients"
FULL = "not clients"
SECONDS = 1200  # for one run of the tests; a run that takes longer has found something
TESTS = {
    "attention": ("tests/kernels/test_cpu_attention.py",),
    "store": ("tests/kernels/test_cpu_store.py",),
    "centers": ("tests/kernels/test_key_centers.py",),
    "linear": ("tests/kernels/test_cpu_linear.py",),
    "same": ("tests/e2e/test_equivalences.py",),
    "blocks": ("tests/unit/cache", "tests/e2e/test_equivalences.py"),
    "scheduler": (
        "tests/unit/engine/test_scheduler.py",
        "tests/unit/engine/test_scheduler_sharing.py",
        "tests/e2e/test_equivalences.py",
    ),
    "lost": ("tests/e2e/test_lost_steps.py",),
    "engine": ("tests/unit/engine",),
    "manager": ("tests/unit/cache",),
    "server": ("tests/unit/server",),
    "text": ("tests/unit/test_detokenizer.py", "tests/unit/test_tokenizer.py"),
    "reading": ("tests/unit/checkpoint", "tests/formats"),
}
# Runs the tests of a copy: an editable install would import the source that was copied.
RUN = """
import os, sys
sys.meta_path[:] = [
    finder for finder in sys.meta_path if "editable" not in getattr(type(finder), "__module__", "")
]
sys.path[:0] = ["src", "."]
import freight
assert freight.__file__.startswith(os.getcwd()), freight.__file__
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Mutation:
    """`old`, which stands once in `file`, becomes `new`. `tests` are files and folders."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def read(text: str) -> list[Mutation]:
    """Parse mutations.txt."""
    results = []
    for block in text.split("\n\n"):
        head, *changes = [line for line in block.splitlines() if not line.startswith("#")] or [""]
        if not head:
            continue
        name, file, tests = [part.strip() for part in head.split(" | ")]
        old = "\n".join(line[2:] for line in changes if line.startswith("-"))
        new = "\n".join(line[2:] for line in changes if line.startswith("+"))
        files = [item for word in tests.split() for item in TESTS[word]]
        results.append(Mutation(name, file, old, new, tuple(dict.fromkeys(files))))
    return results


class Copy:
    """A copy of the source in a folder of its own. One mutation at a time is in it."""

    def __init__(self, parent: str, number: int, build: str) -> None:
        self.root = Path(parent, str(number))
        self.target = f"freight_{build}"
        for name in COPIED:
            shutil.copytree(
                ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        for library_file in (self.root / "src/freight/kernels/cpu").glob("*.so"):
            if library_file.stem != self.target:
                library_file.unlink()  # what is not changed finds nothing
        self.is_stale = False  # the compiled kernels are not those of the source
        for file in ROOT.glob("*.*"):
            if file.is_file():
                shutil.copy(file, self.root)

    def build(self) -> str:
        """Compile the build. Returns its output where it failed."""
        folder = self.root / "build"
        for command in (
            ["cmake", "-S", str(self.root / "csrc"), "-B", str(folder)],
            ["cmake", "--build", str(folder), "--target", self.target],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return done.stderr[-400:]
        shutil.copy(folder / f"{self.target}.so", self.root / "src/freight/kernels/cpu")
        return ""

    def fails(self, tests: tuple[str, ...], marks: str) -> bool:
        """Run the tests up to the first failure."""
        options = ["-x", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-m", marks]
        command = [sys.executable, "-c", RUN, "-o", "addopts=", *options, *tests]
        try:
            done = subprocess.run(
                command, cwd=self.root, capture_output=True, text=True, timeout=SECONDS, check=False,
                env=os.environ | {"PYTHONPATH": str(self.root / "src")},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return True
        if done.returncode in (2, 3, 4, 5):  # pytest's own errors; below 0: killed by a signal
            raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
        return done.returncode != 0

    def attempt(self, mutation: Mutation) -> str:
        """Return who finds it: 'found', 'FULL PRODUCT ONLY', 'not found' or why it was not tried."""
        file = self.root / mutation.file
        original = file.read_text(encoding="utf-8")
        if original.count(mutation.old) != 1:
            return f"NOT TRIED: the line stands {original.count(mutation.old)} times"
        compiled = mutation.file.startswith("csrc/")
        try:
            file.write_text(original.replace(mutation.old, mutation.new), encoding="utf-8")
            if (compiled or self.is_stale) and (error := self.build()):
                return f"NOT TRIED: {error}"
            self.is_stale = compiled
            if self.fails(mutation.tests, QUICK):
                return "found"
            if self.fails(mutation.tests, FULL):
                return "FULL PRODUCT ONLY"
            return "not found"
        finally:
            file.write_text(original, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="WORD", help="mutations whose name has this word")
    parser.add_argument("--jobs", type=int, default=2, help="at a time, each in a copy of its own")
    parser.add_argument("--build", default=library.runnable()[0], help="of the CPU kernels")
    args = parser.parse_args()
    known = read((ROOT / "tools/mutations.txt").read_text(encoding="utf-8"))
    todo = [item for item in known if not args.only or args.only in item.name]
    with tempfile.TemporaryDirectory() as parent:
        copies: Queue[Copy] = Queue()
        for number in range(args.jobs):
            copies.put(Copy(parent, number, args.build))

        def attempt(mutation: Mutation) -> str:
            copy = copies.get()
            try:
                result = copy.attempt(mutation)
            finally:
                copies.put(copy)
            print(f"{result}: {mutation.name} ({mutation.file})", flush=True)
            return result

        with ThreadPoolExecutor(args.jobs) as pool:
            results = list(pool.map(attempt, todo))
    print(f"{results.count('found')} of {len(results)} found by `make test`'s cases")
    sys.exit(any(item.isupper() or item.startswith("NOT") for item in results))


if __name__ == "__main__":
    main()
