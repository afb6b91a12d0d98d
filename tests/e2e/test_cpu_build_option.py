"""`--kernels cpu-BUILD` reaches the processes of an engine: each loads that build and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.serving import ServeProcess, children_of

from freight.kernels.cpu import library

LEAST = library.runnable()[-1] if library.runnable() else ""
MAPS = Path("/proc/self/maps")


def loaded_by(pid: int) -> set[str]:
    """The builds whose libraries a process has mapped."""
    return set(re.findall(r"/freight_(\w+)\.so", Path(f"/proc/{pid}/maps").read_text()))


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not show what a process has mapped")
@pytest.mark.skipif(not LEAST, reason="there are no compiled kernels")
def test_an_engine_s_process_and_its_ranks_load_the_named_build() -> None:
    options = ["--kernels", f"cpu-{LEAST}", "-tp", "2", "--threads", "1"]
    with ServeProcess("demo", [*options, "--kv-cache-memory", "8MiB"]) as served:
        served.wait_until_healthy()
        worker = served.children()["worker"]
        (rank,) = children_of(worker)
        assert [loaded_by(pid) for pid in (worker, rank)] == [{LEAST}, {LEAST}]
