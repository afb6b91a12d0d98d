"""BlockFolder: the blocks on disk that one name space has, in the segments of all its writers.
Imports no torch.

    DIR/NAMESPACE/name.json       what the name space stands for
    DIR/NAMESPACE/*.index, *.blocks   segments (`segment.py`)
    DIR/weights.json              digests of weights (`weights.py`)
    DIR/secret                    what salts of API keys are made with (`secret.py`)

Several processes may have one folder open. Each writes segments of its own and reads those of all;
`refresh` finds what came and went. When the whole of DIR, all name spaces together, would become
larger than its limit or than its disk, or is larger when it is opened, the segments that were used
longest ago are deleted; never one that another process still writes. Engines that store at the same
moment may exceed the limit by what they store then: a few MiB each.

Methods may be called from several threads. Only `contains` is called by the thread that computes
steps: it reads nothing from the disk and waits for nobody.
"""

from __future__ import annotations

import json
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from freight.base.files import write_whole
from freight.cache.store.entries import ENTRY_BYTES, Entry
from freight.cache.store.segment import (
    BLOCKS,
    INDEX,
    Segment,
    SegmentWriter,
    delete,
    is_written,
)
from freight.errors import ConfigError

Block = tuple[bytes, int, bytes, bytes]  # key, group, token ids as bytes, payload

NAME = "name.json"
_SEGMENT = re.compile("[0-9a-f]{24}")  # files of other names are not the store's
_UNFINISHED = re.compile(r"(name|weights)\.json\.[0-9a-f]{8}")  # `write_private` was killed
_LEFT = 60.0  # seconds after which what looks left behind is: a writer makes its files in less
_SEGMENTS = 64  # segments that a full store has: what is deleted at once is a part of this size
_SEGMENT_BYTES = 1 << 16, 256 << 20  # least and most of a segment


class FullError(OSError):
    """The store has no room for a block, whatever it deletes."""


class BlockFolder:
    """The blocks of name space `name` in `root`, which holds `limit` bytes at most."""

    def __init__(self, root: Path, name: str, limit: int, decides: Mapping[str, str]) -> None:
        """Make the folders, and read what is there: what is beyond `limit` is deleted. `decides` is
        written beside the blocks.

        Raises OSError, and ConfigError as `make_private`.
        """
        self.root = root
        self.folder = root / name
        self.limit = limit
        self._segment_bytes = min(max(limit // _SEGMENTS, _SEGMENT_BYTES[0]), _SEGMENT_BYTES[1])
        self._lock = threading.RLock()
        self._writing = threading.Lock()
        self._segments: dict[str, Segment] = {}
        self._places: dict[tuple[int, bytes], tuple[Segment, Entry]] = {}
        self._writer: SegmentWriter | None = None
        self._description = json.dumps(dict(decides), indent=1).encode()
        self._prepare()
        remove_leftovers(root)
        self.num_bytes = 0  # of all of `root`, as last counted
        self.refresh()
        with self._writing:  # the limit may be lower than the one that this was written with
            self._delete_oldest(0)

    def __len__(self) -> int:
        return len(self._places)

    def contains(self, key: bytes, group: int) -> bool:
        return (group, key) in self._places

    def refresh(self) -> None:
        """Find what other processes stored and deleted. Raises OSError, and ConfigError as
        `make_private`: the folder may have been removed, and made again by somebody else.
        """
        try:
            for folder in (self.root, self.folder):
                if folder.exists():
                    _refuse_shared(folder)
        except ConfigError:
            with self._writing:
                self._close_writer()  # its files are gone
            raise
        there = {path.name: path for path in self.folder.glob("*" + INDEX)}
        with self._writing:
            if self._writer is not None and self._writer.segment.index.name not in there:
                self._close_writer()  # somebody deleted it: what is written there is never found
        with self._lock:
            for name in self._segments.keys() - there.keys():
                self._forget(self._segments[name])
            for name, path in sorted(there.items()):
                segment = self._segments.setdefault(name, Segment(path))
                try:
                    for entry in segment.new_entries():
                        self._places.setdefault((entry.group, entry.key), (segment, entry))
                except OSError:  # deleted meanwhile, or not to be read: as if it were not there
                    self._forget(segment)
        self.num_bytes = sum(size for _, _, size in segments_of(self.root))

    def record_bytes(self, key: bytes, group: int) -> int:
        """Return the bytes of a block's record; 0 if it is not there."""
        place = self._places.get((group, key))
        if place is None:
            return 0
        return place[1].record_bytes

    def read_into(self, key: bytes, group: int, tokens: bytes, record: memoryview) -> bool:
        """Read a block's record, its token ids and then its payload, into `record`.

        False if it is damaged, or has another size or other token ids than `tokens`: it is
        forgotten then. Raises KeyError if there is none, and OSError.
        """
        segment, entry = self._places[group, key]
        try:
            sound = (
                entry.record_bytes == len(record)
                and entry.token_bytes == len(tokens)
                and segment.read_into(entry, record)
                and record[: len(tokens)] == tokens
            )
        except OSError:
            with self._lock:
                self._forget(segment)
            raise
        if not sound:
            self.forget(key, group)
        return sound

    def forget(self, key: bytes, group: int) -> None:
        """Find a block no more."""
        with self._lock:
            self._places.pop((group, key), None)

    def touch(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        """Note that a prefix was used, its blocks (key, group) in order: its start becomes the
        newest.
        """
        segments = {}
        with self._lock:
            for key, group in reversed(blocks):
                place = self._places.get((group, key))
                if place is not None:
                    segments[place[0].index.name] = place[0]
        for segment in segments.values():
            segment.touch()

    def append(self, blocks: Sequence[Block]) -> None:
        """Store blocks. Raises OSError, `FullError` if they do not fit, and ConfigError as
        `make_private`, and stores none of them.
        """
        with self._writing:
            needed = 0
            for _, _, tokens, payload in blocks:
                needed += ENTRY_BYTES + len(tokens) + len(payload)
            self._make_room(needed)
            if self._writer is None:
                if self.root.is_dir():  # `freight store clear` takes folders of name spaces away
                    self._prepare()
                self._writer = SegmentWriter(self.folder)
            writer = self._writer
            try:
                entries = writer.append(blocks)
            except OSError:
                self._close_writer()
                raise
            with self._lock:
                segment = self._segments.setdefault(writer.segment.index.name, writer.segment)
                segment.skip(len(entries))
                for entry in entries:
                    self._places[entry.group, entry.key] = (segment, entry)
            self.num_bytes += needed
            if writer.size >= self._segment_bytes:
                self._close_writer()

    def close(self) -> None:
        """Give up the segment that is being written, and all open files."""
        with self._writing:
            self._close_writer()
        with self._lock:
            for segment in self._segments.values():
                segment.close()

    def _prepare(self) -> None:
        make_private(self.root)
        make_private(self.folder)
        if not (self.folder / NAME).exists():
            write_private(self.folder / NAME, self._description)

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _forget(self, segment: Segment) -> None:
        segment.close()
        self._segments.pop(segment.index.name, None)
        self._places = {
            where: place for where, place in self._places.items() if place[0] is not segment
        }

    def _make_room(self, needed: int) -> None:
        """Delete what was used longest ago. The segment being written goes last, and is ended for
        it. All is counted anew: other engines store as well.
        """
        room = self._delete_oldest(needed)
        if self.num_bytes + needed > room and self._writer is not None:
            self._close_writer()
            room = self._delete_oldest(needed)
        if self.num_bytes + needed > room:
            raise FullError(
                f"{needed:,} bytes do not fit into the {self.limit:,} of the store or into its disk, "
                "beside what other engines are writing"
            )

    def _delete_oldest(self, needed: int) -> int:
        """Return the bytes that the store may have: its limit, or less on a smaller disk."""
        segments = sorted(segments_of(self.root))
        self.num_bytes = sum(size for _, _, size in segments)
        disk = os.statvfs(self.root)
        room = self.limit
        if disk.f_blocks:  # 0: it does not say, as tmpfs without a size and some of FUSE
            room = min(room, self.num_bytes + disk.f_bavail * disk.f_frsize)
        for _, index, size in segments:
            if self.num_bytes + needed <= room:
                break
            with suppress(FileNotFoundError):
                if is_written(index):
                    continue
                delete(index)
            self.num_bytes -= size
            with self._lock:
                segment = self._segments.get(index.name)
                if segment is not None and segment.index == index:
                    self._forget(segment)
        return room


def segments_of(root: Path) -> Iterator[tuple[int, Path, int]]:
    """Yield (last use in nanoseconds, index, bytes of both files) of each segment in all name
    spaces of `root`. Deletes records whose index is gone.
    """
    for blocks in sorted(root.glob("*/*" + BLOCKS)):
        index = blocks.with_suffix(INDEX)
        if not _SEGMENT.fullmatch(blocks.stem):
            continue
        try:
            size = blocks.stat().st_size
            state = index.stat()
        except FileNotFoundError:
            if not index.exists():
                with suppress(OSError):
                    blocks.unlink()
            continue
        yield state.st_mtime_ns, index, size + state.st_size


def remove_leftovers(root: Path, seconds: float = _LEFT) -> None:
    """Delete files of writers that were killed, in which nothing can be found: an index without
    records or without entries, and what was not written whole. None that is younger than `seconds`.
    """
    latest = time.time() - seconds
    for path in (*root.glob("*.json.*"), *root.glob("*/*.json.*")):
        with suppress(OSError):
            if _UNFINISHED.fullmatch(path.name) and path.stat().st_mtime <= latest:
                path.unlink()
    for index in root.glob("*/*" + INDEX):
        if not _SEGMENT.fullmatch(index.stem):
            continue
        with suppress(OSError):
            state = index.stat()
            is_empty = state.st_size < ENTRY_BYTES or not index.with_suffix(BLOCKS).exists()
            if is_empty and state.st_mtime <= latest and not is_written(index):
                delete(index)


def make_private(folder: Path) -> None:
    """Make a folder that its owner alone may enter. Raises OSError, and ConfigError for one that
    others may write into: they could give this engine blocks of their own.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    _refuse_shared(folder)


def _refuse_shared(folder: Path) -> None:
    state = folder.stat()
    if not stat.S_ISDIR(state.st_mode):
        raise ConfigError(f"--kv-store {folder} is not a folder; name one, or a new one")
    if state.st_mode & 0o022 or state.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"--kv-store {folder}: others may write into it (mode {state.st_mode & 0o777:o}, user "
            f"{state.st_uid}), and what they write would be read as computed; chmod 700 it, or "
            "name a folder of your own"
        )


def write_private(path: Path, content: bytes) -> None:
    """Write a file that its owner alone may read, whole or not at all. Raises OSError."""
    write_whole(path, content, mode=0o600)
