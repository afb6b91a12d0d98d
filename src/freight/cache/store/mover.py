"""Mover: the threads that move blocks between the pool and the store. Imports no torch.

*Out.* A block is offered when a request gives it back: from then on it is in the pool until its
memory is needed, and nobody writes it. A thread of low priority copies it, looks whether it was
still the same block afterwards, and stores it. Steps wait for none of this. A block that is evicted
first is dropped, and counted.

*In.* A `Fetch` names blocks of the pool that nobody else reads or writes, and what is to be in them.
A second thread fills them, in order, within a budget (`pace.py`). While nothing is decoded, others
read and check what comes next. After `Fetch.cancel` it writes none of them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from freight.cache.store.folder import Block
from freight.cache.store.pace import Rates, ReadBudget
from freight.cache.store.tiers import StoreTiers, Tier

logger = logging.getLogger("freight")

Record = NDArray[np.uint8]

_WRITTEN = 8 << 20  # bytes that are stored, and synced, at once
_READ = 2 << 20  # bytes that are read between two looks at the budget
_READERS = 2  # threads that read: the digest of a block takes longer than the disk does
_AHEAD = 3  # pieces of _READ that are read before they are needed, while nothing is decoded
_MOST_USED = 16  # prefixes that were used and are not noted yet; older ones are not
_LOOK = 2.0  # seconds between two looks at what other engines did
_LAST = 1.0  # seconds that a thread may take to end
_NICE = 10  # of the writing thread: it works where others leave time


class BlockBytes(Protocol):
    """The blocks of one group of the cache, as bytes."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of a block in all layers of the group."""
        ...

    def read(self, block: int) -> bytes:
        """Copy a block."""
        ...

    def write(self, blocks: Sequence[int], payloads: Record) -> None:
        """Fill blocks; payloads: [len(blocks), payload_bytes]."""
        ...


class Offer(NamedTuple):
    """A full block of the pool to store. `use` tells whether it is still the same block."""

    key: bytes
    group: int
    tokens: bytes
    block: int
    use: int


class WantedBlock(NamedTuple):
    """A block of the pool, and what is to be in it."""

    key: bytes
    group: int
    tokens: bytes
    block: int


class Piece(NamedTuple):
    """Blocks of one group that were read at once.

    tiers     where each was found, up to the first that was not
    records   [blocks, bytes of a record]: token ids and payload
    seconds   that reading took
    """

    blocks: Sequence[WantedBlock]
    tiers: list[Tier]
    records: Record
    seconds: float


class Fetch:
    """Blocks on their way into the pool.

    num_loaded   how many of `wanted`, from the first on, are there
    is_done      whether no more will be
    """

    def __init__(self, wanted: Sequence[WantedBlock]) -> None:
        self.wanted = tuple(wanted)
        self.num_loaded = 0
        self.is_done = False
        self.is_cancelled = False
        self.lock = threading.Lock()

    def cancel(self) -> None:
        """Stop: when it returns, no block is written any more."""
        with self.lock:
            self.is_cancelled = True


class Mover:
    """The threads of one engine's store. `is_current` says whether an offered block is still
    the same; it may be called from any thread. At most `most_offers` blocks wait to be stored.
    """

    def __init__(
        self,
        tiers: StoreTiers,
        groups: Sequence[BlockBytes],
        is_current: Callable[[Offer], bool],
        most_offers: int,
        budget: ReadBudget | None = None,
        rates: Rates | None = None,
    ) -> None:
        self.tiers = tiers
        self.budget = budget or ReadBudget()
        self.rates = rates or Rates()
        self._groups = tuple(groups)
        self._is_current = is_current
        self._most_offers = most_offers
        self._offers: deque[Offer] = deque()
        self._queued: set[tuple[int, bytes]] = set()  # of `_offers`, and of those being stored
        self._used: deque[Sequence[tuple[bytes, int]]] = deque(maxlen=_MOST_USED)
        self._failed: deque[Sequence[tuple[bytes, int]]] = deque()  # blocks to find no more
        self._fetches: deque[Fetch] = deque()
        self._reads: SimpleQueue[tuple[Sequence[WantedBlock], Future[Piece]] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self.is_closing = False
        # a disk may hang: an executor's threads would keep the process from ending
        self._threads = [
            self._new_thread("kv-store-out", self._run_out),
            self._new_thread("kv-store-in", self._run_in),
        ]
        self._readers = []
        for _ in range(_READERS):
            self._readers.append(self._new_thread("kv-store-read", self._run_reads))
        for thread in (*self._threads, *self._readers):
            thread.start()

    def _new_thread(self, name: str, run: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=run, name=name, daemon=True)

    def offer(self, offers: Sequence[Offer], known: Sequence[tuple[bytes, int]] = ()) -> None:
        """Queue what is not queued, and note that `known` blocks (key, group), which are stored, were
        used. Waits for nothing. The caller leaves out what is stored; what is stored meanwhile is
        left out by the thread.
        """
        if known:
            self._used.append(known)
        new = [offer for offer in offers if (offer.group, offer.key) not in self._queued]
        if not new:
            return
        with self._changed:
            room = max(0, self._most_offers - len(self._offers))
            self._offers.extend(new[:room])
            for offer in new[:room]:
                self._queued.add((offer.group, offer.key))
            self._changed.notify_all()
        if len(new) > room:
            self.tiers.count_dropped(len(new) - room)

    def forget(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        """Find blocks (key, group) no more. Waits for nothing: it is done a moment later."""
        self._failed.append(blocks)
        with self._changed:
            self._changed.notify_all()

    def fetch(self, fetch: Fetch) -> None:
        """Queue a fetch."""
        with self._changed:
            self._fetches.append(fetch)
            self._changed.notify_all()

    def wait(self, fetches: Sequence[Fetch], seconds: float) -> None:
        """Wait until one of `fetches` is done, `seconds` at most."""
        with self._changed:
            if not any(fetch.is_done for fetch in fetches):
                self._changed.wait(seconds)

    def opened(self) -> None:
        """Take note that the store is open: what was offered before can be stored now."""
        with self._changed:
            self._changed.notify_all()

    def flush(self, seconds: float) -> None:
        """Wait until all that was offered is stored or dropped, `seconds` at most."""
        end = time.monotonic() + seconds
        with self._changed:
            while self._queued and self.tiers.is_open and time.monotonic() < end:
                self._changed.wait(0.05)

    def close(self, seconds: float) -> None:
        """Store what was offered, for `seconds` at most, and end the threads. A second time does
        nothing.
        """
        if self.is_closing:
            return
        end = time.monotonic() + seconds
        self.flush(seconds)
        with self._changed:
            self.is_closing = True
            left = len(self._offers)
            self._offers.clear()
            self._changed.notify_all()
        self.tiers.count_dropped(left)
        for thread in self._threads:  # a disk may hang, and hold one for ever
            thread.join(max(_LAST, end - time.monotonic()))
        for _ in self._readers:  # nobody asks them for more
            self._reads.put(None)
        for thread in self._readers:
            thread.join(max(_LAST, end - time.monotonic()))

    def leave_in_child(self) -> None:
        """Take note that this is a fork, which has no threads; what they held stays held."""
        self.is_closing = True
        self._changed = threading.Condition()
        self.tiers.leave_in_child()

    # ---------------------------------------------------------------------------------------------
    # out

    def _run_out(self) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while not self.is_closing:
            batch = self._next_offers()
            try:
                self._store(batch)
            except Exception:
                logger.exception("KV store: %d blocks are not stored", len(batch))
                self.tiers.count_dropped(len(batch))
            with self._changed:
                for offer in batch:
                    self._queued.discard((offer.group, offer.key))
                self._changed.notify_all()
            while self._failed:
                for key, group in self._failed.popleft():
                    self.tiers.forget(key, group)
            while self._used:
                self.tiers.touch(self._used.popleft())
            self.tiers.refresh()
        self.tiers.close()

    def _next_offers(self) -> list[Offer]:
        """Wait a short time for offers, and return them; there may be none."""
        with self._changed:
            if not self.is_closing and not (self._offers and self.tiers.is_open):
                self._changed.wait(_LOOK)
            if not self.tiers.is_open:
                return []
            batch = []
            size = 0
            while self._offers and size < _WRITTEN and not self.is_closing:
                batch.append(self._offers.popleft())
                size += self._groups[batch[-1].group].payload_bytes
            return batch

    def _store(self, batch: Sequence[Offer]) -> None:
        blocks: list[Block] = []
        num_dropped = 0
        for offer in batch:
            if self.tiers.is_stored(offer.key, offer.group):
                continue
            payload = b""
            if self._is_current(offer):
                payload = self._groups[offer.group].read(offer.block)
            if payload and self._is_current(offer):  # after it was copied
                blocks.append((offer.key, offer.group, offer.tokens, payload))
            else:
                num_dropped += 1
        self.tiers.count_dropped(num_dropped)
        if blocks:
            self.tiers.write(blocks)

    # ---------------------------------------------------------------------------------------------
    # in

    def _run_in(self) -> None:
        while (fetch := self._next_fetch()) is not None:
            try:
                self._load(fetch)
            except Exception:  # the rest of the prefix is computed
                logger.exception("KV store: %d blocks are not read", len(fetch.wanted))
            with self._changed:
                fetch.is_done = True
                self._changed.notify_all()

    def _next_fetch(self) -> Fetch | None:
        with self._changed:
            while not self._fetches and not self.is_closing:
                self._changed.wait()
            if self.is_closing:
                return None
            return self._fetches.popleft()

    def _load(self, fetch: Fetch) -> None:
        pieces = iter(self._pieces(fetch))
        in_flight: deque[Future[Piece]] = deque()
        while True:
            self.budget.wait(lambda: not (fetch.is_cancelled or self.is_closing))
            if fetch.is_cancelled or self.is_closing:
                return
            began = time.monotonic()
            most = _AHEAD
            if self.budget.is_limited:
                most = 1
            for blocks in islice(pieces, max(0, most - len(in_flight))):
                in_flight.append(Future())
                self._reads.put((blocks, in_flight[-1]))
            if not in_flight:
                break
            piece = in_flight.popleft().result()
            seconds = piece.seconds + self._write(fetch, piece)
            self.budget.spend(time.monotonic() - began)
            if len(piece.tiers) < len(piece.blocks):
                return
            if len(set(piece.tiers)) == 1:
                self.rates.note_read(piece.tiers[0], piece.records.size, seconds)
        self.tiers.touch([(block.key, block.group) for block in fetch.wanted])

    def _run_reads(self) -> None:
        while (job := self._reads.get()) is not None:
            blocks, read = job
            try:
                read.set_result(self._read(blocks))
            except Exception as error:  # raised where the piece is waited for
                read.set_exception(error)

    def _pieces(self, fetch: Fetch) -> Iterator[Sequence[WantedBlock]]:
        """Yield blocks that are read at once, of one group each."""
        begin = 0
        while begin < len(fetch.wanted):
            group = fetch.wanted[begin].group
            most = begin + max(1, _READ // self._groups[group].payload_bytes)
            end = begin
            while end < min(most, len(fetch.wanted)) and fetch.wanted[end].group == group:
                end += 1
            yield fetch.wanted[begin:end]
            begin = end

    def _read(self, blocks: Sequence[WantedBlock]) -> Piece:
        began = time.monotonic()
        skipped = len(blocks[0].tokens)
        size = skipped + self._groups[blocks[0].group].payload_bytes
        records = np.empty((len(blocks), size), np.uint8)
        tiers: list[Tier] = []
        for row, block in enumerate(blocks):
            tier = self.tiers.read_into(
                block.key, block.group, block.tokens, memoryview(records[row])
            )
            if tier is None:
                break
            tiers.append(tier)
        return Piece(blocks, tiers, records, time.monotonic() - began)

    def _write(self, fetch: Fetch, piece: Piece) -> float:
        """Fill blocks of the pool; return the seconds that it took."""
        began = time.monotonic()
        read_blocks = piece.blocks[: len(piece.tiers)]
        with fetch.lock:
            if read_blocks and not fetch.is_cancelled:
                payloads = piece.records[: len(read_blocks), len(read_blocks[0].tokens) :]
                self._groups[read_blocks[0].group].write(
                    [block.block for block in read_blocks], payloads
                )
                fetch.num_loaded += len(read_blocks)
        return time.monotonic() - began
