"""A replica of two ranks: where Ray places it, what it answers, and a rank that is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.ray.clients import Clients, cases
from tests.ray.conftest import engines, ranks, wait_for
from tests.serving import freight_serve

pytestmark = pytest.mark.ray

OPTIONS = ["--kv-cache-dtype", "fp8", "--kv-cache-memory", "64MiB", "--threads", "1"]


def test_a_rank_is_killed_and_another_replica_answers_the_same(
    deployed: Callable[..., str], model: Path
) -> None:
    with freight_serve(model, OPTIONS) as url:
        asked = cases(url, 24)
    url = deployed(tensor_parallel_size=2, num_cpus=1)
    assert _bundles() == [[{"CPU": 1.0}, {"CPU": 1.0}]]
    first = set(engines())
    with Clients(url, asked, 6) as clients:
        time.sleep(3.0)
        (rank,) = ranks()
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: bool(ranks()) and not first & set(engines()))
        time.sleep(6.0)
    print(f"{dict(clients.outcomes)}; the slowest took {clients.slowest:.1f} s")
    assert clients.failed == {}
    assert clients.outcomes["ok"] > 10


def _bundles() -> list[list[dict[str, float]]]:
    """What Ray reserved in its placement groups, all of which must be on one machine each."""
    from ray.util import placement_group_table

    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    assert {group["strategy"] for group in groups} == {"STRICT_PACK"}
    return [list(group["bundles"].values()) for group in groups]
