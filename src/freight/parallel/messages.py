"""Messages between rank 0 and the others, over a stream socket: a kind and bytes. Imports no torch.

A message is a byte for its kind, a length of four bytes, and so many bytes: text, or integers of 64
bits.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import IntEnum

import numpy as np

from freight.errors import RankError
from freight.settings.engine import EngineArgs

_HEAD = struct.Struct("<BI")
# Bytes that the system takes at once or not at all: a buffer of a stream between processes of one
# machine has 32 KiB
_AT_ONCE = 16 << 10


class Kind(IntEnum):
    """What a message is."""

    # of rank 0
    START = 0  # options: the process opens the model
    LOAD = 1  # what rank 0 resolved: it reads its weights
    POOL = 2  # blocks by group: it allocates its cache
    RUN = 3  # a step (`parallel/steps.py`)
    LAUNCH = 17  # a step whose tokens every rank draws (`parallel/steps.py`)
    DRAFT = 18  # a pass of a head that drafts: slices, and features (`parallel/steps.py`)
    LOGITS = 4  # rows of the last step, int64, whose logits are computed
    ADAPTER = (
        15  # a slot, a digest and a path: it loads an adapter, and answers with LOADED or FAILED
    )
    RESTART = 5  # leave whatever is under way, and answer with LEFT and the same number
    STOP = 11  # the engine ends; why, or '' where that was wanted
    ADMITTED = 13  # a rank of another machine
    REFUSED = 14  # a rank of another machine; why
    # of the others
    OPENED = 6  # what the rank opened, by its fingerprint
    LOADED = 7
    READY = 8
    CHECKED = 16  # it computes what one rank computes
    LEFT = 9  # why the last step failed here, or ''
    FAILED = 10  # an error: the rank could not start, or could not load an adapter
    JOIN = 12  # a rank of another machine has come (`parallel/join.py`)


def send(connection: socket.socket, kind: Kind, data: bytes = b"") -> None:
    """Send a message, whole also where an interrupt (Ctrl-C) comes meanwhile: half of one would make
    the next unreadable. Raises OSError once the other end is gone.
    """
    message = _HEAD.pack(kind, len(data)) + data
    if len(message) <= _AT_ONCE:
        connection.sendall(message)
    else:
        _send_aside(connection, message)


def _send_aside(connection: socket.socket, message: bytes) -> None:
    """Send by another thread, as handlers of signals run in the first thread alone."""
    failed: list[OSError] = []
    done = threading.Event()  # `Thread.join` takes an interrupted thread for one that has ended

    def send_all() -> None:
        try:
            connection.sendall(message)
        except OSError as error:
            failed.append(error)
        finally:
            done.set()

    threading.Thread(target=send_all, daemon=True).start()
    interrupt: BaseException | None = None
    while not done.is_set():
        try:
            done.wait()
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
    if failed:
        raise failed[0]


@dataclass(frozen=True)
class Start:
    """What a rank is started with.

    random_shape   of a model of random weights
    processors     of the rank; None: the system's choice
    cores          threads that it may have
    timeout        seconds after which a rank that does not answer counts as lost
    store          host and port of the store that ranks of several machines meet by; None: on one
                   machine they get the descriptors of what they meet by
    backend        of torch.distributed; 'nccl': the rank has the GPU of its number on its machine
    shares_memory  they gather in shared memory, and not over torch.distributed
    slot_bytes     of the largest gather that is pushed between GPUs; 0: none is
    """

    args: EngineArgs
    random_shape: str | None
    rank: int
    size: int
    processors: tuple[int, ...] | None
    cores: int
    timeout: float
    log_level: int
    store: tuple[str, int] | None = None
    backend: str = "gloo"
    shares_memory: bool = True
    slot_bytes: int = 0

    def encode(self) -> bytes:
        """Return this as bytes of JSON."""
        return json.dumps(asdict(self), default=str).encode()  # a folder may be a Path

    @staticmethod
    def decode(data: bytes) -> Start:
        """Return what was encoded."""
        values = json.loads(data)
        values["args"] = EngineArgs(**values["args"])
        for name in ("processors", "store"):
            if values[name] is not None:
                values[name] = tuple(values[name])
        return Start(**values)


def integers(values: Iterable[int]) -> bytes:
    """Return integers as bytes."""
    return np.array([*values], np.int64).tobytes()


def integers_of(data: bytes) -> list[int]:
    """Return the integers in bytes."""
    numbers: list[int] = np.frombuffer(data, np.int64).tolist()
    return numbers


def receive(connection: socket.socket, most: int = 1 << 32) -> tuple[Kind, bytes]:
    """Return the next message. Raises EOFError at the end of the stream, OSError, TimeoutError, and
    RankError for a message of more than `most` bytes.
    """
    kind, length = _HEAD.unpack(_exactly(connection, _HEAD.size))
    if length > most:
        raise RankError(f"a message of {length} bytes, where {most} may be")
    return Kind(kind), _exactly(connection, length)


def whole(data: bytes | bytearray, most: int) -> tuple[Kind, bytes] | None:
    """Return the one message that came as `data`, None while some of it is missing. Raises ValueError
    for anything else, and for more than `most` bytes.
    """
    if len(data) < _HEAD.size:
        return None
    kind, length = _HEAD.unpack_from(data)
    message_kind = Kind(kind)
    if length > most or len(data) > _HEAD.size + length:
        raise ValueError(length)
    if len(data) < _HEAD.size + length:
        return None
    return message_kind, bytes(data[_HEAD.size :])


def expect(connection: socket.socket, expected: Kind) -> bytes:
    """Return the bytes of the next message. Raises RankError if it is of another kind."""
    kind, data = receive(connection)
    if kind is not expected:
        raise RankError(f"a rank said {kind.name}, where {expected.name} was expected")
    return data


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise EOFError
        data += more
    return bytes(data)
