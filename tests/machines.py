"""Other machines than rank 0's, for tests: threads that do what `freight serve --node-rank N` does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from freight.engine.node import join_rank_0
from freight.errors import FreightError
from freight.settings.engine import EngineArgs


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def two_machines(**more: Any) -> dict[str, Any]:
    """The options of two machines at a free port of this one."""
    usual = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": free_port()}
    return usual | {"join_timeout": 30.0} | more


@dataclass
class Machine:
    """How it ended: an exit status, or an error."""

    ended: list[int | FreightError] = field(default_factory=list)
    thread: threading.Thread | None = None

    def wait(self) -> int | FreightError:
        assert self.thread is not None
        self.thread.join(30)
        assert self.ended, "the other machine hangs"
        return self.ended[0]


@contextmanager
def other_machine(
    args: EngineArgs, random_shape: str | None = None, again: bool = False, node: int = 1
) -> Iterator[Machine]:
    """Machine `node`, which waits for rank 0 from now on. Its ranks are started by
    `engine.leader.spawn`, which a test may have replaced.
    """
    machine = Machine()

    def run() -> None:
        try:
            machine.ended.append(join_rank_0(replace(args, node_rank=node), random_shape, again))
        except FreightError as error:
            machine.ended.append(error)

    machine.thread = threading.Thread(target=run, daemon=True)
    machine.thread.start()
    yield machine
