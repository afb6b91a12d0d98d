"""What the server's other processes know of its secrets: nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from freight.serve.processes.children import without_secrets


def test_the_environment_of_other_processes_has_no_key() -> None:
    given = {"FREIGHT_API_KEY": "sk-1", "FREIGHT_THREADS": "2", "PATH": "/bin"}
    assert without_secrets(given) == {"FREIGHT_THREADS": "2", "PATH": "/bin"}


def test_the_engine_is_started_with_that_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    from freight.serve.processes import client

    seen: list[dict[str, str]] = []

    def spawn(command: object, env: dict[str, str], **options: object) -> subprocess.Popen[bytes]:
        seen.append(env)
        return subprocess.Popen([sys.executable, "-c", ""])

    async def run() -> None:
        engine = client.EngineClient(
            client.WorkerOptions({"model": "demo"}), print, print, lambda: None
        )
        await engine.start()
        await engine.stop()

    monkeypatch.setenv("FREIGHT_API_KEY", "sk-1")
    monkeypatch.setattr(client, "spawn", spawn)
    asyncio.run(run())
    assert "PATH" in seen[0]
    assert "sk-1" not in seen[0].values()
