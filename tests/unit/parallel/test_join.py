"""How ranks of other machines come to rank 0, among strangers who connect to its port as well."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.refusals import assert_names, refuses

from freight.base.version import version
from freight.errors import ConfigError, RankError
from freight.parallel import join, messages
from freight.parallel.join import Join, Meeting, come_to
from freight.parallel.messages import Kind
from freight.settings.engine import EngineArgs
from freight.settings.nodes import given


def args_of(nodes: int = 2, **options: Any) -> EngineArgs:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    usual = {"master_addr": "127.0.0.1", "master_port": port, "join_timeout": 20.0}
    return EngineArgs(nnodes=nodes, tensor_parallel_size=nodes, **usual | options)


def join_of(args: EngineArgs, rank: int = 1) -> Join:
    return Join(version(), given(args), None, rank, (0, 1), 2)


class Waiting:
    """Rank 0, which waits in a thread."""

    def __init__(self, args: EngineArgs) -> None:
        self.meeting = Meeting(args)
        self.ended: list[Any] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.ended.append(self.meeting.accept(None))
        except Exception as error:
            self.ended.append(error)

    def result(self, seconds: float = 10.0) -> Any:
        self.thread.join(seconds)
        assert self.ended, "rank 0 waits still"
        return self.ended[0]


@contextmanager
def waiting(args: EngineArgs) -> Iterator[Waiting]:
    one = Waiting(args)
    try:
        yield one
    finally:
        one.meeting.close()
        for come in one.ended:
            for connection, _ in come.values() if isinstance(come, dict) else ():
                connection.close()


def stranger(args: EngineArgs, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", args.master_port), 5)
    try:
        connection.sendall(data)
    except OSError:  # rank 0 has closed it meanwhile
        connection.close()
        raise
    return connection


def message(text: str, kind: int = Kind.JOIN) -> bytes:
    data = text.encode()
    return struct.pack("<BI", kind, len(data)) + data


def test_who_says_nothing_keeps_nobody_waiting() -> None:
    args = args_of()
    with waiting(args) as rank_0:
        silent = [stranger(args, b"\x0c" * (index % 2)) for index in range(8)]
        began = time.monotonic()
        with come_to(args, join_of(args)):
            assert [*rank_0.result()] == [1]
        assert time.monotonic() - began < join._HELLO_SECONDS / 2
        for connection in silent:
            connection.close()


def test_more_strangers_than_there_are_places_for_are_hung_up_on() -> None:
    args = args_of()
    with waiting(args) as rank_0:
        silent = [stranger(args) for _ in range(join._MOST_VISITORS + 2)]
        assert silent[0].recv(1) == b""
        with come_to(args, join_of(args)):
            assert [*rank_0.result()] == [1]
        for connection in silent:
            connection.close()


@pytest.mark.parametrize("trickles", [False, True])
def test_strangers_do_not_put_off_the_deadline(trickles: bool) -> None:
    args, stop = args_of(join_timeout=0.5), threading.Event()

    def disturb() -> None:
        while not stop.wait(0.01):
            try:
                with stranger(args, b"\x0c\xff\x00\x00\x00") as connection:
                    while trickles and not stop.wait(0.1):
                        connection.sendall(b" ")
            except OSError:
                continue

    threads = [threading.Thread(target=disturb) for _ in range(4)]
    began = time.monotonic()
    with waiting(args) as rank_0:
        for thread in threads:
            thread.start()
        try:
            ended = rank_0.result()
        finally:
            stop.set()
    for thread in threads:
        thread.join()
    assert isinstance(ended, RankError)
    assert "node 1 did not come" in str(ended)
    assert time.monotonic() - began < 3


def wrong(**values: Any) -> str:
    right = {"version": version(), "options": {}, "random_shape": None, "rank": 1}
    return json.dumps(right | {"processors": None, "cores": 1} | values)


@pytest.mark.parametrize(
    "data",
    [
        message("[" * 200_000),
        message(wrong(options={"seed": None}).replace("null}", "[" * 200_000)),
        message("[]"),
        message("3"),
        message("{}"),
        message('"processors"'),
        message(wrong(version="\ud800")),
        message(wrong(version="0\nfreight: all is well")),
        message(wrong(version=["x"] * 1000)),
        message(wrong(random_shape="\ud800")),
        message(wrong(rank=True)),
        message(wrong(rank=1.0)),
        message(wrong(processors=["0"])),
        message(wrong(processors=5)),
        message(wrong(cores=None)),
        message(wrong(options=[])),
        message(wrong(), Kind.START),
        message(wrong(), 99),
        message(wrong()) + b"more",
        b"\x0c\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_a_stranger_s_words_are_hung_up_on(data: bytes) -> None:
    args = args_of()
    with waiting(args) as rank_0:
        with stranger(args) as connection:
            try:
                connection.sendall(data)
                assert connection.recv(1) == b""
            except ConnectionError:
                pass  # it hung up before it had read all
        with come_to(args, join_of(args)):
            assert [*rank_0.result()] == [1]


@pytest.mark.parametrize("rank", [-1, 0, 2, 1 << 70])
def test_a_rank_that_there_is_not_is_refused(rank: int) -> None:
    args = args_of()
    with waiting(args) as rank_0:
        with refuses(ConfigError, f"rank {rank}", "--node-rank"):
            come_to(args, join_of(args, rank))
        with come_to(args, join_of(args)):
            assert [*rank_0.result()] == [1]


def test_a_refusal_is_not_as_long_as_what_a_machine_sent() -> None:
    args = args_of()
    with waiting(args), stranger(args) as connection:
        options = given(args) | {"seed": "x" * 500_000}
        connection.sendall(message(wrong(options=options)))
        kind, why = messages.receive(connection)
        assert kind is Kind.REFUSED
        assert len(why) == join._MOST_WHY


def test_a_rank_that_left_may_come_again_while_another_is_waited_for() -> None:
    args = args_of(3)
    with waiting(args) as rank_0:
        come_to(args, join_of(args)).close()
        with come_to(args, join_of(args)) as again:
            with pytest.raises(ConfigError, match="rank 1 is there already"):
                come_to(args, join_of(args))
            with come_to(args, join_of(args, 2)):
                come = rank_0.result()
            assert sorted(come) == [1, 2]
            connection, told = come[1]
            assert told == join_of(args)
            assert connection.getpeername() == again.getsockname()


def test_who_came_is_hung_up_on_when_another_does_not() -> None:
    args = args_of(3, join_timeout=0.5)
    with waiting(args) as rank_0, come_to(args, join_of(args)) as connection:
        assert "node 2 did not come" in str(rank_0.result())
        assert connection.recv(1) == b""


def test_machines_may_wait_for_different_times() -> None:
    args, theirs = args_of(join_timeout=20.0), args_of(join_timeout=5.0)
    with waiting(args) as rank_0, come_to(args, join_of(theirs)):
        assert [*rank_0.result()] == [1]


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_an_address_of_all_networks_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=f"--master-addr {address}: the others are told"):
        Meeting(args_of(master_addr=address))


@pytest.mark.parametrize("address", ["a..b", "x" * 70, "no such name"])
def test_a_name_that_no_machine_has_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="rank 0 cannot listen there"):
        Meeting(args_of(master_addr=address))
    args = args_of(master_addr=address, join_timeout=0.1)
    with pytest.raises(RankError, match="rank 0 was not at"):
        come_to(args, join_of(args))


def test_a_name_that_means_this_machine_alone_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Debian's /etc/hosts has 127.0.1.1 for the machine's own name."""
    resolved = join._resolved
    monkeypatch.setattr(join, "_resolved", lambda _, port: resolved("127.0.1.1", port))
    Meeting(args_of(master_addr="host7")).close()
    assert_names(caplog.text, "--master-addr host7", "127.0.1.1")
    caplog.clear()
    Meeting(args_of(master_addr="127.0.1.1")).close()
    assert not caplog.text


def test_a_machine_says_that_another_program_answers() -> None:
    args = args_of()
    with socket.create_server(("127.0.0.1", args.master_port)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with refuses(RankError, "127.0.0.1", "no rank 0"):
            come_to(args, join_of(args))
        thread.join()


def test_ranks_meet_over_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    args = args_of(master_addr="::1")
    with waiting(args) as rank_0, come_to(args, join_of(args)):
        assert [*rank_0.result()] == [1]
