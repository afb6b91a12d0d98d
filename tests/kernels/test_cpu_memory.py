"""What the compiled kernels do when the system has no memory for them: an error in Python; the
process goes on.
"""

from __future__ import annotations

import os
import subprocess
import sys

from freight.kernels.cpu import library

SCRIPT = r"""
import re, resource
from pathlib import Path
import torch
from freight.errors import CapacityError
from freight.operands.weight import Weight
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels

def fails(call, room):
    # What `call` raises when no more than `room` bytes can be mapped beside what is mapped already.
    mapped = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (mapped + room, hard))
    try:
        call()
    except CapacityError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    return "nothing was raised"

def fails_at_last(call, room):
    # One thread may take both rows where the other is late, and then needs no more than it has.
    found = (fails(call, room) for _ in range(1000))
    return next((reason for reason in found if reason != "nothing was raised"), "nothing was raised")

def attempt(loaded, size):
    # results of 4 * size bytes fit; each thread needs as much for a row of floats
    add_rms_norm = CpuKernels(loaded).add_rms_norm
    x, ones = torch.randn(2, size).bfloat16(), torch.ones(size, dtype=torch.bfloat16)
    print(fails_at_last(lambda: add_rms_norm(x, None, ones, 1e-6), 5 * size))
    norm = add_rms_norm(x, None, ones, 1e-6)[1]
    assert torch.equal(norm[1:], add_rms_norm(x[1:], None, ones, 1e-6)[1])

    # the rows are staged: 16 * size bytes
    weight = CpuKernels(loaded).pack(Weight(torch.ones(16, size // 128)))
    linear, x = CpuKernels(loaded).linear, torch.ones(512, size // 128)
    print(fails_at_last(lambda: linear(x, weight, None), 5 * size))
    assert torch.equal(linear(x, weight, None), torch.full((512, 16), size / 128))

for build in library.runnable():
    for threads in (1, 2):  # working memory is kept, so the second needs more
        torch.set_num_threads(threads)
        torch.ones(2**20).sum()  # starts torch's threads
        attempt(library.load(build), threads * 2**20)
"""


def test_no_memory_is_an_error_and_not_the_end_of_the_process() -> None:
    command = [sys.executable, "-c", "import freight" + SCRIPT]
    # glibc: what is large is mapped, and not found in what the heap has left
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    reason = "failed: there is no memory left for its working space; lower --max-num-batched-tokens"
    expected = [f"freight_add_rms_norm {reason}", f"freight_linear {reason}"]
    assert ran.stdout.splitlines() == expected * 2 * len(library.runnable())
