"""Ranks on two machines, which are two addresses of this one: what is refused, and what happens when
one ends, hangs, or never comes.

Rank 0 is this process. The other machine is a thread, whose ranks are forked.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.environment import without_options
from tests.forked_server import CAN_FORK, Forked, forked
from tests.lost_ranks import lose_while_it_reads
from tests.machines import Machine, free_port, other_machine, two_machines
from tests.refusals import assert_names, refuses
from tests.serving import (
    ServeProcess,
    children_of,
    completion_of,
    freight_serve,
    has_ended,
)

from freight import LLM, SamplingParams
from freight.engine import leader, node
from freight.engine.leader import Leader
from freight.errors import ConfigError, RankError
from freight.kernels.cpu import library
from freight.settings.engine import EngineArgs
from freight.settings.nodes import OWN, differences, given, with_own

BASE = Path(__file__).parents[1] / "fixtures" / "base_bf16"
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(1, 40))}
GIVEN = {"skip_tokenizer_init": True, "threads": 1, "kv_cache_memory": "2MiB"}
pytestmark = [
    pytest.mark.skipif(not CAN_FORK, reason="the other rank is forked"),
    pytest.mark.skipif(not library.installed(), reason="ranks gather in the compiled kernels"),
]


class Both:
    """Rank 0 here, and another machine beside it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch, self.folder = monkeypatch, folder
        self.pids: list[int] = []  # of the other machine
        self.llms: list[LLM] = []
        self.machine: Machine | None = None

    def start(self, fault: str = "", theirs: dict[str, Any] | None = None, **options: Any) -> LLM:
        """theirs: what the other machine has otherwise."""
        environ = os.environ | {"FREIGHT_TEST_PAGES": str(self.folder / "pages.pt")}
        environ["FREIGHT_TEST_FAULT"] = fault

        def spawn(files: Any) -> Forked:
            command = ["python", "-m", "tests.rank_follower", *map(str, files)]
            process = forked(command, files, environ)
            self.pids.append(process.pid)
            return process

        self.monkeypatch.setattr(leader, "spawn", spawn)
        given = GIVEN | {"tensor_parallel_size": 2} | two_machines() | options
        args = EngineArgs(**{"model": str(BASE)} | given | (theirs or {}))
        with other_machine(args) as self.machine:
            self.llms.append(LLM(str(BASE), **given))
        return self.llms[-1]

    def ended(self) -> Any:
        assert self.machine is not None
        return self.machine.wait()


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Both]:
    made = Both(monkeypatch, tmp_path)
    yield made
    for llm in made.llms:
        leader_of(llm).close()
    if made.machine is not None:
        made.machine.wait()


def leader_of(llm: LLM) -> Leader:
    found = llm.engine.runner.leader
    assert isinstance(found, Leader)
    return found


def tokens_of(llm: LLM, prompt: Any = PROMPT) -> Any:
    return llm.generate(prompt, GREEDY)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def expected() -> Any:
    return tokens_of(LLM(str(BASE), **GIVEN))


def test_the_other_machine_ends_with_rank_0(both: Both, expected: Any) -> None:
    llm = both.start()
    assert tokens_of(llm) == expected
    leader_of(llm).close()
    assert both.ended() == 0
    assert all(map(has_ended, both.pids))


def test_other_options_are_refused_by_name_and_rank_0_waits_on(both: Both) -> None:
    began = time.monotonic()
    with refuses(RankError, "node 1", "2 s", "--join-timeout", "--node-rank 1"):
        both.start(theirs={"kv_cache_dtype": "fp8", "seed": 3}, join_timeout=2.0)
    assert time.monotonic() - began < 6
    refused = both.ended()
    assert isinstance(refused, ConfigError)
    assert_names(
        str(refused), "--kv-cache-dtype is 'fp8'", "rank 0 'auto'", "--seed is 3", "rank 0 0"
    )


def test_another_version_is_refused(both: Both) -> None:
    both.monkeypatch.setattr(node, "version", lambda: "0.0.1")
    with pytest.raises(RankError, match="node 1 did not come"):
        both.start(join_timeout=1.0)
    assert "it has Freight 0.0.1, rank 0 " in str(both.ended())


def test_other_weights_are_refused(both: Both, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(BASE, other)
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\1\1")
    with refuses(RankError, "rank 1 (node 1)", "another model"):
        both.start(theirs={"model": str(other)})
    assert both.ended() == 1


def test_rank_0_that_is_not_there_is_not_waited_for_forever() -> None:
    args = EngineArgs(str(BASE), **GIVEN, tensor_parallel_size=2, **two_machines(join_timeout=0.6))
    with other_machine(args) as machine:
        ended = machine.wait()
    assert isinstance(ended, RankError)
    assert f"rank 0 was not at 127.0.0.1:{args.master_port} within 0.6 s" in str(ended)


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = two_machines(master_port=port)
        with pytest.raises(ConfigError, match=f"--master-port {port}: rank 0 cannot listen there"):
            LLM(str(BASE), **GIVEN, tensor_parallel_size=2, **options)


def test_strangers_at_the_port_are_not_ranks(both: Both, expected: Any) -> None:
    port, stop = free_port(), threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            try:
                with socket.create_connection(("127.0.0.1", port), 0.2) as connection:
                    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            except OSError:
                time.sleep(0.01)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        assert tokens_of(both.start(master_port=port)) == expected
    finally:
        stop.set()
        thread.join()


def test_a_rank_that_is_killed_in_a_step_is_named_with_its_machine(both: Both) -> None:
    llm = both.start(kv_cache_memory="64MiB")
    tokens_of(llm)
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(both.pids[0], signal.SIGKILL)

    threading.Timer(0.2, kill).start()
    with refuses(RankError, "rank 1 (node 1) has ended"):
        llm.generate([PROMPT] * 200, LONG)  # for seconds
    assert time.monotonic() - killed[0] < 1.0
    assert both.ended() == 1


LOST = {signal.SIGKILL: "has ended", signal.SIGSTOP: "does not answer"}


@pytest.mark.parametrize("number", LOST)
def test_a_rank_that_is_lost_while_it_reads_weights_is_named_with_its_machine(
    both: Both, number: signal.Signals
) -> None:
    """It would read them for a minute. Of a rank that hangs nothing is left either."""
    sent = lose_while_it_reads(both.monkeypatch, number, lambda _: both.pids[0])
    both.monkeypatch.setattr(node, "_PATIENCE", 0.1)  # then a rank that hangs is killed
    with pytest.raises(RankError, match=rf"rank 1 \(node 1\) {LOST[number]}: the engine cannot"):
        both.start("slow")
    assert time.monotonic() - sent[0] < 3.0  # a second of it is for a farewell
    assert both.ended() == 1
    assert all(map(has_ended, both.pids))


def test_a_rank_that_is_killed_while_nothing_runs_is_told_at_once(both: Both) -> None:
    llm, told = both.start(), threading.Event()
    llm.engine.on_lost(told.set)
    os.kill(both.pids[0], signal.SIGKILL)
    assert told.wait(1.0)


def test_a_rank_that_hangs_is_named_within_twice_its_time(both: Both) -> None:
    llm = both.start(rank_timeout=1.0)
    tokens_of(llm)
    both.monkeypatch.setattr(node, "_PATIENCE", 0.1)  # then it is killed
    os.kill(both.pids[0], signal.SIGSTOP)
    began = time.monotonic()
    with refuses(RankError, "rank 1 (node 1)", "not answer"):
        tokens_of(llm)
    assert time.monotonic() - began < 5.0
    leader_of(llm).close()
    assert both.ended() == 1
    assert all(map(has_ended, both.pids))


def test_a_fork_of_rank_0_ends_and_rank_0_goes_on(both: Both, expected: Any) -> None:
    """As multiprocessing's children do in a program that has an LLM: gloo's threads are not there."""
    llm = both.start()
    child = os.fork()
    if child == 0:
        os._exit(0)
    deadline = time.monotonic() + 10
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the fork hangs")
        time.sleep(0.01)
    assert tokens_of(llm) == expected


def test_machines_meet_over_ipv6(both: Both, expected: Any) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    assert tokens_of(both.start(master_addr="::1")) == expected


def test_ranks_of_another_machine_get_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a server's command may be that of the others'."""
    serve = import_module("freight.cli.serve")
    seen: dict[str, str] = {}

    def join(*_: object) -> int:
        seen.update(os.environ)
        return 0

    monkeypatch.setenv("FREIGHT_API_KEY", "sk-1")
    monkeypatch.setattr(node, "join_rank_0", join)
    monkeypatch.setattr(serve, "log_to_stderr", lambda: None)
    assert serve._join(EngineArgs(), None, False) == 0
    assert "PATH" in seen
    assert "FREIGHT_API_KEY" not in seen


@pytest.mark.parametrize("fault", ["step 4", "late 4", "step 1"])
def test_a_step_that_fails_on_one_rank_is_computed_again(
    both: Both, expected: Any, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    llm = both.start(fault)
    assert tokens_of(llm) == expected
    assert tokens_of(llm) == expected
    assert "CapacityError: no memory on this rank" in caplog.text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nnodes": 0}, "--nnodes 0.*≥ 1"),
        ({"node_rank": 1}, "--node-rank 1.*--nnodes"),
        ({"nnodes": 2}, "multiple of 2.* 1"),
        ({"nnodes": 2, "tensor_parallel_size": 2}, "add --master-addr"),
        ({"nnodes": 2, "node_rank": 2}, "--node-rank 2.*0 to 1"),
        ({"master_port": 70000}, "--master-port 70000.*≥ 1.*65535"),
        ({"join_timeout": 0}, "--join-timeout 0"),
        ({"nnodes": 2, "kv_store": "store"}, "rank 0 maps the caches"),
        ({"nnodes": 2, "node_rank": 1}, "freight serve"),
    ],
)
def test_options_of_machines_that_cannot_be_are_refused(options: dict[str, Any], says: str) -> None:
    several = {"tensor_parallel_size": 2, "master_addr": "127.0.0.1"}
    if len(options) > 1 and "tensor_parallel_size" not in options:
        options = several | options
    with pytest.raises(ConfigError, match=says):
        LLM(str(BASE), skip_tokenizer_init=True, **options)


def test_every_option_is_compared_or_a_machine_s_own() -> None:
    assert {field.name for field in fields(EngineArgs)} > {*OWN}
    args = EngineArgs(nnodes=2, tensor_parallel_size=2, master_addr="a")
    other = replace(args, **dict.fromkeys(OWN, "b"))
    assert differences(args, given(other)) == []
    assert with_own(args, given(other)) == other


@pytest.mark.slow  # starts a server, another machine and their ranks, twice
def test_servers_of_two_machines_begin_again_after_rank_0_was_killed() -> None:
    common = ["--threads", "1", "--kv-cache-memory", "64MiB"]
    with freight_serve("demo", common) as url:
        expected = completion_of(url)
    where = ["-tp", "4", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port"]
    where += [str(free_port()), "--restart-engine", *common]
    environ = without_options()
    other = Forked(["serve", "demo", *where, "--node-rank", "1"], environ)
    said: list[str] = []
    assert other.stderr is not None
    reader = threading.Thread(target=said.extend, args=(other.stderr,), daemon=True)
    reader.start()
    server = ServeProcess("demo", [*where, "--node-rank", "0"], forked=True)
    try:
        assert completion_of(server.wait_until_healthy()) == expected
        engine, ranks = server.children()["worker"], children_of(other.pid)
        assert len(ranks) == 2
        os.kill(engine, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while not all(map(has_ended, ranks)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        while server.children().get("worker") in (None, engine):
            time.sleep(0.05)
        assert completion_of(server.wait_until_healthy()) == expected
        ranks = children_of(other.pid)
        os.kill(ranks[0], signal.SIGKILL)  # of machine 1
        while server.children().get("worker") is not None and not all(map(has_ended, ranks)):
            time.sleep(0.05)
        time.sleep(1)
        assert completion_of(server.wait_until_healthy()) == expected
        assert_names(server.said, "rank 2 (node 1) has ended")
        assert server.stop() == 0
        assert other.wait(30) == 0
        reader.join(10)
        assert_names("".join(said), "node 1 waits for rank 0")
        assert_names("".join(said), "rank 0 has ended", "node 1")
    finally:
        server.close()
        other.kill()
        other.wait(30)
        reader.join(10)
        other.stderr.close()
