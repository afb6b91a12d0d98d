"""What happens when a rank with kernels of Triton ends, hangs, fails alone or is another one than
expected: ranks of one host that gather over torch.distributed, as on GPUs, here with gloo.

`test_rank_faults.py` has the same of ranks with the compiled kernels, which gather in shared memory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.test_ranks_triton import SIZES
from tests.forked_server import CAN_FORK
from tests.interpreter import numbers_as_on_a_gpu, quick_interpreter
from tests.lost_ranks import COMMON, RankPair, is_gone, leader_of, lose_while_it_reads
from tests.parity.random_models import save_random
from transformers import LlamaConfig

from freight import LLM, SamplingParams
from freight.engine import leader
from freight.engine.leader import Leader
from freight.errors import CapacityError, CheckpointError, RankError
from freight.parallel.distributed import host_store

pytestmark = [
    pytest.mark.skipif(not CAN_FORK, reason="the other rank is forked"),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton interprets the kernels"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles where there is a GPU"),
]

PROMPT = {"prompt_token_ids": list(range(1, 12))}
SHORT = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
TRITON: dict[str, Any] = {
    "kernels": "triton",
    "exact_products": True,
    "max_model_len": 64,
    "max_num_batched_tokens": 8,
    "max_num_seqs": 4,
    "block_size": 8,
    "check_ranks": False,
}
PING = 13  # a kind of question to torch's store
LOST = {signal.SIGKILL: "has ended", signal.SIGSTOP: "does not answer"}


@pytest.fixture(scope="module", autouse=True)
def mended_interpreter() -> Iterator[None]:
    with numbers_as_on_a_gpu(), quick_interpreter():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "llama"
    save_random(LlamaConfig(**SIZES), folder, torch.bfloat16)
    return str(folder)


@pytest.fixture
def gpu_like(pair: RankPair, model: str, monkeypatch: pytest.MonkeyPatch) -> RankPair:
    """Starts ranks with kernels of Triton."""
    monkeypatch.setenv("FREIGHT_TEST_INTERPRETER", "1")
    pair.model = model
    pair.usual = TRITON
    return pair


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    yield
    assert set(os.listdir("/dev/shm")) <= before


def tokens_of(llm: LLM) -> Any:
    return llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids


def test_a_rank_that_is_killed_while_nothing_runs_is_told_at_once(gpu_like: RankPair) -> None:
    llm, told = gpu_like.start(), threading.Event()
    llm.engine.on_lost(told.set)
    os.kill(gpu_like.pids[0], signal.SIGKILL)
    assert told.wait(1.0)
    with pytest.raises(RankError, match="rank 1 has ended with signal 9: the engine cannot go on"):
        tokens_of(llm)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_rank_that_is_lost_in_a_step_is_named(gpu_like: RankPair, number: int) -> None:
    llm = gpu_like.start(rank_timeout=1.5)
    sent: list[float] = []

    def lose() -> None:
        sent.append(time.monotonic())
        os.kill(gpu_like.pids[0], number)

    gpu_like.monkeypatch.setattr(leader, "_PATIENCE", 0.1)
    threading.Timer(0.3, lose).start()
    with pytest.raises(RankError, match=f"rank 1 {LOST[signal.Signals(number)]}.*cannot go on"):
        llm.generate([PROMPT] * 4, LONG)  # for seconds
    # the interpreter takes a second or two to the next gather
    assert time.monotonic() - sent[0] < 5.0 + (1.5 if number == signal.SIGSTOP else 0.0)
    leader_of(llm).close()
    assert is_gone(gpu_like.pids[0])


@pytest.mark.slow
@pytest.mark.parametrize("number", LOST)
def test_a_rank_that_is_lost_while_it_reads_weights_is_named(
    gpu_like: RankPair, number: signal.Signals
) -> None:
    sent = lose_while_it_reads(gpu_like.monkeypatch, number, lambda: gpu_like.pids[0])
    gpu_like.monkeypatch.setattr(leader, "_PATIENCE", 0.1)
    with pytest.raises(RankError, match=f"rank 1 {LOST[number]}.*: the engine cannot go on"):
        gpu_like.start("slow")
    assert time.monotonic() - sent[0] < 3.0
    assert is_gone(gpu_like.pids[0])


@pytest.mark.slow
def test_a_rank_that_stands_still_while_nothing_runs_is_named_by_the_next_step(
    gpu_like: RankPair,
) -> None:
    llm = gpu_like.start(rank_timeout=0.5)
    gpu_like.monkeypatch.setattr(leader, "_PATIENCE", 0.1)
    os.kill(gpu_like.pids[0], signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1 does not answer: the engine cannot go on"):
        tokens_of(llm)
    assert time.monotonic() - began < 4.0
    leader_of(llm).close()
    assert is_gone(gpu_like.pids[0])


@pytest.mark.parametrize("fault", ["memory", "cache"])
def test_a_rank_without_memory_for_its_part_refuses_the_start(
    gpu_like: RankPair, fault: str
) -> None:
    said = "rank 1: .*CUDA out of memory. Tried to allocate 20.00 GiB"
    with pytest.raises(CapacityError, match=said):
        gpu_like.start(fault)
    assert is_gone(gpu_like.pids[0])


@pytest.mark.slow
def test_a_step_for_which_a_rank_has_no_memory_is_computed_again(
    gpu_like: RankPair, caplog: pytest.LogCaptureFixture
) -> None:
    llm = gpu_like.start("memory 1")
    expected = tokens_of(llm)
    assert "OutOfMemoryError: CUDA out of memory." in caplog.text
    assert tokens_of(llm) == expected


@pytest.mark.slow
@pytest.mark.parametrize("at", ["open", "load"])
def test_a_file_of_the_weights_that_changes_between_the_ranks_refuses_the_start(
    gpu_like: RankPair, model: str, tmp_path: Path, at: str
) -> None:
    """Rank 1 would have other weights."""
    folder = tmp_path / "changed"
    shutil.copytree(model, folder)
    gpu_like.model = str(folder)
    name = "start" if at == "open" else "load"
    call = getattr(Leader, name)

    def change_and_call(self: Leader, *given: Any) -> Any:
        file = folder / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        return call(self, *given)

    gpu_like.monkeypatch.setattr(Leader, name, change_and_call)
    with pytest.raises((RankError, CheckpointError), match=r"changed|another model"):
        gpu_like.start()
    assert is_gone(gpu_like.pids[0])


def test_a_stranger_on_this_machine_finds_no_store(gpu_like: RankPair) -> None:
    """torch's server of a store would take orders from anybody who connects, as to leave each step."""
    before = listening(os.getpid())
    llm = gpu_like.start()
    expected = tokens_of(llm)
    pids = [os.getpid(), *gpu_like.pids]
    ports = set().union(*map(listening, pids)) - before
    for port in ports:  # those of gloo, which takes nobody whom it does not expect
        assert not is_store(port)
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 64):
            with socket.create_connection(("127.0.0.1", port)) as stranger, suppress(OSError):
                stranger.sendall(words)
    silent = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    assert tokens_of(llm) == expected
    for connection in silent:
        connection.close()


def is_store(port: int) -> bool:
    """Say whether torch's server of a store answers at a port: to a ping, behind its number."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(0.3)
        connection.sendall(struct.pack("<BIBI", 0, 0x3C85F7CE, PING, 7))
        with suppress(OSError):
            return connection.recv(4) == struct.pack("<I", 7)
    return False


def test_a_store_of_torch_would_be_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = host_store(listener)
        assert is_store(port)
        del store


def listening(pid: int) -> set[int]:
    """The TCP ports on which a process listens."""
    sockets = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            sockets.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    ports = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


@pytest.mark.slow  # two interpreters begin anew
@pytest.mark.parametrize("busy", [False, True])
def test_the_other_rank_ends_with_rank_0_however_that_ends(model: str, busy: bool) -> None:
    options = COMMON | TRITON | {"tensor_parallel_size": 2, "busy": busy}
    command = [sys.executable, "-m", "tests.rank_zero", model, json.dumps(options)]
    environ = os.environ | {"TRITON_INTERPRET": "1"}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as zero:
        assert zero.stdout is not None
        rank = int(zero.stdout.readline())
        time.sleep(0.5)
        zero.kill()
    assert is_gone(rank)
