"""Messages between processes: JSON in frames of a known length, over a stream of bytes.

A frame is four bytes, the length of what follows (big-endian), and that many bytes of JSON in
ASCII. JSON cannot make the reader run code, as pickle can. The length is compared with a cap before
anything is kept, so a peer that goes wrong cannot take this process's memory. What JSON does to
values holds here: tuples come back as lists and keys of mappings as strings. Beyond its standard,
NaN and infinities come back as they are, and so does a lone surrogate in a string. An error of a
frame ends the connection: what follows it cannot be found.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

CAP = 16 << 20  # bytes of JSON in a frame at most
_HEADER = 4  # bytes of the length
_CHUNK = 1 << 18  # bytes read at a time


class FrameError(Exception):
    """Bytes that are no frame, or a message that is too long for one."""


def encode(message: object, cap: int = CAP) -> bytes:
    """The frame of `message`, which is made of what JSON has.

    Raises FrameError for more than `cap` bytes, TypeError for what JSON has not.
    """
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    _check_length(len(body), cap)
    return len(body).to_bytes(_HEADER, "big") + body


class Decoder:
    """Frames out of bytes that come in pieces of any size."""

    def __init__(self, cap: int = CAP) -> None:
        self._cap = cap
        self._held = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are complete with `data`. Raises FrameError for a frame beyond the cap,
        or not JSON.
        """
        held = self._held
        held += data
        messages = []
        begin = 0
        while len(held) - begin >= _HEADER:
            end = begin + _HEADER + int.from_bytes(held[begin : begin + _HEADER], "big")
            _check_length(end - begin - _HEADER, self._cap)
            if len(held) < end:
                break
            messages.append(_parse(held[begin + _HEADER : end]))
            begin = end
        del held[:begin]
        return messages

    def finish(self) -> None:
        """The stream has ended. Raises FrameError when it ended within a frame."""
        if self._held:
            raise FrameError(f"the connection ended {len(self._held)} bytes into a frame")


def send(connection: socket.socket, message: object, cap: int = CAP) -> None:
    """Write one message, and wait until it is written. Raises as `encode`, and OSError."""
    connection.sendall(encode(message, cap))


def receive(connection: socket.socket, cap: int = CAP) -> Iterator[Any]:
    """The messages of a blocking socket until its end. Raises FrameError and OSError."""
    decoder = Decoder(cap)
    while data := connection.recv(_CHUNK):
        yield from decoder.feed(data)
    decoder.finish()


async def messages(reader: asyncio.StreamReader, cap: int = CAP) -> AsyncIterator[Any]:
    """The messages of a stream until its end. Raises FrameError and OSError."""
    decoder = Decoder(cap)
    while data := await reader.read(_CHUNK):
        for message in decoder.feed(data):
            yield message
    decoder.finish()


def _check_length(length: int, cap: int) -> None:
    if length > cap:
        raise FrameError(f"a frame of {length} bytes; at most {cap} are allowed")


def _parse(body: bytearray) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame of {len(body)} bytes is not JSON: {error}") from error
