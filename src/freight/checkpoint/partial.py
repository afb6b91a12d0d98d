"""Hidden folders that checkpoints are written into, and how one takes the place of the output.

Each has a lock file, which its process holds by flock(2). The system releases the lock when the
process ends, however it ends, so no process id can be mistaken for another's. A folder whose lock
can be taken is abandoned, and the next run removes it. The lock file names the output. On a file
system without flock nothing is removed.

The output is the old one until one rename makes it the new one:

- where nothing is at the output, the rename of the hidden folder;
- where a folder is, the exchange of the two folders (renameat2(2)). The hidden folder is beside the
  output then, and holds the old files afterwards;
- where folders cannot be exchanged (a mount point, NFS, a parent that may not be written), the
  rename of config.json. The hidden folder is in the output then. Old files move into it, config.json
  first, and new files out of it, config.json last. A journal in it names the new files. What was
  interrupted before the last rename is undone by `restore`: at once after an error, and after a kill
  by the next run that reads or writes the output, which has no config.json until then. Where a file
  is says what has been done, so undoing may itself be interrupted.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import fnmatch
import json
import logging
import os
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from freight.base.files import read_bytes, write_whole
from freight.errors import CheckpointError, ConfigError

PATTERN = ".freight.*.partial"
LOCK = ".freight.lock"
JOURNAL = ".freight.replacing"  # the names of new files while they replace others, as JSON
REPLACED = "replaced"  # the old files, where folders cannot be exchanged
_CONFIG = "config.json"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# Those whose handlers may raise, or that end the process
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)

logger = logging.getLogger("freight")


class Partial:
    """A hidden folder of this process, whose lock it holds. `path` changes as it moves."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """descriptor: of the lock file, locked."""
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def make(cls, out: Path) -> Partial:
        """Make a folder on the disk of `out`. Raises OSError if it cannot be written there."""
        out = real(out)
        while True:
            path = workplace(out) / f".freight.{secrets.token_hex(4)}.partial"
            try:
                path.mkdir()
                descriptor = _open_lock(path)
                if _lock(path, descriptor) is not False:
                    os.write(descriptor, os.fsencode(out))
                    return cls(_moved_beside(path, out), descriptor)
                os.close(descriptor)  # another run removed the folder before it had its lock
            except FileExistsError:
                continue
            except FileNotFoundError:
                if not path.parent.is_dir():
                    raise
            except BaseException:
                for place in (path, out.parent / path.name):
                    shutil.rmtree(place, ignore_errors=True)
                raise

    @property
    def has_old_files(self) -> bool:
        """Whether files of the output are here that `restore` will bring back."""
        return _is_interrupted(self.path)

    def remove(self) -> None:
        """Remove the folder with everything in it, as far as that can be removed, but not files that
        the output lacks.
        """
        if not self.has_old_files:
            _discard(self.path)
        if self.descriptor >= 0:
            with suppress(OSError):
                os.close(self.descriptor)
        self.descriptor = -1

    def replace(self, out: Path) -> None:
        """Put the files of this folder in the place of `out`, and of all that it holds.

        Signals wait until it is done. Raises OSError; `out` is as it was then, unless
        `has_old_files`.
        """
        out = real(out)
        with signals_deferred():
            self._sync()
            if not out.is_dir():
                os.rename(self.path, out)
            elif self.path.parent == out or not self._exchange(out):
                self._move(out)
            # The new model is in place: nothing that fails from here on is a fault of writing it
            with suppress(OSError):
                (out / LOCK).unlink()
            with suppress(OSError):
                _sync_path(out.parent)
            self.remove()
            if os.path.lexists(self.path):
                logger.warning("%s, which has old files, cannot be removed", self.path)

    def _exchange(self, out: Path) -> bool:
        """Exchange this folder, which is beside `out`, with it. False where that cannot be done:
        then this folder is in `out` afterwards.
        """
        with suppress(OSError):
            shutil.copystat(out, self.path)
            os.utime(self.path)
            owner = out.stat()
            os.chown(self.path, owner.st_uid, owner.st_gid)
        try:
            exchange(self.path, out)
        except OSError:
            os.rename(self.path, out / self.path.name)
            self.path = out / self.path.name
            return False
        return True

    def _move(self, out: Path) -> None:
        """Move the files of `out` into this folder, which is in it, and the new ones out."""
        old = visible(out)
        new = [name for name in os.listdir(self.path) if name != LOCK]
        write_whole(self.path / JOURNAL, json.dumps(new))
        _sync_path(self.path)
        try:
            (self.path / REPLACED).mkdir()
            for name in sorted(old, key=lambda name: name != _CONFIG):
                os.rename(out / name, self.path / REPLACED / name)
            for name in sorted(new, key=lambda name: name == _CONFIG):
                os.rename(self.path / name, out / name)
        except BaseException:
            if self.has_old_files:
                _undo(self.path)
            raise
        with suppress(OSError):
            _sync_path(out)

    def _sync(self) -> None:
        """Have all files on the disk before anything old is removed. Raises OSError."""
        for path in self.path.rglob("*"):
            _sync_path(path)
        _sync_path(self.path)


def real(out: Path) -> Path:
    """Return the folder that `out` names, through links."""
    return Path(os.path.realpath(out))


def visible(folder: Path) -> list[str]:
    """Return the names in `folder` that are not of hidden folders of Freight. Raises OSError."""
    return [name for name in os.listdir(folder) if not fnmatch.fnmatchcase(name, PATTERN)]


def workplace(out: Path) -> Path:
    """Return the folder, on the disk of `out`, in which hidden folders are made: `out` itself if it
    exists, else its parent.
    """
    return out if out.is_dir() else out.absolute().parent


def remove_abandoned(out: Path) -> None:
    """Remove the hidden folders in and beside `out` that no process holds, whichever output they
    are for. Files of an output that one of them took are brought back first.

    Raises ConfigError where a living run writes `out`, and where its files cannot be brought back.
    """
    out = real(out)
    folders = sorted(out.parent.glob(PATTERN))
    if out.is_dir():
        folders += sorted(out.glob(PATTERN))
    for folder in folders:
        with _locked(folder) as mine:
            if mine is False and _output_of(folder) == out:
                raise ConfigError(
                    f"another run writes {out} ({folder}): wait for it, or name another output"
                )
            if not mine:
                continue
            _settle(folder)
            _discard(folder)
            logger.warning("removed %s, which a killed run left", folder)


def restore(folder: Path) -> None:
    """Bring back the files of the model `folder` if a run that replaced them was killed midway.

    Raises CheckpointError where they cannot be brought back, or a living run replaces them now.
    """
    if os.path.lexists(folder / _CONFIG):
        return
    for hidden in sorted(real(folder).glob(PATTERN)):
        if not _is_interrupted(hidden):
            continue
        with _locked(hidden) as mine:
            if mine is False:
                raise CheckpointError(f"another run writes {folder} ({hidden}): wait for it")
            try:
                _settle(hidden)
            except ConfigError as error:
                raise CheckpointError(str(error)) from error
            _discard(hidden)


def exchange(path: Path, other: Path) -> None:
    """Exchange what two paths name, in one step: renameat2(2). Raises OSError, also where the system
    cannot.
    """
    swap = _renameat2()
    if swap is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(path))
    places = (_AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(other))
    if swap(*places, _RENAME_EXCHANGE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path), None, str(other))


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Have signals wait for the end of the body, if this is the main thread, which handles them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        for number, handler in before.items():
            if handler is not None:  # None: it is not Python's, and could not be put back
                signal.signal(number, note)
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
        for arrival in dict.fromkeys(arrived):
            signal.raise_signal(arrival)


def _renameat2() -> ctypes._NamedFuncPointer | None:
    """Return the C library's function; None where it has none."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def _moved_beside(path: Path, out: Path) -> Path:
    """Move the hidden folder `path` from inside `out` to beside it, where both can be exchanged, and
    return where it is. It stays inside where it cannot be moved: `out` is a mount point, or its
    parent may not be written. So it does if this process is in `out`, whose shell would be in a
    removed folder afterwards.
    """
    moved = out.parent / path.name
    if path == moved or _renameat2() is None or real(Path()).is_relative_to(out):
        return path
    try:
        os.rename(path, moved)
    except OSError:
        return path
    return moved


def _is_interrupted(hidden: Path) -> bool:
    """Return whether replacing files of the output has begun, and its config.json is still to be
    renamed.
    """
    return (hidden / JOURNAL).is_file() and os.path.lexists(hidden / _CONFIG)


def _settle(hidden: Path) -> None:
    """Bring back the files of the output around `hidden` that it took. Raises ConfigError."""
    out = hidden.parent
    way_out = (
        "the files that it replaced, which are there, have to be brought back: run freight inspect "
        f"{out} as a user who may write it, on a disk with room"
    )
    if _is_interrupted(hidden):
        try:
            _undo(hidden)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"a run that overwrote {out} was killed midway ({hidden}: {error}); {way_out}"
            ) from error
        logger.warning("%s is as it was before a run that overwrote it was killed", out)
    elif any((hidden / REPLACED).glob("*")) and not os.path.lexists(out / _CONFIG):
        raise ConfigError(
            f"a run that overwrote {out} was killed midway: the files that it replaced are in "
            f"{hidden / REPLACED}. Move what you need, then remove {out}; or name another output"
        )


def _undo(hidden: Path) -> None:
    """Move new files back into `hidden`, and then the old ones back into the folder around it. May
    be interrupted, and called again. Raises OSError, and ValueError for a journal that is damaged.
    """
    out = hidden.parent
    replaced = hidden / REPLACED
    names = json.loads(read_bytes(hidden / JOURNAL))
    if (
        not isinstance(names, list)
        or not all(map(_is_plain, names))
        or hidden.is_symlink()
        or replaced.is_symlink()
    ):
        raise ValueError(f"{JOURNAL} is damaged")
    for name in names:
        if not os.path.lexists(hidden / name):
            os.rename(out / name, hidden / name)
    old = os.listdir(replaced) if replaced.is_dir() else []
    for name in sorted(old, key=lambda name: name == _CONFIG):
        os.rename(replaced / name, out / name)
    (hidden / JOURNAL).unlink()


def _is_plain(name: object) -> bool:
    """Return whether this is the name of a file in a folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name


def _discard(hidden: Path) -> None:
    """Remove the folder, as far as it can be removed: config.json first, so that nothing loads what
    remains.
    """
    with suppress(OSError):
        (hidden / _CONFIG).unlink(missing_ok=True)
    shutil.rmtree(hidden, ignore_errors=True)


def _sync_path(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_lock(folder: Path) -> int:
    return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


@contextmanager
def _locked(folder: Path) -> Iterator[bool | None]:
    """Try to lock the folder: True if it is locked now, False if another process holds the lock,
    None if it cannot be locked.
    """
    try:
        descriptor = _open_lock(folder)
    except OSError:  # gone by now, or another user's
        yield None
        return
    try:
        yield _lock(folder, descriptor)
    finally:
        os.close(descriptor)


def _lock(folder: Path, descriptor: int) -> bool | None:
    """Take the folder's lock; return whether the folder is there and locked now, None where the
    file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(folder / LOCK))
    except FileNotFoundError:
        return False


def _output_of(folder: Path) -> Path | None:
    """Return the output of the run that holds `folder`; None if it cannot be read."""
    try:
        return Path(os.fsdecode((folder / LOCK).read_bytes()))
    except OSError:
        return None
