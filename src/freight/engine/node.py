"""`freight serve --node-rank N` on another machine than rank 0's: its ranks, and no server.

It comes to rank 0, starts a process for each rank of this machine (`follower.py`), and ends with
rank 0, or with the first of its ranks.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from freight.base.version import version
from freight.engine import leader
from freight.parallel.join import Join, come_to
from freight.parallel.places import places
from freight.settings.device import numa_nodes, usable_cores
from freight.settings.engine import EngineArgs
from freight.settings.nodes import given

_PATIENCE = 5.0  # seconds until a rank that should leave is killed
_LOOK = 0.05  # seconds between looks whether a rank has ended

logger = logging.getLogger("freight")


def join_rank_0(args: EngineArgs, random_shape: str | None, again: bool = False) -> int:
    """Compute for rank 0 until it ends; return the exit status: 0 where rank 0 ended as it should.

    again: where it ended otherwise, come to it once more. Raises ConfigError for options that rank
    0 has otherwise, and RankError if it is not there.
    """
    with _stopped_by_signals():
        while True:
            status = _compute(args, random_shape)
            if status == 0 or not again:
                return status


def _compute(args: EngineArgs, random_shape: str | None) -> int:
    """Come to rank 0 with all ranks of this machine, and compute for it until it ends."""
    here = args.tensor_parallel_size // args.nnodes
    node = args.node_rank
    where = f"{args.master_addr}:{args.master_port}"
    each = places(here, args.rank_cpus, numa_nodes(), usable_cores())
    logger.info("node %d waits for rank 0 at %s", node, where)
    connections: list[socket.socket] = []
    try:
        for rank, place in enumerate(each, node * here):
            join = Join(version(), given(args), random_shape, rank, place.listed, place.cores)
            connections.append(come_to(args, join))
        logger.info("node %d has come to %s with %d of the ranks", node, where, here)
        status = _run(connections)
    finally:
        for connection in connections:
            connection.close()
    if status == 0:
        logger.info("rank 0 has ended, and so does node %d", node)
    return status


def _run(connections: list[socket.socket]) -> int:
    """Run a process for each connection until the first ends, or rank 0 does, then end the others.
    Return 0 if all of them ended because rank 0 told them to.
    """
    reading, writing = os.pipe()  # hangs up with this process
    processes: list[subprocess.Popen[bytes]] = []
    killed: list[int] = []
    hung_up = select.poll()
    try:
        for connection in connections:
            processes.append(leader.spawn((connection.fileno(), reading)))
            hung_up.register(connection, leader.HANG_UP)
        # a rank that hangs does not see that rank 0 has ended
        while _statuses(processes) == {None}:
            if hung_up.poll(1000 * _LOOK):
                break
        for connection in connections:  # now rank 0 sees the end of a process
            connection.close()
        patience = 0.5
        if _statuses(processes) <= {None, 0}:
            patience = 2 * _PATIENCE
        _await(processes, patience)
        first = [process.poll() for process in processes]
    finally:
        os.close(writing)
        os.close(reading)
        _await(processes, _PATIENCE)
        for number, process in enumerate(processes):
            if process.poll() is None:
                process.kill()
                process.wait()
                killed.append(number)
    for number in killed:
        logger.error("rank %d of this machine did not leave, and was killed", number)
    for number, status in enumerate(first):
        if status is not None and status < 0:
            logger.error("rank %d of this machine has ended with signal %d", number, -status)
    if any(first):
        logger.error(
            "rank 0 or another rank has ended or cannot be reached; the log of rank 0 says which"
        )
    return int(any(first) or bool(killed))


def _statuses(processes: list[subprocess.Popen[bytes]]) -> set[int | None]:
    return {process.poll() for process in processes}


def _await(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait until all have ended, or so many seconds have gone."""
    end = time.monotonic() + seconds
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Have SIGTERM and SIGINT end the body by SystemExit, with status 0. SIGHUP ends nothing, as at rank 0,
    and there are no keys to read.
    """

    def stop(number: int, frame: object) -> NoReturn:
        raise SystemExit(0)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[signal.Signals, Callable[[int, object], NoReturn] | signal.Handlers] = {
        signal.SIGTERM: stop,
        signal.SIGINT: stop,
        signal.SIGHUP: signal.SIG_IGN,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
