"""Tiny GGUF files that tests write, byte by byte, so that a test can also write what is wrong."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UINT8 = 0
INT8 = 1
UINT16 = 2
INT16 = 3
UINT32 = 4
INT32 = 5
FLOAT32 = 6
BOOL = 7
STRING = 8
ARRAY = 9
UINT64 = 10
INT64 = 11
FLOAT64 = 12
FORMATS = {
    UINT8: "B",
    INT8: "b",
    UINT16: "H",
    INT16: "h",
    UINT32: "I",
    INT32: "i",
    FLOAT32: "f",
    BOOL: "?",
    UINT64: "Q",
    INT64: "q",
    FLOAT64: "d",
}


@dataclass(frozen=True)
class Stored:
    """A value of metadata with the type that it is written in, which for an array is its values'."""

    type: int
    value: Any


@dataclass(frozen=True)
class Tensor:
    """A tensor to write. shape: outermost first; offset: default, behind the last, aligned."""

    type: int
    shape: tuple[int, ...]
    data: bytes
    offset: int | None = None


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value_bytes(value: Any) -> bytes:
    """Write type and value: an int as uint32, a float as float32, unless it is `Stored`."""
    if isinstance(value, Stored) and isinstance(value.value, list):
        items = b"".join(item_bytes(value.type, item) for item in value.value)
        return struct.pack("<IIQ", ARRAY, value.type, len(value.value)) + items
    if not isinstance(value, Stored):
        value = Stored(_type(value), value)
    return struct.pack("<I", value.type) + item_bytes(value.type, value.value)


def item_bytes(code: int, value: Any) -> bytes:
    return text(value) if code == STRING else struct.pack(f"<{FORMATS[code]}", value)


def _type(value: Any) -> int:
    for kind, number in ((bool, BOOL), (int, UINT32), (float, FLOAT32)):
        if isinstance(value, kind):
            return number
    return STRING


def gguf_bytes(
    metadata: Mapping[str, Any] | Sequence[tuple[str | bytes, Any]],
    tensors: Mapping[str, Tensor] | Sequence[tuple[str | bytes, Tensor]] = (),
    *,
    alignment: int = 32,
    version: int = 3,
) -> bytes:
    """Return a file. metadata, tensors: mappings, or pairs, of which names may come twice."""
    keys = list(metadata.items()) if isinstance(metadata, Mapping) else list(metadata)
    entries = list(tensors.items()) if isinstance(tensors, Mapping) else list(tensors)
    header = [b"GGUF", struct.pack("<IQQ", version, len(entries), len(keys))]
    for key, value in keys:
        header.append(text(key) + value_bytes(value))
    data = bytearray()
    for name, tensor in entries:
        data += bytes(-len(data) % alignment)
        offset = len(data) if tensor.offset is None else tensor.offset
        dimensions = len(tensor.shape)
        header.append(text(name))
        header.append(
            struct.pack(
                f"<I{dimensions}QIQ", dimensions, *reversed(tensor.shape), tensor.type, offset
            )
        )
        data += tensor.data
    start = b"".join(header)
    if not entries:
        return start
    return start + bytes(-len(start) % alignment) + bytes(data) + bytes(-len(data) % alignment)
