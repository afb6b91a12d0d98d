"""Answers under several caches, by `freight batch`: FOLDER/FILE.CACHE.jsonl for FOLDER/FILE.jsonl.

The caches take turns file by file, so that the answers to the same questions are complete early. A run
that was killed is continued by the same command: `freight batch` continues a file of answers, and a file
with as many lines as there are questions is done.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from freight.errors import ConfigError
from questions.answers import read_answers

REFERENCE = "bf16"
CONTROL = "f32"
CACHES: Mapping[str, Sequence[str]] = {
    REFERENCE: (),
    "fp8": ("--kv-cache-dtype", "fp8"),
    CONTROL: ("--kv-cache-dtype", "float32"),
    "int8": ("--kv-cache-dtype", "int8"),
    "e5m2": ("--kv-cache-dtype", "fp8_e5m2"),
    "unit": ("--kv-cache-dtype", "fp8", "--kv-scales", "unit"),
}
CONTEXT = 2048  # tokens of a prompt and its answer, at most


@dataclass(frozen=True)
class Work:
    """A file of requests and the file of its answers under one cache."""

    requests: Path
    cache: str

    @property
    def answers(self) -> Path:
        return self.requests.with_name(f"{self.requests.stem}.{self.cache}.jsonl")

    def num_lines(self) -> int:
        return _count_lines(self.requests)

    def num_done(self) -> int:
        return _count_lines(self.answers) if self.answers.exists() else 0


def plan_work(files: Sequence[Path], caches: Sequence[str]) -> list[Work]:
    """Every file under every cache; all caches of a file before the next file."""
    return [Work(path, cache) for path in files for cache in caches]


def batch_command(work: Work, model: str, name: str, engine: Sequence[str]) -> list[str]:
    """engine: further options of `freight batch`, for every cache"""
    command = [sys.executable, "-m", "freight", "batch", str(work.requests), str(work.answers)]
    command += [model, "--served-model-name", name, "--max-model-len", str(CONTEXT)]
    return [*command, *CACHES[work.cache], *engine]


def answer_all(works: Sequence[Work], model: str, name: str, engine: Sequence[str]) -> None:
    """Answer what has no answer yet. Raises ConfigError if a run of `freight batch` fails."""
    for number, work in enumerate(works, 1):
        expected = work.num_lines()
        if work.num_done() < expected:
            command = batch_command(work, model, name, engine)
            done = subprocess.run(command, stdout=sys.stderr)
            if work.num_done() < expected:
                raise ConfigError(
                    f"{' '.join(command[1:])} ended with status {done.returncode} before all lines "
                    "were answered: run the same command again to continue"
                )
        print(_progress(number, len(works), work), file=sys.stderr, flush=True)


def _progress(number: int, count: int, work: Work) -> str:
    num_failed = work.num_done() - len(read_answers(work.answers))
    line = f"{number} of {count}: {work.requests.stem} under {work.cache}, {work.num_done()} lines"
    if num_failed:
        line += f", {num_failed} of them with an error: remove {work.answers} to ask again"
    return line


def _count_lines(path: Path) -> int:
    """Complete lines; a killed run may leave a part of one."""
    return path.read_bytes().count(b"\n")
