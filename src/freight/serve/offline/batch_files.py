"""The files of `freight batch`: lines of requests in, lines of answers out, one for each in the
same order.

The id of an answer is a hash of the request: of the options that influence what a model writes, and
of the number and the bytes of the line. So a restarted run knows from OUT alone which lines are
answered, and whether OUT belongs to this IN and these options. An incomplete last line, left by a
killed run, is removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import stat
import sys
import time
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from freight.base.files import DATA_LIMIT, open_regular
from freight.errors import ConfigError, shown

FORM = '{"custom_id": "…", "method": "POST", "url": "/v1/chat/completions", "body": {…}}'
# Seconds between syncs: a power failure loses the answers of that time; a killed process, none.
_SYNC_SECONDS = 5.0
_OPTIONS = 16  # hexadecimal digits of an id: for the options, and for the line
_LINE = 24


@dataclass(frozen=True)
class InputLine:
    """A line of IN. number: from 1 on, empty lines counted. id: that of its answer."""

    number: int
    raw: bytes
    id: str


class BatchInput:
    """IN, read once to check it, and again to iterate. `ids` are the ids of its answers, in order.
    Raises ConfigError.
    """

    def __init__(self, path: Path, options: object, models: Collection[str]) -> None:
        """Read and check the file.

        options  everything besides the line that influences the answers, for json.dumps
        models   the names that requests may use

        Refuses a file that cannot be read, one without any JSON object, a duplicate custom_id, and
        a file in which no line asks for one of `models`.
        """
        self._name = str(path)
        # Standard input is kept: the lines are read twice.
        self._given: bytes | None = None
        if self._name == "-":
            self._name = "standard input"
            self._given = sys.stdin.buffer.read()
        self._options = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[
            :_OPTIONS
        ]
        self._path = path
        self.ids: list[str] = []
        seen: dict[str, int] = {}  # custom_id -> the number of its line
        self._fault: str | None = None  # the reason why the first bad line is not an object
        # model -> the first line that asks for it; None: any model
        self._asked: dict[str | None, int] = {}
        self._objects = 0
        for line in self:
            self.ids.append(line.id)
            self._look(line, seen)
        if not self.ids:
            raise ConfigError(f"{self._name} has no line; each is {FORM}")
        if not self._objects:
            raise ConfigError(f"{self._name}: {self._fault}, and no other line is; each is {FORM}")
        if self._asked.keys().isdisjoint({*models, None}):
            model, number = next(iter(self._asked.items()))
            raise ConfigError(
                f"{self._name}: line {number} asks for the model {shown(model)}, and no line for "
                f"{' or '.join(map(repr, models))}, the name of this model here: give --served-model-name"
            )

    def __iter__(self) -> Iterator[InputLine]:
        """Yield the lines that are not empty, reading the file again."""
        with _opened(self._path) if self._given is None else io.BytesIO(self._given) as file:
            for number, raw in enumerate(file, 1):
                if number == 1:
                    raw = raw.removeprefix(BOM_UTF8)  # Windows writes one
                raw = raw.strip()
                if raw:
                    digest = hashlib.sha256(b"%d:" % number + raw).hexdigest()[:_LINE]
                    yield InputLine(number, raw, f"batch_req_{self._options}{digest}")

    def _look(self, line: InputLine, seen: dict[str, int]) -> None:
        try:
            value = json.loads(line.raw)
        except (ValueError, RecursionError) as error:
            self._fault = self._fault or f"line {line.number} is not JSON ({error})"
            return
        if not isinstance(value, dict):
            self._fault = self._fault or f"line {line.number} is not a JSON object"
            return
        self._objects += 1
        name = value.get("custom_id")
        body = value.get("body")
        if isinstance(name, str):
            first = seen.setdefault(name, line.number)
            if first != line.number:
                raise ConfigError(
                    f"{self._name}: lines {first} and {line.number} have the same custom_id {shown(name)}; each line "
                    "needs its own"
                )
        model = body.get("model") if isinstance(body, dict) else None
        self._asked.setdefault(model if isinstance(model, str) else None, line.number)


class BatchOutput:
    """OUT, locked for this run. Raises ConfigError.

    `num_done` answers were there before this run, `num_failed` of them with an error. Use it in a
    `with`.
    """

    def __init__(self, path: Path, ids: Sequence[str]) -> None:
        """Open the file and check its answers, which must be the first of `ids`: the ids of all
        answers, in order.
        """
        self.num_done = self.num_failed = 0
        self._path = path
        self._stream = str(path) == "-"
        self._synced = time.monotonic()
        if self._stream:
            return
        try:
            self._file = _locked(path)
        except OSError as error:
            raise ConfigError(
                f"the output {path} cannot be written: {error.strerror or error}"
            ) from None
        try:
            self._cut(path, ids)
        except BaseException:
            self._file.close()
            raise

    def write(self, line: bytes) -> None:
        """Append a line, which ends in a newline. Raises OSError."""
        if self._stream:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            return
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            # Python's error does not name the file.
            raise OSError(error.errno, error.strerror, str(self._path)) from None
        if time.monotonic() - self._synced >= _SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._stream:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())

    def _cut(self, path: Path, ids: Sequence[str]) -> None:
        """Check the existing lines, and remove an incomplete last one."""
        end = 0  # of the last complete line, in bytes
        for raw in self._file:
            if not raw.endswith(b"\n"):
                break
            self._check(path, raw, ids)
            end += len(raw)
        self._file.seek(end)
        self._file.truncate()

    def _check(self, path: Path, raw: bytes, ids: Sequence[str]) -> None:
        number = self.num_done + 1
        way_out = "name another OUT, or remove this one"
        try:
            value = json.loads(raw)
            line_id = str(value["id"])
            failed = value["error"] is not None
        except (ValueError, RecursionError, TypeError, KeyError):
            raise ConfigError(
                f"{path}: line {number} was not written by freight batch; {way_out}"
            ) from None
        if number > len(ids):
            raise ConfigError(
                f"{path} has more lines than the input, which has {len(ids)}; {way_out}"
            )
        if line_id != ids[number - 1]:
            options = len("batch_req_") + _OPTIONS
            other = "was made with another model or other options"
            if line_id[:options] == ids[number - 1][:options]:
                other = "does not answer the same line of the input"
            raise ConfigError(f"{path}: line {number} {other}; {way_out}")
        self.num_done += 1
        self.num_failed += failed


def require_different(source: Path, out: Path) -> None:
    """Raise ConfigError if OUT is IN."""
    if (
        str(source) != "-"
        and str(out) != "-"
        and out.exists()
        and source.exists()
        and out.samefile(source)
    ):
        raise ConfigError(f"IN and OUT are the same file, {out}; name another OUT")


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path, DATA_LIMIT)
    except OSError as error:
        raise ConfigError(f"the input {path} cannot be read: {error.strerror or error}") from None


def _locked(path: Path) -> BinaryIO:
    """Open OUT, creating it if missing, and lock it. Raises OSError, and ConfigError if another run
    holds the lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(
                f"the output {path} is not a regular file; name one, or - for standard output"
            )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another run writes {path}: wait for it, or name another OUT"
            ) from None
        except OSError:
            pass  # the file system has no locks
        return os.fdopen(descriptor, "r+b")
    except BaseException:
        os.close(descriptor)
        raise
