"""The container: what its entry point starts, and what of the checkout it is built from.

tools/try_dockerfile.py runs all its steps; that needs root, the network and minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import try_dockerfile

from freight.cli.main import main
from freight.config.foreign import TGI_OPTIONS

ROOT = Path(__file__).parents[2]
DEFAULTS = ["--host", "0.0.0.0", "--insecure"]
PORT = ["--port", "80"]
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


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """served(*options, **variables): the server that the container would start with them."""
    asked: list[dict[str, Any]] = []

    def run(settings: Any, options: Any) -> int:
        asked.append(vars(settings) | options.engine_args)
        return 0

    def serve(*options: str, **environ: str) -> dict[str, Any]:
        called, _ = start(tmp_path, *options, **environ)
        with monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("FREIGHT_") or name.lower() in TGI_OPTIONS]:
                patch.delenv(name)
            for name, value in environ.items():
                patch.setenv(name, value)
            patch.setattr("freight.server.lifecycle.run", run)
            patch.setattr(sys, "argv", ["freight", *called])
            with pytest.raises(SystemExit) as ended:
                main()
        assert not ended.value.code
        return asked[-1]

    return serve


def test_it_starts_as_tgi_does(tmp_path: Path, served: Callable[..., dict[str, Any]]) -> None:
    options = ["--model-id", "M", "--kv-cache-dtype", "fp8_e5m2"]
    called, said = start(tmp_path, *options)
    assert called == [*DEFAULTS, *PORT, *options]
    assert "no key" in said
    server = served(*options)
    assert (server["model"], server["kv_cache_dtype"]) == ("M", "fp8_e5m2")
    assert (server["host"], server["port"], server["insecure"]) == ("0.0.0.0", 80, True)


def test_the_variables_of_tgis_image_act(served: Callable[..., dict[str, Any]]) -> None:
    variables = {"MODEL_ID": "M", "KV_CACHE_DTYPE": "fp8_e5m2", "PORT": "8080", "MAX_TOTAL_TOKENS": "512"}
    server = served(**variables, HOSTNAME="3f2a8c")
    assert (server["model"], server["kv_cache_dtype"], server["port"]) == ("M", "fp8_e5m2", 8080)
    assert (server["host"], server["max_model_len"]) == ("0.0.0.0", 512)


def test_our_variables_rank_above_those_of_tgi_and_flags_above_both(served: Callable[..., dict[str, Any]]) -> None:
    assert served("demo", PORT="81", FREIGHT_PORT="82")["port"] == 82
    assert served("demo", FREIGHT_PORT="82")["port"] == 82
    assert served("demo", "--port", "83", PORT="81", FREIGHT_PORT="82")["port"] == 83
    assert served("demo", "--hostname", "127.0.0.2")["host"] == "127.0.0.2"


@pytest.mark.parametrize("options", [["demo"], ["demo", "--kv-cache-dtype", "fp8"]])
def test_the_model_may_be_the_first_word(served: Callable[..., dict[str, Any]], options: list[str]) -> None:
    server = served(*options)
    assert (server["model"], server["kv_cache_dtype"]) == ("demo", "fp8" if options[1:] else "auto")


def test_options_of_the_command_line_come_last_and_keep_their_blanks(tmp_path: Path) -> None:
    called, _ = start(tmp_path, "--port", "3000", "--served-model-name", "a b", PORT="8080")
    assert called == [*DEFAULTS, "--port", "3000", "--served-model-name", "a b"]


@pytest.mark.parametrize("options", [["--api-key", "K"], ["--api-key=K"], ["--api-key-file", "F"]])
def test_with_a_key_it_does_not_warn(tmp_path: Path, options: list[str]) -> None:
    assert start(tmp_path, *options)[1] == ""


@pytest.mark.parametrize("name", ["FREIGHT_API_KEY", "FREIGHT_API_KEY_FILE", "API_KEY"])
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


def test_its_health_check_asks_the_port_of_the_variables() -> None:
    check = dict(STEPS)["HEALTHCHECK"]
    url = check[check.index("http") : check.index("/health")]
    for environ, port in (({}, "80"), ({"PORT": "81"}, "81"), ({"PORT": "81", "FREIGHT_PORT": "82"}, "82")):
        asked = subprocess.run(["sh", "-c", f'echo "{url}"'], env=environ, capture_output=True, text=True, check=True)
        assert asked.stdout.strip() == f"http://127.0.0.1:{port}"
