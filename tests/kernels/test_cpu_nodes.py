"""Memory nodes (NUMA): which there are, and that threads stay on them and change no bit of a
result.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.operands.weight import Weight
from freight.settings.device import Threads, bound_nodes, numa_nodes

ON_TWO_NODES = """
import os, sys
from tests.kernels import test_cpu_nodes as test
from freight.kernels.cpu import library

library.bound_nodes = lambda: (frozenset({int(sys.argv[1])}), frozenset({int(sys.argv[2])}))
print(test.product())
for task in os.listdir("/proc/self/task"):
    print(task == str(os.getpid()), sorted(os.sched_getaffinity(int(task))))
"""


def product() -> str:
    """Its bits, from four threads."""
    torch.manual_seed(0)
    with Threads(4):
        kernels = CpuKernels(library.load())
        packed = kernels.pack(Weight(torch.randn(700, 300).bfloat16()))
        y = kernels.linear(torch.randn(40, 300).bfloat16(), packed, None)
    return hashlib.sha256(y.view(torch.int16).numpy().tobytes()).hexdigest()


def nodes_of(root: Path, *lists: str) -> Path:
    for index, text in enumerate(lists):
        folder = root / f"sys/devices/system/node/node{index}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("lists", "nodes"),
    [
        ((), []),
        (("0-7",), [{0, 1, 2, 3, 4, 5}]),
        (("0-1,4-5", "2-3,6-7"), [{0, 1, 4, 5}, {2, 3}]),
        (("0-5", "6-11"), [{0, 1, 2, 3, 4, 5}]),  # the mask leaves none of the second
        (("0-2", "3-5", ""), [{0, 1, 2}, {3, 4, 5}]),  # a node of memory alone
        (("0", "1", "2", *[""] * 7, "3-5"), [{0}, {1}, {2}, {3, 4, 5}]),  # node10 is the last
    ],
)
def test_nodes_are_those_of_the_processors_that_may_be_used(tmp_path, monkeypatch, lists, nodes):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    assert [set(node) for node in numa_nodes(nodes_of(tmp_path, *lists))] == nodes


def test_threads_are_bound_where_there_are_several_nodes_and_nothing_else_places_them(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    two = nodes_of(tmp_path / "two", "0-1", "2-3")
    assert bound_nodes(two) == (frozenset({0, 1}), frozenset({2, 3}))
    assert bound_nodes(nodes_of(tmp_path / "one", "0-3")) == ()
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    assert bound_nodes(two) == ()


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="this system has no affinity masks"
)
def test_bound_threads_stay_on_their_nodes_and_compute_the_same_bits():
    """Two processors stand for two nodes: of the three threads beside the caller's, one or two are
    on each.
    """
    usable = sorted(os.sched_getaffinity(0))
    first, last = usable[0], usable[-1]
    command = [sys.executable, "-c", ON_TWO_NODES, str(first), str(last)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    bits, *threads = run.stdout.splitlines()
    assert bits == product()
    assert f"True {usable}" in threads
    on_first, on_last = threads.count(f"False [{first}]"), threads.count(f"False [{last}]")
    assert on_first + on_last >= 3
    assert min(on_first, on_last) >= 1
