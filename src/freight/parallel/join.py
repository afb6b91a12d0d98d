"""How ranks of other machines come to rank 0, which waits for them on an address and a port.

A machine connects once for each of its ranks, and says in a message, JOIN, what it was started with.
What has to be alike is compared, and a machine that differs is refused with the difference. The
connection is then that of messages between rank 0 and this rank. Nothing here is encrypted, and
nobody is asked for a password. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from ipaddress import ip_address
from typing import Any

from freight.base.fields import is_integer
from freight.base.version import version
from freight.errors import ConfigError, RankError
from freight.parallel import messages
from freight.parallel.messages import Kind
from freight.settings.engine import EngineArgs
from freight.settings.nodes import differences

_MOST = 1 << 20  # bytes of JOIN
_HELLO_SECONDS = 10.0  # for a connection to say JOIN
_MOST_VISITORS = 64  # that have not said it: each takes a file, and up to _MOST bytes
_MOST_WHY = 4000  # characters of a refusal, which has values that the other machine sent
_AGAIN = 0.25  # seconds between tries to connect
_BUFFER = 256 << 10  # bytes that the system takes before a message is read

logger = logging.getLogger("freight")


@dataclass(frozen=True)
class Join:
    """What a rank of another machine comes with.

    options        as `settings.nodes.given` has them
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
        """Return what was encoded. Raises ValueError, TypeError, KeyError or RecursionError for
        anything else.
        """
        values = json.loads(data)
        if values["processors"] is not None:
            values["processors"] = tuple(values["processors"])
        join = Join(**values)
        numbers = (join.rank, join.cores, *(join.processors or ()))
        texts = (join.version, join.random_shape or "")
        if not (
            all(map(is_integer, numbers))
            and all(isinstance(text, str) and text.isprintable() for text in texts)
            and isinstance(join.options, dict)
        ):
            raise TypeError(data)
        return join


@dataclass(eq=False)
class _Visitor:
    """A connection that has not said JOIN yet, and is closed unless it has by `end`."""

    connection: socket.socket
    end: float
    said: bytearray = field(default_factory=bytearray)

    def hear(self) -> Join | None:
        """Read what has come, and return its JOIN once that is whole. Raises OSError, EOFError and
        as `Join.decode`.
        """
        more = self.connection.recv(_MOST)
        if not more:
            raise EOFError
        self.said += more
        message = messages.whole(self.said, _MOST)
        if message is None:
            return None
        kind, data = message
        if kind is not Kind.JOIN:
            raise ValueError(kind)
        return Join.decode(data)


class Meeting:
    """Where rank 0 waits for ranks of other machines."""

    def __init__(self, args: EngineArgs) -> None:
        """Bind to --master-addr and --master-port. Raises ConfigError if that cannot be."""
        assert args.master_addr is not None
        address = args.master_addr
        port = args.master_port
        self._args = args
        self._where = f"{address}:{port}"
        try:
            family, _, _, _, where = _resolved(address, port)
            self._listener = socket.create_server(where[:2], family=family, backlog=64)
            self._listener.setblocking(False)
        except OSError as error:
            raise ConfigError(
                f"--master-addr {address} --master-port {port}: rank 0 cannot listen there: {error}; another "
                "program may have the port, or the address may be another machine's"
            ) from error
        self.host: str = self._listener.getsockname()[0]
        ip = ip_address(self.host.partition("%")[0])
        if ip.is_unspecified:
            self._listener.close()
            raise ConfigError(
                f"--master-addr {address}: the others are told this address of rank 0 to connect to, so name one of "
                "this machine that they reach, not all"
            )
        if self.host != address:  # a name may mean 127.0.1.1 on the machine that has it
            self._where += f" ({self.host})"
            if ip.is_loopback and address != "localhost":
                logger.warning(
                    "--master-addr %s is %s here, which no other machine reaches: give its address instead of its name",
                    address,
                    self.host,
                )

    def accept(self, random_shape: str | None) -> dict[int, tuple[socket.socket, Join]]:
        """Wait for all ranks of other machines. Raises RankError if they do not come within
        --join-timeout.

        Nobody who connects is waited for alone: a stranger may say nothing, or a byte now and then.
        """
        args = self._args
        each = args.tensor_parallel_size // args.nnodes
        end = time.monotonic() + args.join_timeout
        come: dict[int, tuple[socket.socket, Join]] = {}
        visitors: dict[socket.socket, _Visitor] = {}
        logger.info("%s at %s", _waits(_missing(each, args.nnodes, come)), self._where)
        try:
            while len(come) < args.tensor_parallel_size - each:
                if time.monotonic() > end:
                    raise self._too_late(_missing(each, args.nnodes, come))
                self._wait(end, random_shape, come, visitors)
        except BaseException:
            for connection, _ in come.values():
                connection.close()
            raise
        finally:
            for connection in visitors:
                connection.close()
        return come

    def _too_late(self, missing: list[int]) -> RankError:
        return RankError(
            f"{_names(missing)} did not come to {self._where} within {self._args.join_timeout:g} s (--join-timeout); "
            f"start the same command there with --node-rank {' or '.join(map(str, missing))}"
        )

    def _wait(
        self,
        end: float,
        random_shape: str | None,
        come: dict[int, tuple[socket.socket, Join]],
        visitors: dict[socket.socket, _Visitor],
    ) -> None:
        """Wait until something comes, at most until `end`, and take it."""
        ranks = {connection: rank for rank, (connection, _) in come.items()}
        until = min([end, *(visitor.end for visitor in visitors.values())])
        ready = _readable([*ranks, *visitors, self._listener], until - time.monotonic())
        for connection in ready:
            if connection in ranks:  # says nothing before START: it hung up, and may come again
                logger.warning("rank %d has left before all had come", ranks[connection])
                del come[ranks[connection]]
                connection.close()
            elif connection is self._listener:
                self._let_in(visitors)
            elif self._hear(visitors[connection], random_shape, come):
                del visitors[connection]
        now = time.monotonic()
        for connection, visitor in list(visitors.items()):
            if visitor.end < now:
                del visitors[connection]
                connection.close()

    def _let_in(self, visitors: dict[socket.socket, _Visitor]) -> None:
        with suppress(BlockingIOError, ConnectionError):  # it may have gone again
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            if len(visitors) == _MOST_VISITORS:  # the first has had the longest time
                visitors.pop(next(iter(visitors))).connection.close()
            visitors[connection] = _Visitor(connection, time.monotonic() + _HELLO_SECONDS)

    def _hear(
        self,
        visitor: _Visitor,
        random_shape: str | None,
        come: dict[int, tuple[socket.socket, Join]],
    ) -> bool:
        """Take a connection for that of a rank, or refuse it, or close one of a stranger; return whether
        one of these was done.
        """
        connection = visitor.connection
        first = self._args.tensor_parallel_size // self._args.nnodes
        try:
            join = visitor.hear()
            if join is None:
                return False
            why = self._obstacle(join, random_shape)
        except (OSError, EOFError, ValueError, TypeError, KeyError, RecursionError):
            connection.close()
            return True
        ranks = range(first, self._args.tensor_parallel_size)
        if not why and (join.rank not in ranks or join.rank in come):
            why = f"rank {join.rank} is there already: give each machine a --node-rank of its own"
        why = why[:_MOST_WHY]
        kind = Kind.ADMITTED
        if why:
            kind = Kind.REFUSED
        try:  # the system takes so little at once
            messages.send(connection, kind, why.encode())
            tune(connection, self._args.rank_timeout)
        except OSError:
            connection.close()
            return True
        if why:
            logger.warning("a machine was refused: %s", why)
            connection.close()
        else:
            come[join.rank] = connection, join
        return True

    def _obstacle(self, join: Join, random_shape: str | None) -> str:
        """Say in what a machine differs, '' if in nothing."""
        if join.version != version():
            return f"it has Freight {join.version}, rank 0 {version()}"
        obstacles = differences(self._args, join.options)
        if join.random_shape != random_shape:
            obstacles.append(
                f"--random-weights is {join.random_shape}, that of rank 0 {random_shape}"
            )
        return "; ".join(obstacles)

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
        except ConfigError:
            raise
        except (ValueError, RankError) as error:  # such as a web server's answer
            raise RankError(f"what answers at {where} is no rank 0 of Freight: {error}") from error
        time.sleep(_AGAIN)


def _admitted(args: EngineArgs, join: Join, seconds: float) -> socket.socket:
    assert args.master_addr is not None
    family, kind, protocol, _, where = _resolved(args.master_addr, args.master_port)
    connection = socket.socket(family, kind, protocol)
    try:
        connection.settimeout(max(seconds, _AGAIN))
        connection.connect(where)
        messages.send(connection, Kind.JOIN, join.encode())
        answer_kind, data = messages.receive(connection, _MOST)
        if answer_kind is Kind.REFUSED:
            raise ConfigError(f"rank 0 refused this machine: {data.decode()}")
        if answer_kind is not Kind.ADMITTED:
            raise ValueError(answer_kind)
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
    interval = max(1, round(seconds / 4))
    for name, value, most in (
        ("TCP_KEEPIDLE", interval, 32767),
        ("TCP_KEEPINTVL", interval, 32767),
        ("TCP_KEEPCNT", 3, 32767),
        ("TCP_USER_TIMEOUT", max(1000, round(1000 * seconds)), (1 << 31) - 1),
    ):
        if hasattr(socket, name):  # Linux has them all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), min(value, most))


def _readable(connections: Sequence[socket.socket], seconds: float) -> list[socket.socket]:
    """Return those that something can be read from, in this order, once there is one or time is up."""
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        ready = {key.fd for key, _ in selector.select(max(0.0, seconds))}
    return [connection for connection in connections if connection.fileno() in ready]


def _resolved(address: str, port: int) -> Any:
    try:
        return socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError as error:  # of 'a..b', where other names that cannot be give OSError
        raise OSError(f"{address!r} is no name of a machine") from error


def _missing(each: int, nodes: int, come: dict[int, Any]) -> list[int]:
    """Return the machines that have not come with all their ranks."""
    missing = []
    for node in range(1, nodes):
        ranks = range(node * each, (node + 1) * each)
        if not come.keys() >= set(ranks):
            missing.append(node)
    return missing


def _names(nodes: list[int]) -> str:
    if len(nodes) == 1:
        return f"node {nodes[0]}"
    return f"nodes {', '.join(map(str, nodes))}"


def _waits(nodes: list[int]) -> str:
    if len(nodes) == 1:
        return f"{_names(nodes)} is waited for"
    return f"{_names(nodes)} are waited for"
