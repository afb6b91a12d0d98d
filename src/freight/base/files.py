"""Reading and writing of files that a user names.

Only regular files are read, up to a size limit. Opening a FIFO would wait for a writer forever, and
a device may have no end. Both are refused with the OSError that callers report anyway; its text has
the kind of file, or the limit. `outside` says which file of a folder is a link out of it.

`write_whole` leaves the old file or the new one, never a part of it, whatever interrupts.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from freight.errors import CapacityError, ConfigError, FreightError, shown

MIB = 2**20
LIMIT = 256 * MIB  # of JSON, templates and recipes: the largest tokenizer.json known has 33 MiB
DATA_LIMIT = 4096 * MIB  # of texts to measure or calibrate by, which are held in memory
PROMPT_LIMIT = 64 * MIB  # of a prompt, also from standard input
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a write that finds no room
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
        status = os.fstat(descriptor)
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if kind != stat.S_IFREG:
            raise OSError(
                errno.EINVAL,
                f"It is {_KINDS.get(kind, 'no file')}; only regular files are read",
                str(path),
            )
        if limit is not None and status.st_size > limit:
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
    """Read the text of a regular file. Raises OSError as `open_regular`, and UnicodeDecodeError,
    whose text has the line and the way out.
    """
    data = read_bytes(path, limit)
    try:
        return io.TextIOWrapper(io.BytesIO(data), encoding, newline=newline).read()
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        error.reason += f", on line {line}; save the file as UTF-8"
        raise


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
def reading(name: str, refused: type[FreightError] = ConfigError) -> Iterator[None]:
    """Raise `refused` for a text that cannot be read; `given` is what named it, with its value."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise refused(f"{name} cannot be read as text: {error}") from None


def write_whole(
    path: str | os.PathLike[str], content: str | bytes, mode: int | None = None
) -> None:
    """Write a file whole, or leave it as it was: a new file beside it takes its place. Text is
    UTF-8. A link stays, and its target is written.

    mode: permissions, before the umask; default: those of the old file, or 0666. Raises OSError
    with the path.
    """
    target = Path(os.path.realpath(path))
    data = content.encode("utf-8") if isinstance(content, str) else content
    # Names have 255 bytes at most
    new = target.with_name(f"{target.name[:40]}.{os.urandom(4).hex()}")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0)
    try:
        descriptor = os.open(new, flags, 0o666 if mode is None else mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if mode is None and target.exists():
                shutil.copymode(target, new)
            os.replace(new, target)
        except BaseException:
            with suppress(OSError):
                new.unlink()
            raise
    except OSError as error:
        # Python's error names the new file, or none
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


@contextmanager
def writing(option: str) -> Iterator[None]:
    """Raise an error that names `option`, what asked for a file, and the file that cannot be
    written: CapacityError for a full disk, else ConfigError.
    """
    try:
        yield
    except OSError as error:
        fault = f"{option}: {error.filename} cannot be written: {error.strerror}"
        if error.errno in FULL:
            raise CapacityError(f"{fault}; make room, or name one on another disk") from None
        raise ConfigError(f"{fault}; name another") from None


def outside(folder: Path, file: Path) -> Path | None:
    """Return where `file`, an entry of `folder`, leads if that is outside of the folder: through a
    link. None for a file in it.

    A snapshot in the cache of the Hugging Face hub, .../snapshots/REVISION, has links to
    .../blobs: these are its own files.
    """
    root = Path(os.path.realpath(folder))
    target = Path(os.path.realpath(file))
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    return None if any(target.is_relative_to(place) for place in roots) else target


def too_large(limit: int, name: str) -> OSError:
    """Return the error for a file of more than `limit` bytes."""
    return OSError(errno.EFBIG, f"It has more than {limit // MIB} MiB, the most that is read", name)
