"""Standard output that fails ends every verb that prints with one line, or quietly behind a closed
pipe.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tests.environment import without_options
from tests.forked_server import CAN_FORK, Forked
from tests.refusals import assert_names

from freight.cli.main import main

FREIGHT = [sys.executable, "-m", "freight"]
FAST = ["--version", "generate --help", "inspect demo", "generate demo --prompt x --max-tokens 2"]
MORE = [
    "env --json",
    "plan demo --memory 1GiB",
    "generate demo --prompt x --max-tokens 2 --json",
    "generate demo --prompt x --prompt y --max-tokens 2",
    "bench kernels --matrix 32x16 --rows 1 --only linear --seconds 0.001",
]
VERBS = [
    (FAST[0], False),  # to the end of the interpreter, which flushes
    *((line, True) for line in FAST[1:]),
    *(pytest.param(line, False, marks=pytest.mark.slow) for line in (*FAST[1:], *MORE)),
]


def run(line: str, stdout: int | None, forked: bool = False) -> tuple[int, str]:
    """(exit status, the last line of stderr) of `freight LINE` with this file as standard output;
    None: closed.
    """
    if forked and stdout is not None and CAN_FORK:
        process = Forked(line.split(), os.environ, "freight.__main__", stdout=stdout)
        assert process.stderr is not None
        with process.stderr as errors:
            said = errors.read()
        status = process.wait(300)
    else:
        command = [*FREIGHT, *line.split()]
        if stdout is None:
            command = ["bash", "-c", 'exec "$@" >&-', "-", *command]
        done = subprocess.run(
            command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=300, check=False
        )
        status, said = done.returncode, done.stderr
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    return status, (said.splitlines() or [""])[-1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize(("line", "forked"), VERBS)
def test_a_full_disk_is_one_line_and_1(line: str, forked: bool) -> None:
    with open("/dev/full", "wb") as full:
        code, said = run(line, full.fileno(), forked)
    assert (code, said.startswith("error: ")) == (1, True)
    assert_names(said, "standard output", "No space left on device")


@pytest.mark.parametrize(("line", "forked"), VERBS)
def test_a_closed_pipe_ends_quietly_with_141(line: str, forked: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        code, said = run(line, pipe.fileno(), forked)
    assert code == 141
    assert "error" not in said.lower()


def test_no_standard_output_is_one_line_and_1() -> None:
    code, said = run(FAST[0], None)
    assert (code, said.startswith("error: ")) == (1, True)
    assert_names(said, "standard output", "Bad file descriptor")


def test_a_file_that_cannot_grow_is_one_line_and_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["freight", "quantize", "demo", str(tmp_path / "out")])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))  # then a write fails with EFBIG
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: the disk of {tmp_path / 'out'} is full")
    assert "File too large" in error
    assert error.endswith("; nothing was left there")
    assert ended.value.code == 1
    assert list(tmp_path.iterdir()) == []


def test_variables_that_nothing_reads_are_named_once() -> None:
    given = {
        "FREIGHT_KV_CACHE_DTPYE": "fp8",
        "FREIGHT_ZQXJK": "1",
        "FREIGHT_TEST_KERNELS": "",
        "FREIGHT_SOAK_SECONDS": "5",
        "FREIGHT_SERVICE_HOST": "10.0.0.1",
        "FREIGHT_PORT_8000_TCP_ADDR": "10.0.0.1",
        "FREIGHT_API_KEY": "k",
        "FREIGHT_MODEL_ID": "demo",
        "FREIGHT_BLOCK_SIZE": "16",
    }
    plain, said = without_options(), []
    for environ in (plain | given, plain):
        done = subprocess.run(
            [*FREIGHT, "--version"], env=environ, capture_output=True, text=True, check=True
        )
        said.append(done.stderr.splitlines())
    (line,) = said[0]
    assert_names(line, "FREIGHT_KV_CACHE_DTPYE", "FREIGHT_KV_CACHE_DTYPE", "FREIGHT_ZQXJK")
    assert said[1] == []
