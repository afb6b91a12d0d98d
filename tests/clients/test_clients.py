"""Clients from PyPI, unchanged, against one server. Each script tells of each of its cases whether
it held.
"""

from __future__ import annotations

import json

import pytest
from tests.clients.conftest import Clients


def check(told: str) -> None:
    cases = [json.loads(line) for line in told.splitlines() if line.startswith("[")]
    assert cases, told[-2000:]
    failed = [f"{name}:\n{ending}" for name, ending in cases if ending != "held"]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("script", ["openai", "anthropic", "langchain", "agents"])
def test_clients(script: str, clients: Clients, short_server: str) -> None:
    check(clients.text(f"try_{script}.py", short_server))


@pytest.mark.parametrize("script", ["instructor", "litellm", "llama_index"])
def test_clients_of_an_older_openai(script: str, older_clients: Clients, short_server: str) -> None:
    check(older_clients.text(f"try_{script}.py", short_server))


def test_clients_of_embeddings(clients: Clients, pooling_servers: list[str]) -> None:
    check(clients.text("try_embeddings.py", *pooling_servers))


def test_clients_of_embeddings_of_an_older_openai(
    older_clients: Clients, pooling_servers: list[str]
) -> None:
    check(older_clients.text("try_embeddings_older.py", *pooling_servers))
