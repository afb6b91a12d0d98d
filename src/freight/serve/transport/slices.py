"""Serialization of large answers: in a thread, one at a time, so that the event loop goes on.

A thread alone is not enough: Python's JSON encoder holds the GIL until a value is written
completely. So a large value is written in slices, each of which takes milliseconds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

P = ParamSpec("P")
T = TypeVar("T")

_DEPTH = 3  # containers around a slice: body, choices, choice
_ITEMS = 64  # of a list, in one slice
_SHORT = 1 << 10  # characters: longer strings are written one by one
_CHARACTERS = 1 << 18  # of a string, in one slice

_BYTES = 1 << 18  # of a part: writing 100 MB as one part copies them, which takes 0.1 s


_LARGE = 1 << 17  # characters in strings: what has more is written in a thread
_MANY = 1 << 12  # values, likewise


def is_large(value: object) -> bool:
    """Return whether writing `value` as JSON takes more than a moment. Looks at a part of it only."""
    values = [value]
    characters = count = 0
    while values and count < _MANY and characters < _LARGE:
        item = values.pop()
        count += 1
        if isinstance(item, str):
            characters += len(item)
        elif isinstance(item, Mapping):
            values += islice(item, _MANY)
            values += islice(item.values(), _MANY)
        elif isinstance(item, list | tuple):
            values += item[:_MANY]
    return bool(values) or characters >= _LARGE


@runtime_checkable
class Sliced(Protocol):
    """A long list that is written without being built. Iterating it yields the list's values."""

    def __iter__(self) -> Iterator[Any]: ...

    def json_slices(self) -> Iterator[str]:
        """Yield the list as JSON, in slices that take milliseconds each. No white space, no NaN, no
        infinities.
        """


# One thread: several would compete with the event loop for the GIL.
_maker = ThreadPoolExecutor(1, thread_name_prefix="large answers")


async def in_turn(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` in the single thread for large answers; returns its result."""
    return await asyncio.get_running_loop().run_in_executor(
        _maker, lambda: function(*args, **kwargs)
    )


def json_bytes(value: object) -> bytes:
    """Return `value` as JSON in UTF-8. Raises ValueError for NaN and infinities."""
    text = json.dumps(
        value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=plain
    )
    return text.encode("utf-8", "replace")


def plain(value: object) -> object:
    """Convert a Sliced to a list, for json.dumps. Raises TypeError for anything else."""
    if isinstance(value, Sliced):
        return list(value)
    raise TypeError(f"JSON has no {type(value).__name__}")


def json_in_slices(value: object) -> list[bytes]:
    """Return the bytes of `json_bytes`, written in slices, in parts. Keys of mappings must be
    strings.
    """
    parts = []
    pieces = []
    size = 0
    for piece in _slices(value, 0):
        pieces.append(piece)
        size += len(piece)
        if size >= _BYTES:
            parts.append(b"".join(pieces))
            pieces = []
            size = 0
    return [*parts, b"".join(pieces)]


def _slices(value: object, depth: int) -> Iterator[bytes]:
    if isinstance(value, dict) and depth <= _DEPTH:
        between = b"{"
        for name, inner in value.items():
            yield between + json_bytes(name) + b":"
            yield from _slices(inner, depth + 1)
            between = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and value:
        between = b"["
        for begin in range(0, len(value), _ITEMS):
            some = value[begin : begin + _ITEMS]
            if depth == _DEPTH or all(map(_is_short, some)):
                yield between + json_bytes(some)[1:-1]
                between = b","
                continue
            for inner in some:
                yield between
                yield from _slices(inner, depth + 1)
                between = b","
        yield b"]"
    elif isinstance(value, str) and len(value) > _CHARACTERS:
        yield b'"'
        for begin in range(0, len(value), _CHARACTERS):
            yield json_bytes(value[begin : begin + _CHARACTERS])[1:-1]
        yield b'"'
    elif isinstance(value, Sliced):
        yield from (text.encode("utf-8", "replace") for text in value.json_slices())
    else:
        yield json_bytes(value)


def _is_short(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and len(value) <= _SHORT)
