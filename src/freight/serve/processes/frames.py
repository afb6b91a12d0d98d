"""Messages between processes: JSON in length-prefixed frames, over a byte stream.

A frame is a length of four bytes (big-endian) and that many bytes of JSON in ASCII. JSON cannot
make the reader run code, as pickle can. The length is checked against a cap before the body is
stored, so a faulty peer cannot exhaust this process's memory. Values change as JSON changes them:
tuples come back as lists and keys of mappings as strings. Beyond the standard, NaN and infinities
survive, and so does a lone surrogate in a string. A bad frame ends the connection: the next one
cannot be found.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any

CAP = 16 << 20  # bytes of JSON in a frame at most
_HEADER = 4  # bytes of the length
_PIECES = 1 << 12  # pieces of JSON, at most a value each, that are joined at a time
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_CHUNK = 1 << 18  # bytes read at a time


class FrameError(Exception):
    """Bytes that are not a frame, or a message that is too long for one."""


def encode(message: object, cap: int = CAP) -> bytes:
    """Return the frame of `message`, a value that JSON can hold.

    Raises FrameError for more than `cap` bytes, TypeError for a value that JSON cannot hold.
    """
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    _check_length(len(body), cap)
    return len(body).to_bytes(_HEADER, "big") + body


def encode_in_pieces(message: object, cap: int = CAP) -> bytes:
    """Return the frame of `message` as `encode` does, and let other threads run in between: for
    messages with many values.
    """
    pieces = _ENCODER.iterencode(message)
    parts = []
    size = 0
    while part := "".join(islice(pieces, _PIECES)):
        size += len(part)
        _check_length(size, cap)
        parts.append(part.encode("ascii"))
    return b"".join([size.to_bytes(_HEADER, "big"), *parts])


class Decoder:
    """Decodes frames from bytes that come in pieces of any size."""

    def __init__(self, cap: int = CAP) -> None:
        self._cap = cap
        self._held = bytearray()

    def feed(self, data: bytes | memoryview) -> list[Any]:
        """Return the messages that `data` completes. Raises FrameError for a frame over the cap, or
        not JSON.
        """
        buffer = self._held
        buffer += data
        messages = []
        begin = 0
        while len(buffer) - begin >= _HEADER:
            end = begin + _HEADER + int.from_bytes(buffer[begin : begin + _HEADER], "big")
            _check_length(end - begin - _HEADER, self._cap)
            if len(buffer) < end:
                break
            messages.append(_parse(buffer[begin + _HEADER : end]))
            begin = end
        del buffer[:begin]
        return messages

    def finish(self) -> None:
        """Check the end of the stream. Raises FrameError if it ended within a frame."""
        if self._held:
            raise FrameError(f"the connection ended {len(self._held)} bytes into a frame")


def send(connection: socket.socket, message: object, cap: int = CAP) -> None:
    """Write one message, and wait until it is written. Raises as `encode`, and OSError."""
    connection.sendall(encode(message, cap))


def receive(connection: socket.socket, cap: int = CAP) -> Iterator[Any]:
    """Yield the messages of a blocking socket until its end. Raises FrameError and OSError."""
    decoder = Decoder(cap)
    while data := connection.recv(_CHUNK):
        yield from decoder.feed(data)
    decoder.finish()


async def messages(reader: asyncio.StreamReader, cap: int = CAP) -> AsyncIterator[Any]:
    """Yield the messages of a stream until its end. Raises FrameError and OSError."""
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
