"""How OpenMP's threads wait: what GNU OpenMP has read in processes that Freight starts, and what is
said to users.
"""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.openmp_display import given, has_read
from tests.refusals import assert_names
from tests.serving import ServeProcess

from freight.base import openmp

gnu = pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP is torch's on Linux alone")
SET = {"GOMP_SPINCOUNT": "5"}
WAITS = {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "1"}
ENV = ("-m", "freight", "env")
TOLD = "torch was imported before freight: threads that wait spin for milliseconds"


@cache
def run(*argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python ARGV` with these variables, once for all tests: each takes seconds to load torch."""
    command = [sys.executable, *argv]
    return subprocess.run(
        command, env=given(**variables), capture_output=True, text=True, check=True
    )


@pytest.fixture(scope="module")
def ours() -> int:
    """What Freight sets by itself."""
    code = "import freight, os; print(os.environ['GOMP_SPINCOUNT'])"
    return int(run("-c", code).stdout)


@gnu
def test_a_command_sets_it_before_torch_is_loaded(ours: int) -> None:
    assert has_read(run(*ENV).stderr) == {ours}


@gnu
def test_what_the_user_has_set_wins() -> None:
    assert has_read(run(*ENV, **WAITS).stderr) == {30_000_000_000}


@gnu
@pytest.mark.slow  # tests/e2e/test_serve.py has a server without variables
@pytest.mark.parametrize("variables", [{}, SET])
def test_the_process_of_the_engine_has_it_too(ours: int, variables: dict[str, str]) -> None:
    """The server's own process loads no torch, so the one that tells is the engine's."""
    server = ServeProcess("demo", ["--kv-cache-memory", "16MiB"], environ=given(**variables))
    try:
        server.wait_until_healthy()
        torch_in = [
            name
            for name, pid in server.children().items()
            if "libgomp" in Path(f"/proc/{pid}/maps").read_text()
        ]
        assert torch_in == ["worker"]
        assert has_read(server.said) == {int(variables.get("GOMP_SPINCOUNT", ours))}
        assert TOLD not in server.said  # freight came before torch
    finally:
        server.close()


@gnu
def test_a_process_that_loads_torch_first_is_told() -> None:
    code = "import torch, freight; freight.LLM('demo', threads=2, kv_cache_memory='16MiB')"
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core: nothing waits")
    said = run("-c", code).stderr
    assert has_read(said) == {300_000}
    assert said.count(TOLD) == 1
    assert openmp.long_waits({}).startswith(TOLD)
    assert openmp.long_waits(SET) == ""


@gnu
@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"GOMP_SPINCOUNT": " 12K"},
        {"GOMP_SPINCOUNT": "7", "OMP_WAIT_POLICY": "active"},
        {"GOMP_SPINCOUNT": "many"},
        {"GOMP_SPINCOUNT": "INFINITE"},
        {"OMP_WAIT_POLICY": " Passive "},
        {"OMP_WAIT_POLICY": "ACTIVE"},
        {"OMP_WAIT_POLICY": "never"},
    ],
)
def test_spins_are_those_that_gnu_openmp_reads(variables: dict[str, str]) -> None:
    (library,) = (Path(torch.__file__).parent / "lib").glob("libgomp*")
    found = has_read(run("-c", f"import ctypes; ctypes.CDLL({str(library)!r})", **variables).stderr)
    assert found == {openmp.spins(variables)} or (
        variables.get("GOMP_SPINCOUNT") == "INFINITE" and min(found) > 10**10
    )


@gnu
def test_long_waits_are_named_with_their_cause() -> None:
    assert "unset it" in openmp.long_waits({"OMP_WAIT_POLICY": "active"})
    assert openmp.long_waits({"GOMP_SPINCOUNT": "300k"}).startswith("GOMP_SPINCOUNT=300k: ")
    assert openmp.long_waits({"GOMP_SPINCOUNT": "10000"}) == ""
    assert openmp.long_waits({"OMP_WAIT_POLICY": "passive"}) == ""


@gnu
def test_env_warns_of_variables_that_make_steps_slow() -> None:
    text = run(*ENV, **WAITS).stdout
    (note,) = re.findall(r"^threads note +(.*)$", text, re.M)
    assert_names(note, "OMP_WAIT_POLICY=active", "unset it")
    assert "OMP_WAIT_POLICY active" in text
    assert re.search(r"^threads note +none$", run(*ENV).stdout, re.M)


def test_env_warns_of_fewer_threads_than_cores() -> None:
    said = openmp.few_threads({"OMP_NUM_THREADS": "1"}, 1, 2)
    assert said.startswith("OMP_NUM_THREADS=1")
    assert "--threads 2" in said
    assert openmp.few_threads({"OMP_NUM_THREADS": "2"}, 2, 2) == ""
    assert openmp.few_threads({}, 1, 2) == ""
    if len(os.sched_getaffinity(0)) > 1:
        assert "computes with 1 of " in run(*ENV, **WAITS).stdout
