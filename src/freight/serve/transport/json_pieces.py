"""JSON of megabytes, parsed in pieces, so that other threads run in between.

`json.loads` holds the interpreter until the last value is read, which takes 0.4 s for 4 MB of short
strings, and nothing else of the process runs meanwhile. Here Python code walks containers that are
long, and hands what is short to the library's scanner: each of its calls reads one string, or at
most `_WINDOW` characters. The values are those of `json.loads`, and so are the errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_WINDOW = 1 << 15  # characters
_SPACE = re.compile(r"[ \t\n\r]*+")
# Entries of an array that are no arrays or objects, each with its comma. It never backtracks.
_ENTRIES = re.compile(
    r'(?:[ \t\n\r]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|[^",\[\]{} \t\n\r]++)[ \t\n\r]*+,)*+', re.DOTALL
)


def loads_in_pieces(text: str, decoder: json.JSONDecoder) -> Any:
    """Return the value of `text`, as `decoder.decode` does, with its hooks.

    Raises json.JSONDecodeError, and what the hooks raise. The nesting must have been checked: each
    level takes two calls of the stack.
    """
    reader = _Reader(text, decoder)
    value, end = reader.value(reader.after_space(0))
    end = reader.after_space(end)
    if end != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


class _Reader:
    """The text, and how far its scanner has looked ahead."""

    def __init__(self, text: str, decoder: json.JSONDecoder) -> None:
        self._text = text
        self._scan: Callable[[str, int], tuple[Any, int]] = vars(decoder)["scan_once"]
        hook = decoder.object_pairs_hook
        self._object_of = dict if hook is None else hook
        self._window = text[:_WINDOW]
        self._window_begin = 0
        self._one_by_one_until = 0  # entries before this position have a fault

    def after_space(self, at: int) -> int:
        """Return the position of the next character that is no white space."""
        space = _SPACE.match(self._text, at)
        assert space is not None
        return space.end()

    def value(self, at: int) -> tuple[Any, int]:
        """Read the value that begins at `at`; returns it with the position behind it."""
        first = self._text[at : at + 1]
        if first in ("[", "{"):
            return self._short(at) or (
                self._array(at + 1) if first == "[" else self._object(at + 1)
            )
        try:
            return self._scan(self._text, at)
        except StopIteration as stop:
            raise self._error("Expecting value", stop.value) from None

    def _short(self, at: int) -> tuple[Any, int] | None:
        """Read an array or object that ends within a window; None if it does not, or has a fault."""
        for begin in (self._window_begin, at):
            if begin != self._window_begin:
                self._window_begin = begin
                self._window = self._text[begin : begin + _WINDOW]
            if begin <= at < begin + len(self._window):
                try:
                    value, end = self._scan(self._window, at - begin)
                except (StopIteration, json.JSONDecodeError):
                    continue
                return value, begin + end
        return None

    def _array(self, at: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        at = self.after_space(at)
        if self._text[at : at + 1] == "]":
            return values, at + 1
        while True:
            run, end = self._run(at)
            if run:
                values += run
            else:
                value, end = self.value(at)
                values.append(value)
            end, is_last = self._delimiter(end, "]")
            if is_last:
                return values, end
            at = self.after_space(end)

    def _run(self, at: int) -> tuple[list[Any], int]:
        """Read the entries of an array up to a comma, as many as a window has before the first array
        or object; none where the next entry is one, or the last, or longer.
        """
        if at < self._one_by_one_until or self._text[at : at + 1] in ("[", "{"):
            return [], at
        entries = _ENTRIES.match(self._text, at, at + _WINDOW)
        assert entries is not None
        end = entries.end() - 1  # the comma
        if end < at:
            return [], at
        try:
            run, _ = self._scan(f"[{self._text[at:end]}]", 0)
        except (StopIteration, json.JSONDecodeError):  # the error's position would be the run's
            self._one_by_one_until = end
            return [], at
        return run, end

    def _object(self, at: int) -> tuple[Any, int]:
        pairs: list[tuple[str, Any]] = []
        at = self.after_space(at)
        if self._text[at : at + 1] == "}":
            return self._object_of(pairs), at + 1
        while True:
            if self._text[at : at + 1] != '"':
                raise self._error("Expecting property name enclosed in double quotes", at)
            name, end = self._scan(self._text, at)
            end = self.after_space(end)
            if self._text[end : end + 1] != ":":
                raise self._error("Expecting ':' delimiter", end)
            value, end = self.value(self.after_space(end + 1))
            pairs.append((name, value))
            end, is_last = self._delimiter(end, "}")
            if is_last:
                return self._object_of(pairs), end
            at = self.after_space(end)

    def _delimiter(self, at: int, closing: str) -> tuple[int, bool]:
        """Read a comma, or the end of a container; returns the position behind it, and which."""
        at = self.after_space(at)
        char = self._text[at : at + 1]
        if char not in (",", closing) or not char:
            raise self._error("Expecting ',' delimiter", at)
        return at + 1, char == closing

    def _error(self, reason: str, at: int) -> json.JSONDecodeError:
        return json.JSONDecodeError(reason, self._text, at)
