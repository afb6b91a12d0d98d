"""StoreTiers: blocks by key, in memory and then on disk. Everything wrong is a miss. Imports no
torch.

The disk's tier is there once the name space is known, which takes as long as to read the weights.
No method raises an OSError: a full, slow, damaged or vanished disk costs what it holds and nothing
else. Each kind of failure is logged once and counted always.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import MappingProxyType

from freight.cache.store.folder import Block, BlockFolder, FullError
from freight.cache.store.memory import MemoryTier
from freight.errors import ConfigError
from freight.outputs import StoreStats

logger = logging.getLogger("freight")

_REST = 30.0  # seconds without writing after a write that failed
_REFRESH = 2.0  # seconds between two looks at what other engines stored


class Tier(Enum):
    """Where a block was found."""

    MEMORY = "memory"
    DISK = "disk"


class StoreTiers:
    """The store of one engine: `memory` bytes in memory over `disk` bytes in the folder `root`.

    `contains` may be called from any thread and never waits. The others are for the threads that
    read and write.
    """

    def __init__(
        self, root: Path, disk: int, memory: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.root = root
        self._counts: Counter[str] = Counter()
        self._disk_limit = disk
        self._memory = MemoryTier(memory)
        self.disk: BlockFolder | None = None
        self._clock = clock
        self._said: set[str] = set()
        self._rests_until = self._refreshed = -1e9
        self._lock = threading.Lock()  # of `_counts`, which two threads write

    @property
    def is_open(self) -> bool:
        return self.disk is not None

    def open(self, name: str, decides: Mapping[str, str] = MappingProxyType({})) -> None:
        """Begin to use name space `name`, which stands for what `decides` says."""
        try:
            self.disk = BlockFolder(self.root, name, self._disk_limit, decides)
        except (OSError, ConfigError) as error:
            self._failed("cannot be opened", error)
            return
        logger.info(
            "KV store: %s blocks for this model and cache in %s", f"{len(self.disk):,}", self.root
        )

    def tier_of(self, key: bytes, group: int) -> Tier | None:
        """Return the first tier that has a block; None before the store is open as well."""
        disk = self.disk
        if disk is None:
            return None
        if self._memory.contains(key, group):
            return Tier.MEMORY
        return Tier.DISK if disk.contains(key, group) else None

    def contains(self, key: bytes, group: int) -> bool:
        return self.tier_of(key, group) is not None

    def is_stored(self, key: bytes, group: int) -> bool:
        """Return whether a block is on the disk."""
        return self.disk is not None and self.disk.contains(key, group)

    def read_into(self, key: bytes, group: int, tokens: bytes, record: memoryview) -> Tier | None:
        """Read the record of a block, its token ids `tokens` and its payload, into `record`, which is
        kept in memory and must not change. Return the tier that had it, or None: then `record` means
        nothing.
        """
        stored = self._memory.get(key, group, tokens)
        if stored is not None and len(stored) == len(record):
            record[:] = stored
            self._count("memory_hits")
            return Tier.MEMORY
        if self.disk is None:
            return None
        try:
            sound = self.disk.read_into(key, group, tokens, record)
        except KeyError:
            self._count("misses")
            return None
        except OSError as error:
            self._count("misses")
            if not isinstance(error, FileNotFoundError) or not self.root.is_dir():
                self._failed("cannot be read", error)  # else another engine deleted it for room
            return None
        if not sound:
            self._count("misses")
            self._count("corrupt")
            self._say("damaged", "KV store: a block in %s is damaged; it is computed", self.root)
            return None
        self._count("disk_hits")
        self._memory.put(key, group, record)
        return Tier.DISK

    def write(self, blocks: Sequence[Block]) -> None:
        """Store blocks that are not stored yet."""
        disk = self.disk
        if disk is None or self._clock() < self._rests_until:
            self._count("dropped", len(blocks))
            return
        try:
            disk.append(blocks)
        except (OSError, ConfigError) as error:
            self._count("dropped", len(blocks))
            self._rests_until = self._clock() + _REST
            self._failed("is full" if isinstance(error, FullError) else "cannot be written", error)
            return
        self._count("stored", len(blocks))
        for key, group, tokens, payload in blocks:
            self._memory.put(key, group, tokens + payload)

    def touch(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        """Note that a prefix was used: its blocks (key, group) in order."""
        if self.disk is not None:
            self.disk.touch(blocks)

    def refresh(self) -> None:
        """Look what other engines stored, at most every two seconds."""
        now = self._clock()
        if self.disk is None or now - self._refreshed < _REFRESH:
            return
        self._refreshed = now
        try:
            self.disk.refresh()
        except (OSError, ConfigError) as error:
            self._failed("cannot be listed", error)

    def forget(self, key: bytes, group: int) -> None:
        """Find a block no more."""
        self._memory.forget(key, group)
        if self.disk is not None:
            self.disk.forget(key, group)

    def count_dropped(self, count: int = 1) -> None:
        self._count("dropped", count)

    def count_tokens(self, count: int) -> None:
        self._count("tokens", count)

    def stats(self) -> StoreStats:
        """Return the counts, with the bytes that the tiers hold."""
        with self._lock:
            counts = dict(self._counts)
        disk_bytes = 0 if self.disk is None else self.disk.num_bytes
        return StoreStats(**counts, memory_bytes=self._memory.num_bytes, disk_bytes=disk_bytes)

    def leave_in_child(self) -> None:
        """Make a fork of this process independent of what its threads held."""
        self._lock = threading.Lock()

    def close(self) -> None:
        """Give up the files."""
        if self.disk is not None:
            self.disk.close()

    def _count(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def _failed(self, what: str, error: Exception) -> None:
        self._count("errors")
        self._say(what, "KV store: %s %s: %s; the engine goes on without", self.root, what, error)

    def _say(self, what: str, message: str, *values: object) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning(message, *values)
