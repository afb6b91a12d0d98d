"""The arm64 builds of the compiled kernels, compiled here and run by QEMU. Debian's packages:
cmake, g++-aarch64-linux-gnu, qemu-user.

The kernels' own tests run once more in a process whose calls of C functions go to the emulator
(arm/remote.py), so an arm64 build is held to the same tolerances and the same rule about bits.
Emulation says nothing about speed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.kernels.arm.remote import remote_library
from tests.kernels.test_cpu_attention import make_cache

from freight.fp8.formats import Format
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.operands.attention import AttentionCall

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "arm64"
COMPILER, EMULATOR, LIBRARIES = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
PROCESSORS = {
    "neon": "cortex-a72",
    "neon_bf16": "max",
}  # the first has no bfloat16, nor float16 arithmetic
MISSING = [tool for tool in ("cmake", COMPILER, EMULATOR) if shutil.which(tool) is None]
KERNELS = (
    "cpu_linear",
    "cpu_int8",
    "cpu_mxfp4",
    "cpu_four_bit",
    "cpu_int8_groups",
    "cpu_blocks",
    "cpu_experts",
    "cpu_route",
    "cpu_attention",
    "cpu_store",
    "cpu_elementwise",
    "cpu_rowwise",
    "cpu_states",
    "cpu_by_head",
    "adapters",
)
# Not for other processes, or too long in emulation; `test_attention_of_a_row_has_the_same_bits`
# stands for the third.
LEFT_OUT = ("threads_of_our_own", "python_threads", "chunks_batches_and_threads", "a_recording")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
]


def run(*command: object, **environment: str) -> None:
    answer = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout[-6000:] + answer.stderr[-6000:]


@pytest.fixture(scope="module")
def driver() -> Path:
    BUILD.mkdir(parents=True, exist_ok=True)
    path = BUILD / "driver"
    run(
        COMPILER,
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Werror",
        ROOT / "tests/kernels/arm/driver.cpp",
        "-o",
        path,
        "-ldl",
    )
    return path


@pytest.fixture(scope="module", params=PROCESSORS)
def command(request: pytest.FixtureRequest, driver: Path) -> list[str]:
    """What starts the emulator with a build."""
    system = (
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={COMPILER}",
    )
    run("cmake", "-S", ROOT / "csrc", "-B", BUILD, *system)
    target = f"freight_{request.param}"
    run("cmake", "--build", BUILD, "-j2", "--target", target)
    return [
        EMULATOR,
        "-cpu",
        PROCESSORS[request.param],
        "-L",
        LIBRARIES,
        str(driver),
        str(BUILD / f"{target}.so"),
    ]


@pytest.fixture(scope="module")
def kernels(command: list[str]) -> CpuKernels:
    return CpuKernels(remote_library("arm64", command))


@pytest.mark.parametrize("name", KERNELS)
def test_the_tests_of_the_kernels_pass_in_emulation(command: list[str], name: str) -> None:
    run(
        *(
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-p",
            "no:cacheprovider",
            f"tests/kernels/test_{name}.py",
        ),
        *("-k", " and ".join(f"not {test}" for test in LEFT_OUT)),
        FREIGHT_TEST_REMOTE=shlex.join(command),
    )


@pytest.mark.parametrize(
    ("format", "scales"),
    [
        (Format.FLOAT16, None),
        (Format.BFLOAT16, None),
        (Format.E4M3FN, "token"),
        (Format.INT8, "token"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_a_row_has_the_same_bits(kernels: CpuKernels, format, scales, dtype) -> None:
    """Together, one at a time, and by any number of threads, across the end of a tile and of a
    split.
    """
    attention = kernels.attention
    length, rows = 1030, 20
    cache = make_cache(format, scales, [length], 2, 40)
    q = torch.randn(rows, 6, 40).to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = attention(q, cache.pages, cache.batch([rows]).sequences(0), AttentionCall(0.15))
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(
                attention(q, cache.pages, cache.batch([rows]).sequences(0), AttentionCall(0.15)),
                whole,
            )
            for row in range(rows):
                batch = cache.batch([1], [length - rows + row + 1]).sequences(0)
                assert torch.equal(
                    attention(q[row : row + 1], cache.pages, batch, AttentionCall(0.15)),
                    whole[row : row + 1],
                )
    finally:
        torch.set_num_threads(before)
