"""MemoryTier: records of blocks in memory, within a limit; the one that was used longest ago goes
first. Imports no torch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict


class MemoryTier:
    """Up to `limit` bytes of records. Methods may be called from several threads."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0
        self._records: OrderedDict[tuple[int, bytes], bytes | memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._records)

    def contains(self, key: bytes, group: int) -> bool:
        return (group, key) in self._records

    def get(self, key: bytes, group: int, tokens: bytes) -> memoryview | None:
        """Return the record of a block; None if there is none with these token ids."""
        with self._lock:
            record = self._records.get((group, key))
            if record is None or record[: len(tokens)] != tokens:
                return None
            self._records.move_to_end((group, key))
        return memoryview(record)

    def put(self, key: bytes, group: int, record: bytes | memoryview) -> None:
        """Keep a record, unless it is larger than the tier."""
        if len(record) > self.limit:
            return
        with self._lock:
            old = self._records.pop((group, key), b"")
            self._records[group, key] = record
            self.num_bytes += len(record) - len(old)
            while self.num_bytes > self.limit:
                _, oldest = self._records.popitem(last=False)
                self.num_bytes -= len(oldest)

    def forget(self, key: bytes, group: int) -> None:
        """Find a block no more."""
        with self._lock:
            self.num_bytes -= len(self._records.pop((group, key), b""))

    def clear(self) -> None:
        with self._lock:
            self._records.clear()
            self.num_bytes = 0
