"""StoredPrefixes: the store below the pool, as the scheduler sees it. Imports no torch.

A hit of the store becomes a hit of the pool. Blocks are allocated for what the pool lacks, filled by
another thread (`store/mover.py`), indexed under their keys and released; then the request is
admitted as if they had been there. So nothing that computes knows of the store.

While its blocks come a request waits, and holds nothing: the blocks are held by its fetch, which can
be given up at any time.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from freight.cache.events import SequenceContent
from freight.cache.manager import CacheManager, NewBlock, SequenceBlocks
from freight.cache.store.entries import encode_tokens
from freight.cache.store.mover import BlockBytes, Fetch, Mover, Offer, WantedBlock
from freight.cache.store.tiers import StoreTiers, Tier
from freight.outputs import StoreStats

Tokens = Callable[[int, int], Sequence[int]]  # those at positions start … stop - 1 of a sequence

LEAST_TOKENS = 256  # a shorter prefix is stored once it was found again
_LEAST_MEASURED = 64  # tokens of prompts from which on a step says how fast they are computed
_MOST_FETCHES = 2  # requests whose blocks come at once; others wait for their turn
# A fetch is given up once it took so many times what computing takes, and so many seconds: the disk
# hangs, or others decode ever since.
_PATIENCE = 2.0
_LEAST_PATIENCE = 5.0
_WAIT = 0.02  # seconds until commands are looked at again, where nothing can be computed


@dataclass(frozen=True)
class PrefixQuery:
    """A sequence that may be found in the store.

    keys         prefix keys of its full blocks that may be a hit
    tokens       its token ids
    num_tokens   its known tokens
    salt, adapter  its cache salt, and the name of its adapter
    """

    keys: Sequence[bytes]
    tokens: Tokens
    num_tokens: int
    salt: str | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class _Fetching:
    """The blocks of a fetch for `query`, by group in the order of the sequence: those that the pool
    had, and the `fresh` ones that come. The prefix becomes `num_tokens` tokens longer by them. After `until`, a time of
    the clock, no more is waited for.
    """

    fetch: Fetch
    query: PrefixQuery
    fresh: tuple[NewBlock, ...]
    tables: tuple[tuple[int, ...], ...]
    num_tokens: int
    until: float


@dataclass(frozen=True)
class _FetchPlan:
    """What the pool lacks, (group, key), to have a prefix of `end` tokens in place of `begin`."""

    missing: tuple[tuple[int, bytes], ...]
    begin: int
    end: int


@dataclass(frozen=True)
class _RefusedFetch:
    """A request, by name and number of tokens, for which nothing could be brought in, and the blocks
    that each group had for it then.
    """

    name: str
    num_tokens: int
    room: tuple[int, ...]


class StoredPrefixes:
    """The store of the pool that `manager` has. All methods are for the thread that schedules, and
    none but `wait` and `close` waits.

    stores_salted   whether prefixes of requests with a salt are stored as well
    """

    def __init__(
        self,
        tiers: StoreTiers,
        manager: CacheManager,
        block_bytes: Sequence[BlockBytes],
        stores_salted: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._clock = clock
        self._late: Fetch | None = None  # the last that was given up because it took too long
        self._stores_salted = stores_salted
        self._tiers = tiers
        self._coming: dict[str, _Fetching] = {}  # by request, in the order of their beginning
        self._on_the_way: set[tuple[int, bytes]] = set()  # the blocks of all fetches
        self._in_turn: set[str] = set()  # requests that wait until a fetch ends
        self._refused: _RefusedFetch | None = (
            None  # the last one: requests behind it are not asked for
        )
        self._is_closed = False
        self._payload_bytes = [entry.payload_bytes for entry in block_bytes]
        num_blocks = sum(entry.num_blocks for entry in manager.allocators)
        self.mover = Mover(tiers, block_bytes, self._is_current, num_blocks)
        _living.add(self)

    # ---------------------------------------------------------------------------------------------
    # in

    def is_coming(self, name: str) -> bool:
        """Return whether request `name` has a fetch that is not done. One that takes too long is
        given up; what came until then is kept.
        """
        fetching = self._coming.get(name)
        if fetching is None or fetching.fetch.is_done:
            return False
        if self._clock() < fetching.until:
            return True
        fetching.fetch.cancel()
        self._late = fetching.fetch
        return False

    def has_fetch(self, name: str) -> bool:
        return name in self._coming

    def begin(self, name: str, query: PrefixQuery, salted: bool, reserve: int) -> bool:
        """Begin to bring in what the store has of a sequence beyond the pool. True: it comes, or
        will as soon as other blocks are there; ask again. False: it is not there, not worth the
        time, or there is no room for it now. That is looked at again once a group has more blocks.

        The blocks fit if every group has those for the rest of the sequence available, and
        `reserve` more.
        """
        if self._is_closed or not self._tiers.is_open or (salted and not self._stores_salted):
            return False
        if name in self._in_turn:
            return True
        if self._late is not None and not self._late.is_done:  # the thread hangs
            return False
        # A request that was refused, and did not fit into the pool either, asks at every step.
        room = tuple(allocator.num_available - reserve for allocator in self._manager.allocators)
        if self._is_refused(name, query, room):
            return False
        plan = self._plan(query)
        if plan is not None:
            if len(self._coming) >= _MOST_FETCHES or not self._on_the_way.isdisjoint(plan.missing):
                self._in_turn.add(name)
                return True
            if self._start(name, query, plan, reserve):
                return True
        self._refused = _RefusedFetch(name, query.num_tokens, room)
        return False

    def finish(self, name: str) -> None:
        """Index the blocks that came for a request, and release all of its fetch."""
        fetching = self._take(name)
        query = fetching.query
        content = SequenceContent(query.tokens, query.salt, query.adapter)
        for block in fetching.fresh[: fetching.fetch.num_loaded]:
            self._manager.register_one(block, query.keys, content)
        self._release(fetching)
        if fetching.fetch.num_loaded == len(fetching.fetch.wanted):
            self._tiers.count_tokens(fetching.num_tokens)

    def drop(self, name: str) -> None:
        """Give up the fetch of a request, if it has one. It may be another's name from now on."""
        if self._refused is not None and self._refused.name == name:
            self._refused = None
        if name in self._coming:
            # first: an interrupt must not leave a thread that writes what `reset` makes free
            self._coming[name].fetch.cancel()
            self._release(self._take(name))

    def drop_latest(self) -> bool:
        """Give up the fetch that began last; False if there is none."""
        if not self._coming:
            return False
        self.drop(next(reversed(self._coming)))
        return True

    def reset(self) -> None:
        """Give up all fetches, before all blocks become free."""
        for fetching in list(self._coming.values()):
            fetching.fetch.cancel()
        self._coming = {}
        self._on_the_way = set()
        self._in_turn = set()
        self._refused = None

    def step(self, decodes: bool, idle: bool) -> None:
        """Note that a step begins; `decodes`: some request decodes in it. If it is `idle`, wait a
        moment for a fetch.
        """
        if self._is_closed:
            return
        self.mover.budget.step(decodes)
        if idle and self._coming:
            self.mover.wait([loading.fetch for loading in self._coming.values()], _WAIT)

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """Note how long a step with `num_tokens` tokens of prompts took."""
        if num_tokens >= _LEAST_MEASURED:
            self.mover.rates.note_computed(num_tokens, seconds)

    def _is_refused(self, name: str, query: PrefixQuery, room: Sequence[int]) -> bool:
        """Return whether a request was refused, and no group has more blocks for it than it had
        then.
        """
        last = self._refused
        if last is None or last.name != name or last.num_tokens != query.num_tokens:
            return False
        return all(now <= then for now, then in zip(room, last.room, strict=True))

    def _plan(self, query: PrefixQuery) -> _FetchPlan | None:
        """Return how pool and store together have a longer prefix than the pool; None if they do
        not, or it is not worth it.
        """
        manager = self._manager
        keys = query.keys
        end = manager.longest_hit(keys, self._is_known)
        begin = manager.longest_hit(keys, manager.is_indexed)
        if end <= begin:
            return None
        missing: list[tuple[int, bytes]] = []
        sizes: dict[Tier, int] = {}
        for index, group in enumerate(manager.groups):
            first = group.first_block(end)
            last = end // group.tokens_per_block
            for key in manager.keys_of(group, keys, first, last):
                if manager.is_indexed(index, key):
                    continue
                tier = self._tiers.tier_of(key, index)
                if tier is None:  # it went meanwhile
                    return None
                missing.append((index, key))
                sizes[tier] = sizes.get(tier, 0) + self._payload_bytes[index]
        limited = self.mover.budget.is_limited
        if not self.mover.rates.is_worth(sizes, end - begin, limited):
            return None
        return _FetchPlan(tuple(missing), begin, end)

    def _start(self, name: str, query: PrefixQuery, plan: _FetchPlan, reserve: int) -> bool:
        reservation = self._manager.take(query.keys, plan.end, query.num_tokens, reserve)
        if reservation is None:
            return False
        blocks = []
        for block in reservation.fresh:
            tokens = self._tokens(query, block.group, block.position)
            blocks.append(WantedBlock(block.key, block.group, tokens, block.block))
        num_tokens = plan.end - plan.begin
        patience = max(_PATIENCE * self.mover.rates.to_compute(num_tokens), _LEAST_PATIENCE)
        until = self._clock() + patience
        fetching = _Fetching(
            Fetch(blocks), query, reservation.fresh, reservation.tables, num_tokens, until
        )
        # first: `reset` has to find what the thread may write
        self._coming[name] = fetching
        self._on_the_way.update(plan.missing)
        self.mover.fetch(fetching.fetch)
        return True

    def _tokens(self, query: PrefixQuery, group: int, position: int) -> bytes:
        size = self._manager.groups[group].tokens_per_block
        return encode_tokens(query.tokens(position * size, (position + 1) * size))

    def _is_known(self, group: int, key: bytes) -> bool:
        return self._manager.is_indexed(group, key) or self._tiers.contains(key, group)

    def _take(self, name: str) -> _Fetching:
        fetching = self._coming.pop(name)
        self._in_turn = set()
        for block in fetching.fetch.wanted:
            self._on_the_way.discard((block.group, block.key))
        return fetching

    def _release(self, fetching: _Fetching) -> None:
        for allocator, table in zip(self._manager.allocators, fetching.tables, strict=True):
            allocator.release(table)

    # ---------------------------------------------------------------------------------------------
    # out

    def offer(
        self,
        block_tables: SequenceBlocks,
        ends: Sequence[int],
        query: PrefixQuery,
        num_found: int,
        salted: bool,
    ) -> None:
        """Store the full blocks of a sequence that it gave back: entries up to `ends`, by group, of
        the tables that it held.

        `query.num_tokens` of its tokens are computed. Of a short one only the `num_found` tokens are
        stored that were a hit. To be called before blocks are allocated again.
        """
        if self._is_closed or not block_tables.block_ids or (salted and not self._stores_salted):
            return
        upto = query.num_tokens
        if upto < LEAST_TOKENS:
            upto = min(upto, num_found)
        manager = self._manager
        offers = []
        known = []
        for index, (group, allocator, table, first, end) in enumerate(
            zip(
                manager.groups,
                manager.allocators,
                block_tables.block_ids,
                block_tables.given_back,
                ends,
                strict=True,
            )
        ):
            size = group.tokens_per_block
            last = min(end, upto // size)
            keys = manager.keys_of(group, query.keys, first, last)
            for position, key in zip(range(first, last), keys, strict=True):
                if self._tiers.is_stored(key, index):
                    known.append((key, index))
                    continue
                block = table[position]
                use = allocator.use_of(table[position])
                if allocator.is_same(block, key, use):  # and not a second block with this content
                    tokens = self._tokens(query, index, position)
                    offers.append(Offer(key, index, tokens, block, use))
        self.mover.offer(offers, known)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Find the content of a sequence that failed no more; `keys`: of its full blocks."""
        size = self._manager.block_size
        for index, group in enumerate(self._manager.groups):
            end = len(keys) * size // group.tokens_per_block
            self.mover.forget([(key, index) for key in self._manager.keys_of(group, keys, 0, end)])

    def _is_current(self, offer: Offer) -> bool:
        """Return whether a block has had the same content since it was offered. For any thread."""
        return self._manager.allocators[offer.group].is_same(offer.block, offer.key, offer.use)

    # ---------------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        return self._tiers.stats()

    def leave_in_child(self) -> None:
        """Go on without a store: this is a fork, which has no threads that move blocks. What came
        until now is kept.
        """
        self._is_closed = True
        for fetching in self._coming.values():
            fetching.fetch.lock = threading.Lock()  # a thread may have held it
            fetching.fetch.is_cancelled = fetching.fetch.is_done = True
        self.mover.leave_in_child()

    def close(self, seconds: float) -> None:
        """Store what was offered, for `seconds` at most, and end the threads."""
        self._is_closed = True
        while self.drop_latest():
            pass
        self.mover.close(seconds)


_living: weakref.WeakSet[StoredPrefixes] = weakref.WeakSet()  # of this process


def _leave_in_child() -> None:
    for stored in _living:
        stored.leave_in_child()


os.register_at_fork(after_in_child=_leave_in_child)
