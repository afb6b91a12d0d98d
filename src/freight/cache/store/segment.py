"""A segment: two files with blocks of one writer. Imports no torch.

NAME.blocks has the records, one after another. NAME.index has their entries. Both are appended and
never rewritten. An entry is written once its record is on the disk. So a writer that is killed, or a
machine that loses power, leaves records without an entry, or part of an entry at the end of the
index; neither is ever read.

The writer holds a lock on the index while it lives, so that nobody deletes the segment. A fork of it
gives its part in the lock up. A later writer begins a segment of its own. The index is created
before the records' file and deleted before it: records without an index are what is left of a
deletion. The time of the index's last change is when the segment was last used.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from freight.cache.store.entries import ENTRY_BYTES, Entry, decode_entries, digest_of

INDEX = ".index"
BLOCKS = ".blocks"
_PRIVATE = 0o600  # what is stored is what users wrote
_sync = getattr(os, "fdatasync", os.fsync)  # macOS has the second alone


class _Open:
    """An open file, closed once nobody uses it: a segment may be given up while a thread reads it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class Segment:
    """The files of one segment, as a reader sees them. Raises OSError where a file cannot be read."""

    def __init__(self, index: Path) -> None:
        self.index = index
        self.blocks = index.with_suffix(BLOCKS)
        self._num_read = 0  # bytes of the index
        self._file: _Open | None = None

    def new_entries(self) -> Iterator[Entry]:
        """Yield the entries that came since the last call."""
        with self.index.open("rb") as file:
            file.seek(self._num_read)
            data = file.read()
        data = data[: len(data) - len(data) % ENTRY_BYTES]
        self._num_read += len(data)
        yield from decode_entries(data)

    def skip(self, num_entries: int) -> None:
        """Leave out the next `num_entries` new entries, which the caller knows already."""
        self._num_read += num_entries * ENTRY_BYTES

    def read_into(self, entry: Entry, record: memoryview) -> bool:
        """Read a record into `record`, which has its size; False unless every byte is as it was
        written.
        """
        file = self._file  # `close` may come meanwhile, from another thread
        if file is None:
            file = self._file = _Open(os.open(self.blocks, os.O_RDONLY | os.O_CLOEXEC))
        num_read = 0
        while num_read < len(record):
            count = os.preadv(file.number, [record[num_read:]], entry.offset + num_read)
            if count == 0:
                return False
            num_read += count
        return digest_of(entry.key, entry.group, record) == entry.digest

    def touch(self) -> None:
        """Note that the segment is used now."""
        now = time.time_ns()
        with suppress(OSError):  # it was deleted, or is another user's
            os.utime(self.index, ns=(now, now))

    def close(self) -> None:
        self._file = None


class SegmentWriter:
    """The end of a new segment in `folder`. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        name = f"{time.time_ns():016x}{os.urandom(4).hex()}"
        self.segment = Segment(folder / (name + INDEX))
        self.size = 0  # bytes of the records
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        self._index = os.open(self.segment.index, flags, _PRIVATE)
        try:
            fcntl.flock(self._index, fcntl.LOCK_EX)  # `is_written` may have it for a moment
            self._blocks = os.open(self.segment.blocks, flags, _PRIVATE)
        except OSError:
            os.close(self._index)
            delete(self.segment.index)
            raise
        self._is_open = True
        _living.add(self)

    def append(self, blocks: Sequence[tuple[bytes, int, bytes, bytes]]) -> list[Entry]:
        """Store blocks of (key, group, token ids, payload) and return their entries.

        Raises OSError where not all can be written. The writer has to be closed then; what it
        stored before stays.
        """
        entries = []
        written = []
        offset = self.size
        for key, group, tokens, payload in blocks:
            record = tokens + payload
            digest = digest_of(key, group, record)
            entries.append(Entry(key, group, digest, offset, len(tokens), len(payload)))
            written.append(record)
            offset += len(record)
        try:
            for record in written:
                _write(self._blocks, record)
            _sync(self._blocks)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._blocks, self.size)
            raise
        self.size = offset
        _write(self._index, b"".join(entry.encode() for entry in entries))
        _sync(self._index)
        return entries

    def close(self) -> None:
        """Give up the lock. A segment without blocks is deleted."""
        if self._is_open and self.size == 0:
            delete(self.segment.index)
        self.leave()

    def leave(self) -> None:
        """Close the files, and leave them as they are. A second time does nothing."""
        if self._is_open:
            self._is_open = False
            os.close(self._blocks)
            os.close(self._index)


_living: weakref.WeakSet[SegmentWriter] = weakref.WeakSet()  # of this process


def _leave_in_child() -> None:
    for writer in _living:
        writer.leave()


os.register_at_fork(after_in_child=_leave_in_child)


def _write(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def delete(index: Path) -> None:
    """Delete a segment. Engines that have its files open can still read them."""
    for path in (index, index.with_suffix(BLOCKS)):
        with suppress(FileNotFoundError):
            path.unlink()


def is_written(index: Path) -> bool:
    """Return whether a writer holds the segment. Raises OSError where it is not there."""
    file = os.open(index, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
