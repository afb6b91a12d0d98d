"""The digest of a model's weights, of every byte, and where it is kept. Imports no torch.

Two fine-tunings of one model have files of the same names and sizes, so names, sizes and samples
cannot tell whose blocks these are. To read 16 GB takes 10 seconds or more, so the digest of a file is kept
in the store by its path, size, times of change and inode. The time of a change of the inode is
among them because nobody can set it back. A file system that keeps it in whole seconds may be an
image, in which it can be any: there digests are computed each time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from freight.base.json_schema import Json
from freight.cache.store.folder import write_private

FILE = "weights.json"
_READ = 8 << 20
_KEPT = 1024  # digests of files


@dataclass(frozen=True)
class WeightFile:
    """A file of weights, and what would be different had it changed.

    path    where it is
    state   size, mtime and ctime in nanoseconds, inode
    name    what it was found by: a link, or a folder that is one, may lead elsewhere later
    """

    path: str
    state: tuple[int, int, int, int]
    name: str

    @staticmethod
    def of(path: Path) -> WeightFile:
        """Raises OSError."""
        resolved = path.resolve()
        status = resolved.stat()
        state = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        return WeightFile(str(resolved), state, str(path.absolute()))

    @property
    def is_told_apart(self) -> bool:
        """Whether another file could not have this state. In images (squashfs, ISO 9660) and on some
        network file systems it can: the times are those of the image, in whole seconds.
        """
        return self.state[2] % 10**9 != 0


class ChangedError(Exception):
    """A file of weights is not the one that was loaded."""


def digest_of_weights(
    root: Path, files: Sequence[WeightFile], is_wanted: Callable[[], bool] = lambda: True
) -> str | None:
    """Return the digest of all files, computed or as kept in `root`; None once it is not wanted.

    Raises OSError, and ChangedError if a file is not as it was when `files` was made.
    """
    known = _known(root)
    all_files = hashlib.sha256()
    for file in files:
        state, digest = known.get(file.path, ([], ""))
        if state != list(file.state) or not file.is_told_apart:
            read = _digest(file, is_wanted)
            if read is None:
                return None
            if file.is_told_apart:
                _keep(root, file, read)
            digest = read
        if WeightFile.of(Path(file.name)) != file:
            raise ChangedError(file.path)
        all_files.update(f"{Path(file.path).name} {digest}\n".encode())
    return all_files.hexdigest()


def has_digests(root: Path) -> bool:
    """Return whether `root` has digests of weights."""
    return any(len(state) == 4 and digest for state, digest in _known(root).values())


def _digest(file: WeightFile, is_wanted: Callable[[], bool]) -> str | None:
    digest = hashlib.sha256()
    with open(file.path, "rb", buffering=0) as data:
        while piece := data.read(_READ):
            if not is_wanted():
                return None
            digest.update(piece)
    return digest.hexdigest()


def _known(root: Path) -> dict[str, tuple[list[int], str]]:
    """Return the state and digest of the files that are kept, by path; nothing where they cannot be
    read.
    """
    try:
        content: Json = json.loads((root / FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {path: _read(value) for path, value in content.items()}


def _read(value: Json) -> tuple[list[int], str]:
    """Return the state and digest that `value` holds. Of anything else the state is [], which no file
    has.
    """
    if not isinstance(value, list) or not value or not isinstance(value[-1], str):
        return [], ""
    return [number for number in value[:-1] if isinstance(number, int)], value[-1]


def _keep(root: Path, file: WeightFile, digest: str) -> None:
    known = _known(root)
    known.pop(file.path, None)
    known[file.path] = list(file.state), digest
    newest = {}
    for path, (state, weights_digest) in list(known.items())[-_KEPT:]:
        newest[path] = [*state, weights_digest]
    with suppress(OSError):  # it is computed again
        write_private(root / FILE, json.dumps(newest, indent=1).encode())
