"""The forge's files: workflows, issue forms and the configuration of pre-commit.

The forge's schemas (SchemaStore's) are those of the package check-jsonschema. They find misspelt
keys and wrong types. The rest is compared with what it names: make's targets, files, the shell's
syntax, and the versions of pyproject.toml. Every check is shown to find the fault it is there for.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCHEMA_OF = {
    "workflows/*.yml": "github-workflows",
    "ISSUE_TEMPLATE/config.yml": "github-issue-config",
    "ISSUE_TEMPLATE/[!c]*.yml": "github-issue-forms",
    "dependabot.yml": "dependabot",
}
FILES = [
    (path, schema) for pattern, schema in SCHEMA_OF.items() for path in sorted(GITHUB.glob(pattern))
]


def read(path: Path) -> dict[str, Any]:
    """YAML as the forge reads it. PyYAML follows YAML 1.1, where the key `on` is a truth value."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {"on" if key is True else key: value for key, value in document.items()}


@cache
def validator(schema: str) -> Any:
    package = find_spec("check_jsonschema")
    if package is None or package.origin is None:
        pytest.skip("check-jsonschema is not installed; `make setup` installs it")
    vendored = Path(package.origin).parent / "builtin_schemas" / "vendor" / f"{schema}.json"
    return jsonschema_rs.validator_for(json.loads(vendored.read_text(encoding="utf-8")))


def commands(workflow: dict[str, Any]) -> Iterator[str]:
    for job in workflow["jobs"].values():
        for step in job.get("steps", ()):
            if "run" in step:
                yield step["run"]


def targets() -> set[str]:
    [line] = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return set(line.split())


def faults(workflow: dict[str, Any]) -> list[str]:
    """What no schema knows: targets, files, jobs and workflows that are not there, bad shell."""
    found = [fault for job in workflow["jobs"].values() for fault in job_faults(job, workflow)]
    for command in commands(workflow):
        plain = re.sub(r"\$\{\{.*?\}\}", "value", command)
        if subprocess.run(["bash", "-n", "-c", plain], capture_output=True, check=False).returncode:
            found.append(f"not shell: {command}")
        named = re.findall(r"\bmake ([a-z-]+)", command)
        found += [f"no target {target}" for target in named if target not in targets()]
        named = re.findall(r"[\w/.-]+\.py\b", command)
        found += [f"no file {word}" for word in named if not (ROOT / word).is_file()]
    return found


def job_faults(job: dict[str, Any], workflow: dict[str, Any]) -> Iterator[str]:
    used = job.get("uses", "")
    if used.startswith("./") and not (ROOT / used).is_file():
        yield f"no workflow {used}"
    if job.get("needs", "") and job["needs"] not in workflow["jobs"]:
        yield f"no job {job['needs']}"
    for target in job.get("strategy", {}).get("matrix", {}).get("target", ()):
        if target not in targets():
            yield f"no target {target}"


@pytest.mark.parametrize(
    ("path", "schema"), [pytest.param(*case, id=case[0].name) for case in FILES]
)
def test_it_fits_the_forge_s_schema(path: Path, schema: str) -> None:
    errors = validator(schema).iter_errors(read(path))
    assert [f"{list(error.instance_path)}: {error.message}" for error in errors] == []


def test_every_file_is_checked() -> None:
    assert {path for path, _ in FILES} == {*GITHUB.rglob("*.yml")}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_it_names_what_there_is(path: Path) -> None:
    assert faults(read(path)) == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_nothing_is_allowed_that_is_not_needed(path: Path) -> None:
    """By default a job reads, and only the one that makes a release writes."""
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    writing = {name for name, job in workflow["jobs"].items() if "permissions" in job}
    assert writing == ({"release"} if path.name == "release.yml" else set())


def test_versions_are_those_of_the_project() -> None:
    declared = [
        line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)
    ]
    matrix = read(GITHUB / "workflows" / "ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == declared
    assert PROJECT["requires-python"] == f">={declared[0]}"
    torch = re.findall(r"^TORCH_VERSION = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    wheels = (GITHUB / "workflows" / "wheels.yml").read_text()
    assert re.findall(r"torch==([\d.]+)", wheels) == torch


def test_the_lowest_versions_are_the_bounds() -> None:
    """tests/lowest.txt, which is installed, and the bounds, which users read, are the same."""
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *extras["server"], *extras["datasets"], *extras["eval"]]
    bounds = {}
    for line in asked:
        [(name, bound)] = re.findall(r"^([\w-]+)>=([\d.]+)", line)
        bounds[name.lower().replace("_", "-")] = bound
    text = (ROOT / "tests" / "lowest.txt").read_text()
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", text, re.MULTILINE))
    assert pinned.keys() == bounds.keys()
    beyond = [name for name, pin in pinned.items() if f"{pin}.".find(f"{bounds[name]}.") != 0]
    assert beyond == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda jobs: jobs["style"]["steps"][2].update(run="make chekc"), "no target chekc"),
        (lambda jobs: jobs["style"]["steps"][2].update(run="if true"), "not shell: if true"),
        (
            lambda jobs: jobs["style"]["steps"][2].update(run="python tools/no.py"),
            "no file tools/no.py",
        ),
        (lambda jobs: jobs["style"].update(needs="tests"), "no job tests"),
        (lambda jobs: jobs["wheel"].update(uses="./.github/workflows/no.yml"), "no workflow ./"),
        (
            lambda jobs: jobs["sanitize"]["strategy"]["matrix"].update(target=["sanitise"]),
            "no target sanitise",
        ),
    ],
)
def test_the_check_finds_a_fault(change: Any, says: str) -> None:
    workflow = copy.deepcopy(read(GITHUB / "workflows" / "ci.yml"))
    change(workflow["jobs"])
    [fault] = faults(workflow)
    assert fault.startswith(says)


@pytest.mark.parametrize("key", ["runs_on", "step"])
def test_the_schema_finds_a_misspelt_key(key: str) -> None:
    workflow = read(GITHUB / "workflows" / "ci.yml")
    workflow["jobs"]["style"][key] = "ubuntu-24.04"
    assert not validator("github-workflows").is_valid(workflow)


def test_pre_commit_runs_the_project_s_own_tools() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    [repository] = config["repos"]
    assert repository["repo"] == "local"  # one version of each tool: that of pyproject.toml
    for hook in repository["hooks"]:
        words = shlex.split(hook["entry"])
        assert words[0] in {".venv/bin/ruff", ".venv/bin/pytest"}, hook
        assert [word for word in words if word.endswith(".py") and not (ROOT / word).exists()] == []
        assert hook["language"] == "system"
