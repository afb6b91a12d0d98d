"""The secret of a store: what the salts of a server's API keys are made with. Imports no torch.

A key's prompts are found under the salt of that key alone, and nobody can make a salt without the
secret. It lies beside the blocks, so a server that starts again finds what it stored, and blocks
that are copied into another folder are found by nobody there. Who can read it can read the blocks as
well: it protects no file.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from pathlib import Path

from freight.cache.store.folder import make_private
from freight.errors import ConfigError

FILE = "secret"
_BYTES = 32


def kept_secret(root: Path) -> bytes:
    """Return the secret of the store in `root`, drawn now if it has none. Folder and secret are made
    where they are not there. One that is damaged is drawn anew: what was stored with it is lost.

    Raises ConfigError for a folder or file that others may have written or read, or that cannot be
    used.
    """
    path = root / FILE
    try:
        make_private(root)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(
            f"--kv-store {root} cannot be used: {error}; name a folder that can be made and written, or "
            "omit --kv-store-salted"
        ) from None
    try:
        _refuse_shared(path, os.fstat(file))
        fcntl.flock(file, fcntl.LOCK_EX)  # of two servers that start at once, the second reads
        content = os.pread(file, _BYTES + 1, 0)
        if len(content) != _BYTES:
            content = secrets.token_bytes(_BYTES)
            os.ftruncate(file, 0)
            os.pwrite(file, content, 0)
            os.fsync(file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read or written: {error}; delete it") from None
    finally:
        os.close(file)
    return content


def has_secret(root: Path) -> bool:
    """Return whether `root` has the secret of a store."""
    try:
        state = (root / FILE).lstat()
    except OSError:
        return False
    private = stat.S_ISREG(state.st_mode) and not state.st_mode & 0o077
    return private and state.st_size in (0, _BYTES)


def _refuse_shared(path: Path, state: os.stat_result) -> None:
    """Raise ConfigError for what others may know."""
    if not stat.S_ISREG(state.st_mode) or state.st_mode & 0o077 or state.st_uid != os.geteuid():
        raise ConfigError(
            f"{path}: others may know it (mode {state.st_mode & 0o777:o}, user {state.st_uid}), and salts "
            "are made with it; delete it: prompts that were stored with it are then found no more"
        )
