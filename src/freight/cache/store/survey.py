"""What a store's folder holds, for people: list it, check it, empty it. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from freight.cache.store.entries import ENTRY_BYTES, Entry
from freight.cache.store.folder import NAME, remove_leftovers, segments_of
from freight.cache.store.secret import has_secret
from freight.cache.store.segment import INDEX, Segment, delete, is_written
from freight.cache.store.weights import FILE as WEIGHTS
from freight.cache.store.weights import has_digests
from freight.errors import ConfigError

_SPACE = re.compile("[0-9a-f]{32}")  # `engine.store.name_space`


@dataclass(frozen=True)
class Space:
    """One name space: the blocks that one model, cache and build share.

    decides     what it stands for, by what it is (`engine.store.what_decides`)
    num_bytes   of its files
    last_used   in seconds since 1970
    writers     engines that write into it now
    """

    name: str
    decides: dict[str, str]
    num_blocks: int
    num_bytes: int
    last_used: float
    writers: int


@dataclass(frozen=True)
class Verified:
    """How many blocks of a store are sound, and how many are damaged."""

    sound: int
    damaged: int


def survey(root: Path) -> list[Space]:
    """Return the name spaces, the one that was used last first. Raises ConfigError."""
    _require(root)
    used: dict[str, list[tuple[int, Path, int]]] = {}
    for segment in segments_of(root):
        used.setdefault(segment[1].parent.name, []).append(segment)
    spaces = []
    for name, segments in used.items():
        spaces.append(_space(name, _decides(root / name / NAME), segments))
    return sorted(spaces, key=lambda space: -space.last_used)


def _space(name: str, decides: dict[str, str], segments: Sequence[tuple[int, Path, int]]) -> Space:
    """Return the name space of `segments`: when each was last used in nanoseconds, its index, and
    its bytes.
    """
    blocks: set[tuple[int, bytes]] = set()
    num_bytes = 0
    last_used = 0
    writers = 0
    for when, index, size in segments:
        num_bytes += size
        last_used = max(last_used, when)
        with suppress(OSError):
            writers += is_written(index)
        for entry in _entries(index):
            blocks.add((entry.group, entry.key))
    return Space(name, decides, len(blocks), num_bytes, last_used / 1e9, writers)


def verify(root: Path) -> Verified:
    """Read every block. Raises ConfigError."""
    _require(root)
    sound = damaged = 0
    for _, index, size in segments_of(root):
        segment = Segment(index)
        entries = _entries(index)
        with suppress(OSError):
            damaged += index.stat().st_size // ENTRY_BYTES - len(entries)
        for entry in entries:
            if _is_sound(segment, entry, size):
                sound += 1
            else:
                damaged += 1
        segment.close()
    return Verified(sound, damaged)


def clear(root: Path) -> int:
    """Delete all blocks but those of segments that an engine writes now; return the bytes. Raises
    ConfigError.

    The secret stays: a server that runs now makes its salts with it, also of what it stores later.
    """
    _require(root)
    try:
        return _clear(root)
    except OSError as error:  # a read-only file system, or another user's
        raise ConfigError(f"{root} cannot be emptied: {error}") from None


def _clear(root: Path) -> int:
    remove_leftovers(root, seconds=0)
    freed = 0
    for _, index, size in list(segments_of(root)):
        with suppress(FileNotFoundError):
            if not is_written(index):
                delete(index)
                freed += size
    for described in _described(root):
        if not any(described.parent.glob("*" + INDEX)):
            described.unlink(missing_ok=True)
            with suppress(OSError):  # there is something that is not the store's
                described.parent.rmdir()
    if has_digests(root):
        (root / WEIGHTS).unlink(missing_ok=True)
    return freed


def _require(root: Path) -> None:
    """Refuse what is no store: names of files are not enough to delete them by."""
    if not root.is_dir():
        raise ConfigError(f"{root} is not a folder; name the DIR of --kv-store")
    is_store = bool(_described(root)) or has_digests(root) or has_secret(root)
    try:
        is_empty = not any(root.iterdir())
    except OSError as error:
        raise ConfigError(f"{root} cannot be read: {error}") from None
    if not is_empty and not is_store:
        raise ConfigError(f"{root} holds other files than a store; name the DIR of --kv-store")


def _described(root: Path) -> list[Path]:
    """Return the descriptions of all name spaces."""
    return [path for path in root.glob(f"*/{NAME}") if _SPACE.fullmatch(path.parent.name)]


def _entries(index: Path) -> list[Entry]:
    try:
        return list(Segment(index).new_entries())
    except OSError:
        return []


def _is_sound(segment: Segment, entry: Entry, most: int) -> bool:
    if entry.record_bytes > most:
        return False
    try:
        return segment.read_into(entry, memoryview(bytearray(entry.record_bytes)))
    except OSError:
        return False


def _decides(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {str(name): str(value) for name, value in content.items()}
