"""The file of `freight embed`, written beside its name until it is whole, and continued after a kill.

OUT.part grows row by row, and OUT.part.json says what it is of: a hash of the texts and of the
options that decide the numbers. A run that finds both goes on behind the last row that is on disk;
a row is the same bits whatever is computed beside it, so the file is the one that a single run
writes. Imports no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from freight.base.files import write_whole
from freight.errors import ConfigError

FORMS = (".npy", ".jsonl")
_MAGIC = b"\x93NUMPY\x01\x00"  # of version 1.0 of NumPy's format
_ALIGNED = 64


def fingerprint(options: object, texts: Sequence[str]) -> str:
    """Return a hash of what decides the numbers: the options, and each text."""
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()[:32]


def npy_header(rows: int, size: int) -> bytes:
    """Return the header of a .npy file of float32 [rows, size], in the order of rows (NumPy's
    format, version 1.0).
    """
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {size}), }}".encode()
    padding = -(len(_MAGIC) + 2 + len(text) + 1) % _ALIGNED
    text += b" " * padding + b"\n"
    return _MAGIC + len(text).to_bytes(2, "little") + text


class EmbeddingFile:
    """OUT of one run, locked. `num_done` rows were there before. Use it in a `with`; rows are kept
    when it ends with an error, and OUT is there once it has all.
    """

    def __init__(self, out: Path, texts: Sequence[str], options: object) -> None:
        """Open the file, and check what an earlier run left. Raises ConfigError for another ending
        than `FORMS`, an OUT that exists, one that cannot be written, and rows of another run.
        """
        if out.suffix not in FORMS:
            raise ConfigError(
                f"OUT {out}: the ending says what is written, and it is .npy (float32 [texts, size]) or .jsonl"
            )
        if out.exists():
            raise ConfigError(f"OUT {out} exists; name another file, or remove it")
        self.out = out
        self._rows = len(texts)
        self._part = out.with_name(out.name + ".part")
        self._state = out.with_name(out.name + ".part.json")
        self._content = {"fingerprint": fingerprint(options, texts), "texts": len(texts)}
        self._header = 0
        self.num_done = 0
        self._size: int | None = None
        try:
            self._file = _locked(self._part)
            try:
                self._continue()
            except BaseException:
                self._file.close()
                raise
        except OSError as error:
            raise ConfigError(f"OUT {out} cannot be written: {error.strerror or error}") from None

    def _continue(self) -> None:
        """Find the complete rows, and truncate the file after them."""
        if not self._state.exists():
            if self._file.seek(0, os.SEEK_END):
                raise ConfigError(
                    f"{self._part} is there without {self._state.name}, so what it is of is unknown; remove it"
                )
            return
        try:
            content = json.loads(self._state.read_text(encoding="utf-8"))
            size = int(content.pop("size"))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ConfigError(
                f"{self._state} is damaged; remove it and {self._part.name}"
            ) from None
        if content != self._content:
            raise ConfigError(
                f"{self._part} is of other texts, another model or other options; give those of the run that began it, "
                f"or remove it and {self._state.name}"
            )
        self._begin(size)

    def _begin(self, size: int) -> None:
        """Say how many numbers a row has, and go to the end of the rows that are there."""
        self._size = size
        if self.out.suffix == ".npy":
            header = npy_header(self._rows, size)
            self._header = len(header)
            length = self._file.seek(0, os.SEEK_END)
            self.num_done = max(0, length - len(header)) // (4 * size)
            if length < len(header):
                self._file.seek(0)
                self._file.write(header)
            end = self._header + self.num_done * 4 * size
        else:
            self._file.seek(0)
            end = 0
            for line in self._file:
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                self.num_done += 1
        self._file.seek(end)
        self._file.truncate()

    def write(self, rows: Sequence[array[float]]) -> None:
        """Write the next rows, float32. Raises OSError with the file's name."""
        size = len(rows[0])
        if self._size is None:
            write_whole(self._state, json.dumps({**self._content, "size": size}))
            self._begin(size)
        assert size == self._size
        with self._named():
            self._file.write(b"".join(map(self._bytes, rows)))
            self._file.flush()

    def _bytes(self, row: array[float]) -> bytes:
        if self.out.suffix == ".npy":
            return row.tobytes()
        return json.dumps({"embedding": row.tolist()}).encode() + b"\n"

    def finish(self) -> None:
        """Give the file its name. Raises OSError with the file's name."""
        with self._named():
            os.fsync(self._file.fileno())
        os.replace(self._part, self.out)
        self._state.unlink(missing_ok=True)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Give the name of the file to an OSError of a descriptor, which has none."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._part)) from error

    def __enter__(self) -> EmbeddingFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # it tries again to write what found no room, of which `write` has told
        with suppress(OSError):
            self._file.close()
        if self._size is None:  # nothing was begun
            self._part.unlink(missing_ok=True)


def _locked(path: Path) -> BinaryIO:
    """Open a file for this process alone. Raises ConfigError where another one writes it."""
    file = os.fdopen(
        os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666), "r+b"
    )
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigError(f"{path} is being written by another run; wait for it") from None
    return file
