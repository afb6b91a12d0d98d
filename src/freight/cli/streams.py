"""Standard output that fails: a full disk, a pipe that was closed, no standard output at all.

`guard_stdout` turns what the system says into an `OutputError`, so that it is not taken for that of
another file. `finish_stdout` writes what is left before the process says that all went well.
"""

from __future__ import annotations

import errno
import io
import os
import sys

from freight.errors import FreightError

CLOSED_PIPE = 128 + 13  # as a shell shows SIGPIPE, by which programs in C end


class OutputError(FreightError):
    """Standard output cannot be written."""


class ClosedPipeError(OutputError):
    """Nobody reads standard output any more, as behind `| head -1`: a reason to end, and nothing to
    report.
    """


class _Stdout(io.FileIO):
    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            kind = OutputError
            if error.errno == errno.EPIPE:
                kind = ClosedPipeError
            raise kind(f"standard output cannot be written: {error.strerror}") from None


def guard_stdout() -> None:
    """Put a stream whose failures are OutputErrors in the place of sys.stdout."""
    plain = sys.stdout
    # closed before the process began (>&-): the first write fails, as it would there
    if plain is None:
        descriptor = os.open(os.devnull, os.O_RDONLY)
        encoding = "utf-8"
        errors = "strict"
        by_line = False
    elif isinstance(plain, io.TextIOWrapper):
        plain.flush()
        descriptor = plain.fileno()
        encoding = plain.encoding
        errors = str(plain.errors)
        by_line = plain.line_buffering or plain.write_through
    else:
        return  # a program that put a stream of its own there keeps it
    raw = _Stdout(descriptor, "w", closefd=False)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=by_line)


def finish_stdout() -> None:
    """Write what is left. Raises OutputError."""
    if sys.stdout is not None:
        sys.stdout.flush()


def discard_stdout() -> None:
    """Leave nothing to write at the end of the process, which would fail again."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)
