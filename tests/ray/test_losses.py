"""Replicas that are killed, added and taken away under clients that ask all the time.

FREIGHT_TEST_KILLS is the number of rounds, each of which kills an engine and then a replica.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.ray.clients import Clients, cases
from tests.ray.conftest import engines, wait_for
from tests.serving import freight_serve

pytestmark = pytest.mark.ray

ROUNDS = int(os.environ.get("FREIGHT_TEST_KILLS", "5"))
OPTIONS = ["--kv-cache-dtype", "fp8", "--kv-cache-memory", "64MiB", "--threads", "1"]


def test_an_engine_and_then_a_replica_are_killed(deployed: Callable[..., str], model: Path) -> None:
    with freight_serve(model, OPTIONS) as url:
        asked = cases(url, 24)
    url = deployed(num_replicas=2)
    chance = random.Random(0)
    with Clients(url, asked) as clients:
        for number in range(ROUNDS):
            wait_for(lambda: _serve(2))
            time.sleep(chance.uniform(1.0, 3.0))
            _kill(chance.choice(list(engines())))
            time.sleep(chance.uniform(0.0, 3.0))
            replicas = list(engines().values())
            if replicas:
                _kill(chance.choice(replicas))
            print(f"round {number + 1}: {dict(clients.outcomes)}", flush=True)
        wait_for(lambda: _serve(2))
        time.sleep(3.0)
    print(f"{dict(clients.outcomes)}; the slowest took {clients.slowest:.1f} s")
    assert clients.failed == {}
    assert clients.outcomes["ok"] > 10 * ROUNDS


def test_replicas_come_and_go_with_the_load(deployed: Callable[..., str], model: Path) -> None:
    with freight_serve(model, OPTIONS) as url:
        asked = cases(url, 24)
    url = deployed(
        min_replicas=1, max_replicas=3, target_requests=3, upscale_delay=2, downscale_delay=4
    )
    assert len(engines()) == 1
    for _ in range(int(os.environ.get("FREIGHT_TEST_WAVES", "1"))):
        with Clients(url, asked, 12) as clients:
            wait_for(lambda: len(engines()) == 3)
            time.sleep(3.0)
        assert clients.outcomes.keys() == {"ok"}
        with Clients(url, asked, 1) as clients:
            wait_for(lambda: len(engines()) == 1)
        assert clients.outcomes.keys() == {"ok"}


def _serve(count: int) -> bool:
    """Whether so many replicas are ready, and their engines run."""
    from ray import serve

    states = serve.status().applications["default"].deployments["Replica"].replica_states
    return states.get("RUNNING") == count == len(engines())


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
