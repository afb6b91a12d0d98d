"""Errors that Freight raises on purpose.

    FreightError
    ├── ConfigError      (also ValueError)  what was asked for cannot be: a flag, an argument, a
                         combination
    ├── RequestError     (also ValueError)  one request cannot be served: its prompt or its
                         SamplingParams
    ├── CheckpointError                     a folder of weights is incomplete, damaged or not
                                            understood
    ├── CapacityError                       it would not fit into memory
    ├── KernelError                         a kernel was given what it cannot compute
    ├── RankError                           a rank of the engine has ended or does not answer
    ├── EngineError                         the engine that an AsyncLLM asks has ended
    └── GenerationError                     some requests failed while they were computed; `outputs`
                                            has them all

A message names the thing, its value, and the way out. Its text (`str`) is one that a terminal and a
log can take, whatever files and requests put into it: `legible`. Any other exception is a bug in
Freight.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

SHOWN = 60  # characters of a value that a message shows
LONGEST_MESSAGE = 4000  # characters; about fifty lines of a terminal
_END = 1000  # of these, the last of the text, where the way out is


def legible(text: str, keep: str = "") -> str:
    """Return `text` with escapes for what is not printable: line ends, terminal sequences, marks
    that turn the direction of writing. Without its middle if it is longer than LONGEST_MESSAGE.

    keep: characters that stay as they are
    """
    if len(text) > LONGEST_MESSAGE:
        omitted = len(text) - LONGEST_MESSAGE
        text = f"{text[: LONGEST_MESSAGE - _END]} [... {omitted:,} characters ...] {text[-_END:]}"
    return printable(text, keep)


def printable(text: str, keep: str = "") -> str:
    """Return `text`, of any length, with escapes as `legible`."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else json.dumps(character)[1:-1]
        for character in text
    )


class FreightError(Exception):
    """Base class of every error raised on purpose."""

    def __str__(self) -> str:
        return legible(super().__str__())


class ConfigError(FreightError, ValueError):
    """A setting, or a combination of settings, cannot be honoured."""


class RequestError(FreightError, ValueError):
    """One request cannot be served; others are not affected."""


class CheckpointError(FreightError):
    """A checkpoint is incomplete, damaged, contradictory or of a kind that is not implemented."""


class CapacityError(FreightError):
    """Memory does not hold what was asked for."""


class KernelError(FreightError):
    """A kernel was called with tensors that it does not compute."""


class RankError(FreightError):
    """A rank of the engine (`tensor_parallel_size`) has ended or does not answer, so the engine
    cannot go on.
    """


class EngineError(FreightError):
    """The engine that was asked has ended, was shut down, or belongs to another process."""


class GenerationError(FreightError):
    """Some requests of a call failed while they were computed, and the others are complete.

    `outputs` is what the call would have returned: a RequestOutput for each prompt, or the one that
    was streamed. The completions that failed have finish reason "error", and `error` says why.
    """

    def __init__(self, message: str, outputs: Sequence[Any]) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


def choices(names: Iterable[str]) -> str:
    """Join names as 'a, b or c', for messages that list what would have been accepted."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def listed(names: Sequence[str], most: int = 40) -> str:
    """Join names that a file gives: the first `most`, each without its end if it is long, and how
    many more there are.
    """
    first = ", ".join(
        printable(name if len(name) <= SHOWN else f"{name[:SHOWN]}...") for name in names[:most]
    )
    return first if len(names) <= most else f"{first} and {len(names) - most:,} more"


def nearest(name: str, known: Iterable[str], synonyms: dict[str, str] | None = None) -> str:
    """Return ' (did you mean X?)' for the known name closest to `name`, or '' if none is close."""
    match = (synonyms or {}).get(name) or next(
        iter(difflib.get_close_matches(name, list(known), n=1)), None
    )
    return f" (did you mean {match}?)" if match else ""


def first_line(error: Exception) -> str:
    """Return the kind of an error of other code, and the first line of its text."""
    kind = type(error).__name__
    lines = str(error).strip().splitlines()
    return f"{kind}: {lines[0] if lines else kind}"


def install(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml, for messages. Package indexes do
    not have Freight yet.
    """
    return f"pip install '.[{extra}]' in Freight's checkout"


def shown(value: object) -> str:
    """Format `value` for a message: short, in a time that does not grow with the size of a builtin
    type.
    """
    if isinstance(value, str | bytes):
        return (
            repr(value)
            if len(value) <= SHOWN
            else f"{value[:SHOWN]!r}... ({len(value)} characters)"
        )
    if isinstance(value, bool) or value is None:
        return repr(value)
    if isinstance(value, Integral):
        bits = int(value).bit_length()
        # str() refuses integers of more than some thousand digits
        return str(int(value)) if bits <= 128 else f"a whole number of {bits} bits"
    if isinstance(value, Real):
        return repr(as_float(value))
    if isinstance(value, list | tuple | dict | set | frozenset):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"of type {type(value).__name__}"


def as_float(value: Real) -> float:
    """Return `value` as a float, infinite if it is beyond float64."""
    try:
        return float(value)
    except OverflowError:  # a whole number or a fraction
        return math.inf
