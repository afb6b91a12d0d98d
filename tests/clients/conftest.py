"""Clients from PyPI in an environment of their own, in front of two servers of the demo model with
a chat template.

`make test-clients` installs tests/clients/requirements.txt and names the environment's interpreter
in FREIGHT_CLIENTS; FREIGHT_CLIENTS_OLDER is that of requirements-older.txt, for clients that need
an older OpenAI client. Scripts of this folder are run with it: they import what Freight's own
environment does not have.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import demo_with_tools
from tests.pooling_models import save_body
from tests.serving import freight_serve

HERE = Path(__file__).parent
OPTIONS = ["--kv-cache-dtype", "fp8", "--kv-cache-memory", "64MiB", "--served-model-name", "demo"]
SECONDS = 900  # for one script, which may have company on the machine
CONTEXT = 8192  # clients write schemas into prompts, and the demo model's 1024 tokens are few


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(f"{HERE}/"):
            item.add_marker("clients")


@dataclass(frozen=True)
class Clients:
    """An environment with clients."""

    python: Path

    def command(self, name: str) -> Path:
        """A command that a client installs."""
        path = self.python.parent / name
        assert path.exists(), f"{path} is missing: run make test-clients"
        return path

    def run(self, script: str, *arguments: str) -> Any:
        """What a script of this folder prints, as JSON."""
        return json.loads(self.text(script, *arguments))

    def text(self, script: str, *arguments: str) -> str:
        """What a script of this folder prints. An exit status other than 0 is a failure."""
        environ = {
            name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")
        }
        ran = subprocess.run(
            [self.python, HERE / script, *arguments],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=environ | {"OPENAI_API_KEY": "none"},
        )
        assert ran.returncode == 0, ran.stderr[-4000:]
        return ran.stdout


@pytest.fixture(scope="session")
def clients() -> Clients:
    python = os.environ.get("FREIGHT_CLIENTS", "")
    if not python:
        pytest.skip("FREIGHT_CLIENTS names no interpreter: run make test-clients")
    return Clients(Path(python).absolute())


@pytest.fixture(scope="session")
def older_clients() -> Clients:
    python = os.environ.get("FREIGHT_CLIENTS_OLDER", "")
    if not python:
        pytest.skip("FREIGHT_CLIENTS_OLDER names no interpreter: run make test-clients")
    return Clients(Path(python).absolute())


@pytest.fixture(scope="session")
def short_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server whose answers end: greedy, and with a penalty for the spaces that a
    grammar of JSON allows.

    Its template names tools without their schemas, which keeps prompts short.
    """
    folder = demo_with_tools(tmp_path_factory.mktemp("served") / "demo-short")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    defaults = json.loads((folder / "generation_config.json").read_text())
    defaults |= {"temperature": 0.0, "repetition_penalty": 1.4}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    tokenizer = folder / "tokenizer_config.json"
    tokenizer.write_text(
        tokenizer.read_text().replace("{{ tool | tojson }}", "{{ tool.function.name }}")
    )
    with freight_serve(folder, OPTIONS) as url:
        yield url


@pytest.fixture(scope="session")
def pooling_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The URLs of a server of a model that embeds, and of one that scores pairs of texts."""
    folder = tmp_path_factory.mktemp("pooling")
    models = [
        save_body(folder / "embeds", "qwen3", "Model"),
        save_body(folder / "scores", "qwen3", "ForSequenceClassification", num_labels=1),
    ]
    with ExitStack() as stack:
        yield [
            stack.enter_context(freight_serve(model, ["--kv-cache-memory", "16MiB"]))
            for model in models
        ]


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory, clients: Clients) -> Iterator[list[str]]:
    """The URLs of two servers of one model, whose chat template knows tools. They serve it as
    `demo`.
    """
    folder = demo_with_tools(tmp_path_factory.mktemp("served") / "demo-tools")
    with ExitStack() as stack:
        yield [stack.enter_context(freight_serve(folder, OPTIONS)) for _ in range(2)]


@pytest.fixture(scope="session")
def server(servers: list[str]) -> str:
    """The URL of one of them."""
    return servers[0]


@pytest.fixture
def answers(clients: Clients) -> Callable[[str], Any]:
    """What OpenAI's client gets from a URL: `openai_answers.py`."""
    return lambda url: clients.run("openai_answers.py", url)
