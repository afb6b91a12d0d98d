"""What the server's source must not contain: ways to run what a client sent, and checks that
`python -O` removes.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "freight"
SERVED = sorted(path for folder in ("serve", "engine") for path in (SOURCE / folder).rglob("*.py"))
# What reads a client's bytes or fields: here a wrong value is an ApiError or a RequestError.
READERS = sorted(
    [*(SOURCE / "serve" / "openai").glob("*.py")]
    + [
        SOURCE / "serve" / name
        for name in (
            *("transport/auth.py", "transport/body.py", "transport/head.py"),
            *("limits.py", "tgi/request.py", "tokens.py"),
        )
    ]
    + [
        SOURCE / name
        for name in (
            "sampling.py",
            "structured.py",
            "text/messages.py",
            "engine/intake.py",
            "engine/grammar.py",
        )
    ]
)
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "jsonpickle",
    "yaml",
    "joblib",
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    ("torch", "load"),
    ("torch", "package"),
    ("os", "system"),
    ("os", "popen"),
    ("re", "template"),
}


def forbidden(tree: ast.AST) -> list[str]:
    """What of `tree` can run data as code, each with its line."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [
                f"{node.lineno}: import {one.name}"
                for one in node.names
                if one.name.split(".")[0] in MODULES
            ]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(f"{node.lineno}: from {node.module}")
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            found.append(f"{node.lineno}: {node.id}")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in CALLS:
                found.append(f"{node.lineno}: {node.value.id}.{node.attr}")
        elif isinstance(node, ast.keyword) and node.arg == "shell":
            found.append(f"{node.value.lineno}: shell=")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import loads",
        "eval('1')",
        "x = exec",
        "torch.load(f)",
        "run(x, shell=True)",
        "import yaml",
    ],
)
def test_the_check_finds(source: str) -> None:
    assert forbidden(ast.parse(source))


def test_nothing_runs_data_as_code() -> None:
    assert len(SERVED) > 40
    found = {path.name: forbidden(ast.parse(path.read_text("utf-8"))) for path in SERVED}
    assert not {name: lines for name, lines in found.items() if lines}


def test_no_input_is_checked_by_an_assertion() -> None:
    found = [
        f"{path.name}:{node.lineno}"
        for path in READERS
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Assert)
    ]
    assert found == []
