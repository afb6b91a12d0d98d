"""The container: what its entry point starts, and what of the checkout it is built from.

tools/try_dockerfile.py runs all its steps; that needs root, the network and minutes.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import try_dockerfile

ROOT = Path(__file__).parents[2]
DEFAULTS = ["serve", "--host", "0.0.0.0", "--port", "80", "--insecure"]
STEPS = list(try_dockerfile.instructions((ROOT / "Dockerfile").read_text()))


def start(folder: Path, *options: str, **environ: str) -> tuple[list[str], str]:
    """(what `freight` is called with, what the entry point says before)."""
    freight = folder / "freight"
    freight.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    freight.chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}"} | environ
    command = [ROOT / "docker" / "entrypoint.sh", *options]
    answer = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=30)
    return answer.stdout.splitlines(), answer.stderr


def test_it_starts_as_tgi_does(tmp_path: Path) -> None:
    options = ["--model-id", "M", "--kv-cache-dtype", "fp8_e5m2"]
    called, said = start(tmp_path, *options)
    assert called == [*DEFAULTS, *options]
    assert "no key" in said


def test_options_of_the_command_line_come_last_and_keep_their_blanks(tmp_path: Path) -> None:
    called, _ = start(tmp_path, "--port", "3000", "--served-model-name", "a b", PORT="8080")
    assert called[called.index("--port") + 1] == "8080"
    assert called[-4:] == ["--port", "3000", "--served-model-name", "a b"]


@pytest.mark.parametrize("options", [["--api-key", "K"], ["--api-key=K"], ["--api-key-file", "F"]])
def test_with_a_key_it_does_not_warn(tmp_path: Path, options: list[str]) -> None:
    assert start(tmp_path, *options)[1] == ""


@pytest.mark.parametrize("name", ["FREIGHT_API_KEY", "FREIGHT_API_KEY_FILE"])
def test_with_a_key_in_the_environment_it_does_not_warn(tmp_path: Path, name: str) -> None:
    assert start(tmp_path, **{name: "K"})[1] == ""


def test_it_is_built_from_the_package_alone() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {str(path) for path in try_dockerfile.in_context(ROOT, lines)}
    assert {"pyproject.toml", "LICENSE", "csrc/linear.cpp", "src/freight/demo/model.safetensors"} <= sent
    assert not [path for path in sent if path.endswith((".so", ".pyc")) or path.startswith(("tests/", ".venv/"))]
    copies = [rest.split()[:-1] for word, rest in STEPS if word == "COPY" and "--from" not in rest]
    for path in (path for paths in copies for path in paths):
        assert any(name == path.rstrip("/") or name.startswith(f"{path.rstrip('/')}/") for name in sent), path


def test_it_runs_without_the_rights_of_root() -> None:
    last = [word for word, _ in STEPS][::-1].index("FROM")
    assert dict(STEPS[-last:])["USER"] not in ("root", "0")
