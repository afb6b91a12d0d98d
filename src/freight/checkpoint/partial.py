"""Hidden folders that checkpoints are written into; the next run removes those of killed runs.

Each has a lock file, which its process holds by flock(2). The system releases the lock when the
process ends, however it ends, so no process id can be mistaken for another's. A folder whose lock
can be taken is abandoned. The lock file names the output. On a file system without flock nothing is
removed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from freight.errors import ConfigError

PATTERN = ".freight.*.partial"
LOCK = ".freight.lock"
REPLACED = "replaced"  # the old files of an output that is overwritten

logger = logging.getLogger("freight")


@dataclass(frozen=True)
class Partial:
    """A hidden folder of this process; `descriptor` holds its lock."""

    path: Path
    descriptor: int

    @classmethod
    def make(cls, out: Path) -> Partial:
        """Make a folder on the disk of `out`. Raises OSError if it cannot be written there."""
        while True:
            path = workplace(out) / f".freight.{secrets.token_hex(4)}.partial"
            try:
                path.mkdir()
                descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
                if _lock(path, descriptor) is not False:
                    os.write(descriptor, os.fsencode(out.absolute()))
                    return cls(path, descriptor)
                os.close(descriptor)  # another run removed the folder before it had its lock
            except FileExistsError:
                continue
            except FileNotFoundError:
                if not path.parent.is_dir():
                    raise
            except BaseException:
                shutil.rmtree(path, ignore_errors=True)
                raise

    def remove(self) -> None:
        """Remove the folder with everything in it, as far as that can be removed."""
        # First, so that nothing loads the folder if the rest is interrupted as well
        (self.path / "config.json").unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.descriptor)

    def become(self, out: Path) -> None:
        """Rename the folder to `out`. Raises OSError."""
        os.rename(self.path, out)
        (out / LOCK).unlink(missing_ok=True)
        os.close(self.descriptor)


def workplace(out: Path) -> Path:
    """Return the folder that hidden folders are made in, on the disk of `out`: `out` itself if it
    exists, else its parent.
    """
    return out if out.is_dir() else out.absolute().parent


def remove_abandoned(out: Path) -> None:
    """Remove the hidden folders in `workplace(out)` that no process holds, whichever output they
    are for.

    Raises ConfigError where a living run writes `out`, and where a run was killed while it replaced
    the files of `out`: then the hidden folder has the old files, and `out` no config.json.
    """
    for folder in sorted(workplace(out).glob(PATTERN)):
        with _locked(folder) as mine:
            if mine is False and _output_of(folder) == out.absolute():
                raise ConfigError(
                    f"another run writes {out} ({folder}): wait for it, or name another output"
                )
            if not mine:
                continue
            if any((folder / REPLACED).glob("*")) and not (folder.parent / "config.json").exists():
                raise ConfigError(
                    f"a run that overwrote {out} was killed midway: the files that it replaced are in "
                    f"{folder / REPLACED}. Move what you need, then remove {out}; or name another output"
                )
            shutil.rmtree(folder, ignore_errors=True)
            logger.warning("removed %s, which a killed run left", folder)


@contextmanager
def _locked(folder: Path) -> Iterator[bool | None]:
    """Try to lock the folder: True if it is locked now, False if another process holds the lock,
    None if it cannot be locked.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
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
