"""Readers of files that a user names: regular files only, up to a size limit.

Opening a FIFO would wait for a writer forever, and a device may have no end. Both are refused with
the OSError that callers report anyway; its text has the kind of file, or the limit.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from freight.errors import ConfigError, FreightError, shown

MIB = 2**20
LIMIT = 256 * MIB  # of JSON, templates and recipes: the largest tokenizer.json known has 33 MiB
DATA_LIMIT = 4096 * MIB  # of texts to measure or calibrate by, which are held in memory
PROMPT_LIMIT = 64 * MIB  # of a prompt, also from standard input
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: str | os.PathLike[str], limit: int | None = None) -> BinaryIO:
    """Open a regular file for reading. Raises OSError, without waiting, for any other kind of file
    or more than `limit` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        found = os.fstat(descriptor)
        kind = stat.S_IFMT(found.st_mode)
        if kind == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if kind != stat.S_IFREG:
            raise OSError(
                errno.EINVAL,
                f"It is {_KINDS.get(kind, 'no file')}; only regular files are read",
                str(path),
            )
        if limit is not None and found.st_size > limit:
            raise too_large(limit, str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: str | os.PathLike[str], limit: int = LIMIT) -> bytes:
    """Read all bytes of a regular file. Raises OSError as `open_regular`."""
    with open_regular(path, limit) as file:
        data = file.read(limit + 1)
    if len(data) > limit:  # the file grew, or is in /proc, where sizes are 0
        raise too_large(limit, str(path))
    return data


def read_text(
    path: Path, encoding: str = "utf-8", limit: int = LIMIT, newline: str | None = None
) -> str:
    """Read the text of a regular file. Raises OSError as `open_regular`, and UnicodeDecodeError."""
    return io.TextIOWrapper(io.BytesIO(read_bytes(path, limit)), encoding, newline=newline).read()


def read_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises OSError as `open_regular`, and ValueError for anything but an object; its text continues
    a sentence that begins with the file's name.
    """
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"holds {type(content).__name__}, not a JSON object")  # noqa: TRY004
    return content


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, as `object_pairs_hook` of json.loads. Raises DuplicateNameError
    where a name comes twice: readers differ on which of the two counts.
    """
    content = dict(pairs)
    if len(content) < len(pairs):
        raise DuplicateNameError(Counter(name for name, _ in pairs).most_common(1)[0][0])
    return content


class DuplicateNameError(ValueError):
    """An object of JSON has `name` twice."""

    def __init__(self, name: str) -> None:
        super().__init__(f"an object has the name {shown(name)} twice")
        self.name = name


@contextmanager
def reading(given: str, refused: type[FreightError] = ConfigError) -> Iterator[None]:
    """Raise `refused` for a text that cannot be read; `given` is the option with its value."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise refused(f"{given} cannot be read as text: {error}") from None


def too_large(limit: int, name: str) -> OSError:
    """Return the error for a file of more than `limit` bytes."""
    return OSError(errno.EFBIG, f"It has more than {limit // MIB} MiB, the most that is read", name)
