"""For all tests: Freight is imported before torch, so that its defaults for threads hold here as
they do for users.

FREIGHT_TEST_DEFAULT_DTYPE=float64 runs them in a process whose default dtype is that (`make
test-defaults`): what Freight computes does not depend on it.

A property is tried on 40 examples, and on 100 where slow tests run too (`make test-all`);
`tests/shares.py` says how a test has another number. The examples differ from run to run.

FREIGHT_TEST_KERNELS=folder runs them with the compiled kernels of that folder (`make sanitize`), on
the pool of csrc/parallel.cpp, which is checked with them; without it they use torch's. With
FREIGHT_TEST_TILES=emulated as well, the AMX build of that folder emulates its tile instructions
(`make test-tiles`), and is run as if the processor and the system had them.

FREIGHT_CPU_BUILD=avx2 runs them with that build of the kernels, in the processes that tests start
too. A run whose own process loaded another build ends at once; a child process that cannot load it
fails.

FREIGHT_TEST_REMOTE='qemu-aarch64 … driver …/freight_neon.so' runs them with that library, in the
process that the command starts (tests/kernels/test_arm.py).
"""

import gc
import os
import shlex
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    # several processes share the cores: a thread that spins would wait for one that is not
    # scheduled
    os.environ["GOMP_SPINCOUNT"] = "0"

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # of a command in the background of a script: children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

import tempfile

os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(
    prefix="freight-tests-"
)  # what is measured once is not the user's

import pytest
import typer.main
from hypothesis import settings

import freight  # noqa: F401

# isort: split
import torch

from freight.lab.bench import timing

# the workers share the cores: threads of one that wait for each other would wait for another worker.
# What threads do is tested where tests set their number, and in the processes that tests start
torch.set_num_threads(
    max(1, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
)

if (
    not torch.cuda.is_available()
):  # read when Triton is imported, which torch and transformers do at their own times
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("freight", deadline=None, max_examples=40)  # a busy machine is no failure
settings.register_profile("all", parent=settings.get_profile("freight"), max_examples=100)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("freight" if config.option.markexpr else "all")
    name = os.environ.get("FREIGHT_TEST_DEFAULT_DTYPE")
    if name:
        torch.set_default_dtype(getattr(torch, name))
    folder = os.environ.get("FREIGHT_TEST_KERNELS")
    if folder:
        from freight.kernels.cpu import library

        library.FOLDER = Path(folder)
        library._gomp_parallel = lambda: None
        if os.environ.get("FREIGHT_TEST_TILES") == "emulated":
            features = (*library.cpu_features(), "amx_tile", "amx_bf16", "amx_int8")
            library.cpu_features = lambda: features
            library.tile_obstacle = lambda: ""
        assert library.runnable(), f"no build in {folder} runs here"
    build = os.environ.get("FREIGHT_CPU_BUILD")
    if build:
        from freight.kernels.cpu import library

        assert library.load().build == build
    command = shlex.split(os.environ.get("FREIGHT_TEST_REMOTE", ""))
    if command:
        from tests.kernels.arm.remote import remote_library

        from freight.kernels.cpu import library

        build = Path(command[-1]).stem.removeprefix("freight_")
        start = cache(lambda: remote_library(build, command))
        library.runnable = lambda features=None, folder=None: (build,)
        library.load = lambda name=None: start()


@pytest.fixture(scope="session", autouse=True)
def small_memory_probe() -> Iterator[None]:
    """A benchmark that a test runs reads 2 MiB to measure the memory's speed, not four times the
    last-level cache: where that has 480 MiB, each run would take seconds for 2 GB.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "bytes_beyond_caches", lambda: 2**20)
        yield


@pytest.fixture(scope="session", autouse=True)
def commands_are_made_once() -> Iterator[None]:
    """Typer makes the commands of all verbs anew for each command line, and tests run hundreds of
    them in one process.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


# Files whose cases are alike and take long. Of each function, every value runs in some case (1), or
# every pair of values (2). The other cases are `slow`.
STRENGTHS = {
    "tests/kernels/triton/": 1,
    "tests/kernels/test_group_scales.py": 1,
    "tests/kernels/test_reference_states.py": 1,
    "tests/parity/test_stateful.py": 1,
    "tests/e2e/test_experts.py": 1,
    "tests/e2e/test_latent_experts.py": 1,
    "tests/e2e/test_lost_steps.py": 1,
    "tests/e2e/test_state_equivalences.py::test_nor_on_other_kernels": 1,
    "tests/formats/test_hybrids.py": 1,
    "tests/formats/test_mixtures.py": 1,
}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Spare Python's collector the millions of objects that imports and cases leave, and that stay:
    going through them again and again was half of the time that it took to collect the tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)  # of 700 new objects, few are garbage in cycles
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what modules hold is freed at exit, where Triton's would be reported as leaked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tests.covering import choose, leave_out

    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in functions.items():
        strengths = [one for prefix, one in STRENGTHS.items() if name.startswith(prefix)]
        if not strengths:
            continue
        rows = [tuple(map(repr, case.callspec.params.values())) for case in cases]
        chosen = {*choose(rows, strengths[0])}
        for place, case in enumerate(cases):
            if place not in chosen:
                leave_out(case)
