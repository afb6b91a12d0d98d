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
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path

import pytest
from tests.environment import without_options
from tests.forked_server import CAN_FORK, Forked
from tests.lost_ranks import BASE, COMMON, RankPair, leader_of, tokens_of
from tests.machines import free_port, other_machine, two_machines
from tests.refusals import assert_names, refuses
from tests.serving import (
    ServeProcess,
    children_of,
    completion_of,
    freight_serve,
    has_ended,
)

from freight import LLM
from freight.engine import node
from freight.errors import ConfigError, RankError
from freight.kernels.cpu import library
from freight.settings.engine import EngineArgs
from freight.settings.nodes import OWN, differences, given, with_own

pytestmark = [
    pytest.mark.skipif(not CAN_FORK, reason="the other rank is forked"),
    pytest.mark.skipif(not library.installed(), reason="ranks gather in the compiled kernels"),
]


def test_the_other_machine_ends_with_rank_0(pair: RankPair, tokens_of_one_rank: list[int]) -> None:
    llm = pair.start(machines=True)
    assert tokens_of(llm) == tokens_of_one_rank
    leader_of(llm).close()
    assert pair.ended() == 0
    assert all(map(has_ended, pair.pids))


def test_other_options_are_refused_by_name_and_rank_0_waits_on(pair: RankPair) -> None:
    began = time.monotonic()
    with refuses(RankError, "node 1", "2 s", "--join-timeout", "--node-rank 1"):
        pair.start(machines=True, theirs={"kv_cache_dtype": "fp8", "seed": 3}, join_timeout=2.0)
    assert time.monotonic() - began < 6
    refused = pair.ended()
    assert isinstance(refused, ConfigError)
    assert_names(
        str(refused), "--kv-cache-dtype is 'fp8'", "rank 0 'auto'", "--seed is 3", "rank 0 0"
    )


def test_another_version_is_refused(pair: RankPair) -> None:
    pair.monkeypatch.setattr(node, "version", lambda: "0.0.1")
    with pytest.raises(RankError, match="node 1 did not come"):
        pair.start(machines=True, join_timeout=1.0)
    assert "it has Freight 0.0.1, rank 0 " in str(pair.ended())


def test_other_weights_are_refused(pair: RankPair, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(BASE, other)
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\1\1")
    with refuses(RankError, "rank 1 (node 1)", "another model"):
        pair.start(machines=True, theirs={"model": str(other)})
    assert pair.ended() == 1


def test_rank_0_that_is_not_there_is_not_waited_for_forever() -> None:
    args = EngineArgs(BASE, **COMMON, tensor_parallel_size=2, **two_machines(join_timeout=0.6))
    with other_machine(args) as machine:
        ended = machine.wait()
    assert isinstance(ended, RankError)
    assert f"rank 0 was not at 127.0.0.1:{args.master_port} within 0.6 s" in str(ended)


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = two_machines(master_port=port)
        with pytest.raises(ConfigError, match=f"--master-port {port}: rank 0 cannot listen there"):
            LLM(BASE, **COMMON, tensor_parallel_size=2, **options)


def test_strangers_at_the_port_are_not_ranks(pair: RankPair, tokens_of_one_rank: list[int]) -> None:
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
        assert tokens_of(pair.start(machines=True, master_port=port)) == tokens_of_one_rank
    finally:
        stop.set()
        thread.join()


def test_a_fork_of_rank_0_ends_and_rank_0_goes_on(
    pair: RankPair, tokens_of_one_rank: list[int]
) -> None:
    """As multiprocessing's children do in a program that has an LLM: gloo's threads are not there."""
    llm = pair.start(machines=True)
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
    assert tokens_of(llm) == tokens_of_one_rank


def test_machines_meet_over_ipv6(pair: RankPair, tokens_of_one_rank: list[int]) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    assert tokens_of(pair.start(machines=True, master_addr="::1")) == tokens_of_one_rank


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
