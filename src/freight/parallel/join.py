"""How ranks of other machines come to rank 0, which waits for them on an address and a port.

A machine connects once for each of its ranks, and says in a message, JOIN, what it was started with.
What has to be alike is compared, and a machine that differs is refused with the difference. The
connection is then that of messages between rank 0 and this rank. Nothing here is encrypted, and
nobody is asked for a password. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from freight.config.engine import EngineArgs
from freight.config.nodes import differences
from freight.errors import ConfigError, RankError
from freight.parallel import messages
from freight.parallel.messages import Kind
from freight.version import version

_MOST = 1 << 20  # bytes of JOIN
_HELLO_SECONDS = 10.0  # for a connection to say JOIN
_AGAIN = 0.25  # seconds between tries to connect
_BUFFER = 256 << 10  # bytes that the system takes before a message is read

logger = logging.getLogger("freight")


@dataclass(frozen=True)
class Join:
    """What a rank of another machine comes with.

    options        as `config.nodes.given` has them
    random_shape   of a model of random weights
    processors     of the rank; None: the system's choice
    cores          threads that it may have
    """

    version: str
    options: dict[str, Any]
    random_shape: str | None
    rank: int
    processors: tuple[int, ...] | None
    cores: int

    def encode(self) -> bytes:
        """Return this as bytes of JSON."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> Join:
        """Return what was encoded. Raises ValueError or TypeError for anything else."""
        values = json.loads(data)
        chosen = values["processors"]
        found = Join(**values | {"processors": None if chosen is None else tuple(chosen)})
        if not isinstance(found.rank, int) or not isinstance(found.options, dict):
            raise TypeError(data)
        return found


class Meeting:
    """Where rank 0 waits for ranks of other machines."""

    def __init__(self, args: EngineArgs) -> None:
        """Bind to --master-addr and --master-port. Raises ConfigError if that cannot be."""
        assert args.master_addr is not None
        address, port = args.master_addr, args.master_port
        self._args, self._where = args, f"{address}:{port}"
        try:
            family, _, _, _, where = _resolved(address, port)
            self._listener = socket.create_server(where[:2], family=family, backlog=64)
        except OSError as error:
            raise ConfigError(
                f"--master-addr {address} --master-port {port}: rank 0 cannot listen there: {error}; another "
                "program may have the port, or the address may be another machine's"
            ) from error
        self.host: str = self._listener.getsockname()[0]
        if self.host != address:  # a name may mean 127.0.1.1 on the machine that has it
            self._where += f" ({self.host})"

    def accept(self, random_shape: str | None) -> dict[int, tuple[socket.socket, Join]]:
        """Wait for all ranks of other machines. Raises RankError if they do not come within
        --join-timeout.
        """
        args = self._args
        each = args.tensor_parallel_size // args.nnodes
        come: dict[int, tuple[socket.socket, Join]] = {}
        end = time.monotonic() + args.join_timeout
        logger.info("%s at %s", _waits(_missing(each, args.nnodes, come)), self._where)
        try:
            while len(come) < args.tensor_parallel_size - each:
                self._listener.settimeout(max(0.0, end - time.monotonic()) or 0.001)
                connection, _ = self._listener.accept()
                self._admit(connection, random_shape, range(each, args.tensor_parallel_size), come)
        except TimeoutError:
            for connection, _ in come.values():
                connection.close()
            missing = _missing(each, args.nnodes, come)
            raise RankError(
                f"{_names(missing)} did not come to {self._where} within {args.join_timeout:g} s (--join-timeout); "
                f"start the same command there with --node-rank {' or '.join(map(str, missing))}"
            ) from None
        return come

    def _admit(
        self,
        connection: socket.socket,
        random_shape: str | None,
        ranks: range,
        come: dict[int, tuple[socket.socket, Join]],
    ) -> None:
        """Take a connection for that of a rank, or refuse it, or close one of a stranger."""
        try:
            connection.settimeout(_HELLO_SECONDS)
            kind, data = messages.receive(connection, _MOST)
            join = Join.decode(data)
            if kind is not Kind.JOIN:
                raise ValueError(kind)
        except (OSError, EOFError, ValueError, TypeError, KeyError, RankError):
            connection.close()
            return
        why = self._obstacle(join, random_shape)
        if not why and (join.rank not in ranks or join.rank in come):
            why = f"rank {join.rank} is there already: give each machine a --node-rank of its own"
        with suppress(OSError):  # a rank that has gone shows later
            messages.send(connection, Kind.REFUSED if why else Kind.ADMITTED, why.encode())
        if why:
            logger.warning("a machine was refused: %s", why)
            connection.close()
            return
        tune(connection, self._args.rank_timeout)
        come[join.rank] = connection, join

    def _obstacle(self, join: Join, random_shape: str | None) -> str:
        """Say in what a machine differs, '' if in nothing."""
        if join.version != version():
            return f"it has Freight {join.version}, rank 0 {version()}"
        found = differences(self._args, join.options)
        if join.random_shape != random_shape:
            found.append(f"--random-weights is {join.random_shape}, that of rank 0 {random_shape}")
        return "; ".join(found)

    def close(self) -> None:
        """Listen no longer."""
        self._listener.close()


def come_to(args: EngineArgs, join: Join) -> socket.socket:
    """Connect to rank 0, which may not listen yet, and return the connection once it has admitted
    this rank.

    Raises RankError if rank 0 is not there within --join-timeout, and ConfigError with what it
    refused.
    """
    assert args.master_addr is not None
    where = f"{args.master_addr}:{args.master_port}"
    end = time.monotonic() + args.join_timeout
    while True:
        try:
            return _admitted(args, join, end - time.monotonic())
        except (OSError, EOFError) as error:
            if time.monotonic() + _AGAIN > end:
                raise RankError(
                    f"rank 0 was not at {where} within {args.join_timeout:g} s (--join-timeout): "
                    f"{error or 'it hung up'}"
                ) from error
        time.sleep(_AGAIN)


def _admitted(args: EngineArgs, join: Join, seconds: float) -> socket.socket:
    assert args.master_addr is not None
    family, kind, protocol, _, where = _resolved(args.master_addr, args.master_port)
    connection = socket.socket(family, kind, protocol)
    try:
        connection.settimeout(max(seconds, _AGAIN))
        connection.connect(where)
        messages.send(connection, Kind.JOIN, join.encode())
        said, data = messages.receive(connection, _MOST)
        if said is Kind.REFUSED:
            raise ConfigError(f"rank 0 refused this machine: {data.decode()}")
        tune(connection, args.rank_timeout)
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def tune(connection: socket.socket, seconds: float) -> None:
    """Have messages go out at once, and a machine that went without a word be found within `seconds`."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every = max(1, round(seconds / 4))
    for name, value in (
        ("TCP_KEEPIDLE", every),
        ("TCP_KEEPINTVL", every),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", max(1000, min(round(1000 * seconds), (1 << 31) - 1))),
    ):
        if hasattr(socket, name):  # Linux has them all
            most = 32767 if name != "TCP_USER_TIMEOUT" else value
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), min(value, most))


def _resolved(address: str, port: int) -> Any:
    return socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]


def _missing(each: int, nodes: int, come: dict[int, Any]) -> list[int]:
    """Return the machines that have not come with all their ranks."""
    return [
        node
        for node in range(1, nodes)
        if not all(rank in come for rank in range(node * each, (node + 1) * each))
    ]


def _names(nodes: list[int]) -> str:
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(map(str, nodes))}"


def _waits(nodes: list[int]) -> str:
    return f"{_names(nodes)} {'is' if len(nodes) == 1 else 'are'} waited for"
