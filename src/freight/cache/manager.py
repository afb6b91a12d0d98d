"""CacheManager: the blocks of each sequence, in every group of the cache. The Scheduler's interface
to the cache. Imports no torch.

There is one BlockAllocator per group. A sequence has a block table per group, and tables are
absolute: entry i is block i of the sequence. Blocks that a group no longer reads
(`CacheGroup.first_block`) are released before the next chunk is computed; their entries become 0.
Full blocks are indexed as they are computed, and stay cached when they are released.

A prefix hit is the longest cached prefix from which every group can continue. For that a group
needs only the blocks that the next token reads: all of them for full attention, those of the last
window for a sliding one, the last one for a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from freight.cache.blocks import BlockAllocator
from freight.cache.events import CacheEvents, SequenceContent
from freight.cache.groups import CacheGroup, capacity_tokens


@dataclass(frozen=True, slots=True)
class SequenceBlocks:
    """The blocks of one sequence, by group. Immutable, so that a step may keep a reference.

    block_ids    block tables; () for a sequence that holds nothing
    given_back   number of entries at the start of each table that are 0: their blocks were
                 released, or never needed
    room         tokens for which every table has blocks
    """

    block_ids: tuple[tuple[int, ...], ...] = ()
    given_back: tuple[int, ...] = ()
    room: int = 0


NOTHING = SequenceBlocks()


class NewBlock(NamedTuple):
    """A block that was allocated for a key that is not indexed: entry `position` of a sequence's
    table in `group`.
    """

    group: int
    key: bytes
    block: int
    position: int


@dataclass(frozen=True)
class Reservation:
    """Blocks of a prefix: by group in the order of the sequence, those that were indexed and
    `fresh` ones.
    """

    tables: tuple[tuple[int, ...], ...]
    fresh: tuple[NewBlock, ...]


@dataclass(frozen=True)
class Shortfall:
    """A group that is too small for a sequence: it has `num_blocks` blocks, and the sequence would
    hold `needed` at once.
    """

    group: CacheGroup
    needed: int
    num_blocks: int

    def describe(self, limit: int) -> str:
        """Return the number of tokens that fit, for a message about a sequence of `limit` tokens.
        If the group need not hold all of them at once, the text also has the number that it must.
        """
        size = self.group.tokens_per_block
        has = self.num_blocks * size
        needed = self.needed * size
        if needed >= limit:
            return str(has)
        return f"{has} of the {needed} that it needs at once in {self.group.describe()}"


class CacheManager:
    """The block allocators of all groups; `num_blocks` is by group. There is a prefix key for every
    `block_size` tokens.

    A step computes at most `step_tokens` tokens of a sequence. `capacity_tokens` is the number of
    tokens that fit into every group that keeps the blocks of a sequence to its end; if there is no
    such group, into every group.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: Sequence[int],
        block_size: int,
        step_tokens: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._step_tokens = step_tokens
        self.capacity_tokens = capacity_tokens(groups, num_blocks)
        allocators = []
        giving_back = []
        for index, group in enumerate(groups):
            size = group.tokens_per_block
            allocators.append(BlockAllocator(num_blocks[index], size, enable_prefix_caching))
            if not group.keeps_all:
                giving_back.append(index)
        self.allocators = tuple(allocators)
        self.events: CacheEvents | None = None
        # indices of the groups that release blocks before a sequence ends
        self._giving_back = tuple(giving_back)

    def collect_events(self, events: CacheEvents) -> None:
        """Collect what is indexed from now on, in the first group that keeps all blocks. There has to be
        such a group.
        """
        index = next(index for index, group in enumerate(self.groups) if group.keeps_all)
        self.events = events
        self.allocators[index].events = events

    @property
    def num_held(self) -> int:
        """Blocks that sequences hold, over all groups."""
        return sum(allocator.num_held for allocator in self.allocators)

    @property
    def used_share(self) -> float:
        """Share of the blocks that are held, in the group where it is largest."""
        return max(
            1.0 - allocator.num_available / allocator.num_blocks for allocator in self.allocators
        )

    def usage(self) -> tuple[int, int]:
        """Return how many of `capacity_tokens` are held, and how many are cached and not held.

        Both are shares of the blocks of one group, the one with the largest held share.
        """
        fullest = max(
            self.allocators, key=lambda allocator: allocator.num_held / allocator.num_blocks
        )
        capacity = self.capacity_tokens
        num_blocks = fullest.num_blocks
        return (
            fullest.num_held * capacity // num_blocks,
            fullest.num_cached * capacity // num_blocks,
        )

    def reset(self) -> None:
        """Make every block free and forget what was indexed."""
        for allocator in self.allocators:
            allocator.reset()

    def forget_all(self) -> None:
        """Index nothing any longer; sequences keep the blocks that they hold."""
        for allocator in self.allocators:
            allocator.forget_all()

    def shortfall(self, num_tokens: int) -> Shortfall | None:
        """Return the first group that is too small for a sequence of `num_tokens` tokens, even with
        no other sequence in the cache; None if there is none.
        """
        for group, allocator in zip(self.groups, self.allocators, strict=True):
            needed = group.most_blocks(num_tokens, self._step_tokens)
            if needed > allocator.num_blocks:
                return Shortfall(group, needed, allocator.num_blocks)
        return None

    def admit(
        self, keys: Sequence[bytes], num_tokens: int, reserve: int
    ) -> tuple[SequenceBlocks, int] | None:
        """Take references on the blocks of the longest cached prefix; return them, and the number
        of its tokens. None, and no change, if the request does not fit.

        `keys`: prefix keys of the sequence's full blocks, from the first to the last that may be a
        hit. The request fits if every group has the blocks for the rest of its `num_tokens` tokens
        available, and `reserve` more.
        """
        start = self.longest_hit(keys, self.is_indexed)
        tables = []
        given_back = []
        fits = True
        for group, allocator in zip(self.groups, self.allocators, strict=True):
            first = group.first_block(start)
            end = start // group.tokens_per_block
            shared = allocator.acquire_prefix(self.keys_of(group, keys, first, end))
            assert len(shared) == end - first, f"{len(shared)} blocks of a hit of {end - first}"
            tables.append((0,) * first + tuple(shared))
            given_back.append(first)
            needed = self._most_blocks(group, first, num_tokens) - len(shared)
            fits = fits and needed + reserve <= allocator.num_available
        block_tables = SequenceBlocks(tuple(tables), tuple(given_back), start)
        if not fits:
            self.release(block_tables)
            return None
        return block_tables, start

    def _most_blocks(self, group: CacheGroup, first: int, num_tokens: int) -> int:
        """Return the most blocks that a sequence of `num_tokens` tokens, which needs those from
        entry `first` on, will hold at once.
        """
        length = -(-num_tokens // group.tokens_per_block) - first
        return min(length, group.most_blocks(num_tokens, self._step_tokens))

    @property
    def gives_back(self) -> bool:
        """True if `trim` can have an effect in some group."""
        return bool(self._giving_back)

    def trim(self, block_tables: SequenceBlocks, start: int) -> SequenceBlocks:
        """Release the blocks that no token at position `start` or later reads."""
        block_ids = list(block_tables.block_ids)
        given_back = list(block_tables.given_back)
        released = False
        for index in self._giving_back:
            first = self.groups[index].first_block(start)
            before = block_tables.given_back[index]
            if first <= before:
                continue
            table = block_tables.block_ids[index]
            self.allocators[index].release(table[before:first])
            block_ids[index] = (0,) * first + table[first:]
            given_back[index] = first
            released = True
        if released:
            return SequenceBlocks(tuple(block_ids), tuple(given_back), block_tables.room)
        return block_tables

    def grow(self, block_tables: SequenceBlocks, num_tokens: int) -> SequenceBlocks | None:
        """Allocate the blocks that are missing for `num_tokens` tokens; None, and no change, if a
        group has too few available.
        """
        if num_tokens <= block_tables.room:
            return block_tables
        missing = []
        for table, allocator in zip(block_tables.block_ids, self.allocators, strict=True):
            count = max(allocator.blocks_for(num_tokens) - len(table), 0)
            if count > allocator.num_available:
                return None
            missing.append(count)
        tables = []
        for table, count, allocator in zip(
            block_tables.block_ids, missing, self.allocators, strict=True
        ):
            fresh = allocator.allocate(count)
            assert fresh is not None
            tables.append(table + tuple(fresh))
        return SequenceBlocks(tuple(tables), block_tables.given_back, self._room(tables))

    def shrink(self, block_tables: SequenceBlocks, num_tokens: int) -> SequenceBlocks:
        """Release the blocks behind those of the first `num_tokens` tokens. They are not indexed."""
        tables = []
        released = False
        for table, allocator in zip(block_tables.block_ids, self.allocators, strict=True):
            count = allocator.blocks_for(num_tokens)
            allocator.release(table[count:])
            released = released or len(table) > count
            tables.append(table[:count])
        if not released:
            return block_tables
        return SequenceBlocks(tuple(tables), block_tables.given_back, self._room(tables))

    def register(
        self,
        block_tables: SequenceBlocks,
        keys: Sequence[bytes],
        before: int,
        after: int,
        content: SequenceContent | None = None,
    ) -> None:
        """Index the blocks that became full when the computed tokens rose from `before` to `after`.

        `keys`: prefix keys of the sequence's full blocks, at least `after` // block_size of them.
        `content`: needed where events are collected.
        """
        for index, (group, allocator, table) in enumerate(
            zip(self.groups, self.allocators, block_tables.block_ids, strict=True)
        ):
            first = before // group.tokens_per_block
            end = after // group.tokens_per_block
            for position, (block, key) in enumerate(
                zip(table[first:end], self.keys_of(group, keys, first, end), strict=True), first
            ):
                is_new = allocator.register(block, key)
                if is_new and allocator.events is not None:
                    self._note_stored(NewBlock(index, key, block, position), keys, content)

    def register_one(
        self, block: NewBlock, keys: Sequence[bytes], content: SequenceContent
    ) -> None:
        """Index one block of a sequence, which is full; `keys` as `register` has them."""
        allocator = self.allocators[block.group]
        if allocator.register(block.block, block.key) and allocator.events is not None:
            self._note_stored(block, keys, content)

    def _note_stored(
        self, block: NewBlock, keys: Sequence[bytes], content: SequenceContent | None
    ) -> None:
        assert self.events is not None
        assert content is not None, "events need the tokens of a sequence"
        group = self.groups[block.group]
        size = group.tokens_per_block
        parent = None
        if block.position > 0:
            (parent,) = self.keys_of(group, keys, block.position - 1, block.position)
        tokens = content.tokens(block.position * size, (block.position + 1) * size)
        self.events.stored(block.key, parent, tokens, content)

    def release(self, block_tables: SequenceBlocks) -> None:
        """Release all blocks. Full blocks stay cached."""
        self._release(block_tables, forget=False)

    def forget(self, block_tables: SequenceBlocks, keys: Sequence[bytes]) -> None:
        """Release all blocks. Remove the sequence's content from the index, also that of blocks
        that it no longer holds (`SequenceBlocks.given_back`).

        `keys`: prefix keys of the sequence's full blocks.
        """
        if not block_tables.block_ids:
            return
        for group, allocator, given_back in zip(
            self.groups, self.allocators, block_tables.given_back, strict=True
        ):
            with_key = len(keys) * self.block_size // group.tokens_per_block
            allocator.forget(self.keys_of(group, keys, 0, min(given_back, with_key)))
        self._release(block_tables, forget=True)

    def _release(self, block_tables: SequenceBlocks, forget: bool) -> None:
        # not strict, because NOTHING has no tables
        for allocator, table, first in zip(
            self.allocators, block_tables.block_ids, block_tables.given_back, strict=False
        ):
            allocator.release(table[first:], forget)

    def is_indexed(self, group: int, key: bytes) -> bool:
        """Return whether the pool has a block."""
        return self.allocators[group].is_indexed(key)

    def longest_hit(self, keys: Sequence[bytes], has: Callable[[int, bytes], bool]) -> int:
        """Return the number of tokens of the longest prefix that every group can continue from with
        the blocks of which `has`(group, key) is true. The groups shorten it in turn until all
        agree.
        """
        length = len(keys) * self.block_size
        num_agreed = 0  # how many groups, the last ones asked, can continue from `length`
        index = 0
        while num_agreed < len(self.groups):
            possible = self._longest_hit_of(index, keys, length, has)
            if possible != length:
                num_agreed = 0
            num_agreed += 1
            length = possible
            index = (index + 1) % len(self.groups)
        return length

    def take(
        self, keys: Sequence[bytes], length: int, num_tokens: int, reserve: int
    ) -> Reservation | None:
        """Take references on the blocks that a sequence needs to continue at `length`, and allocate
        those that are not indexed. None, and no change, if a request of `num_tokens` tokens would
        not fit, as `admit` says.
        """
        tables: list[list[int]] = []
        fits = True
        for group, allocator in zip(self.groups, self.allocators, strict=True):
            first = group.first_block(length)
            end = length // group.tokens_per_block
            table = []
            num_missing = 0
            for key in self.keys_of(group, keys, first, end):
                blocks = allocator.acquire_prefix((key,))
                if not blocks:
                    blocks = [-1]  # a block that is not indexed
                    num_missing += 1
                table += blocks
            tables.append(table)
            needed = self._most_blocks(group, first, num_tokens) - len(table)
            needed = max(needed, 0) + num_missing
            fits = fits and needed + reserve <= allocator.num_available
        if not fits:
            for allocator, table in zip(self.allocators, tables, strict=True):
                allocator.release([block for block in table if block >= 0])
            return None
        fresh: list[NewBlock] = []
        for index, table in enumerate(tables):
            fresh += self._allocate_missing(index, keys, length, table)
        return Reservation(tuple(map(tuple, tables)), tuple(fresh))

    def _allocate_missing(
        self, index: int, keys: Sequence[bytes], length: int, table: list[int]
    ) -> Iterator[NewBlock]:
        """Put allocated blocks in place of -1, and yield them."""
        group = self.groups[index]
        first = group.first_block(length)
        end = length // group.tokens_per_block
        blocks = self.allocators[index].allocate(table.count(-1))
        assert blocks is not None
        fresh = iter(blocks)
        for place, key in enumerate(self.keys_of(group, keys, first, end)):
            if table[place] < 0:
                table[place] = next(fresh)
                yield NewBlock(index, key, table[place], first + place)

    def _longest_hit_of(
        self, index: int, keys: Sequence[bytes], length: int, has: Callable[[int, bytes], bool]
    ) -> int:
        """Return the number of tokens of the longest prefix, `length` at most, that group `index`
        can continue from.
        """
        group = self.groups[index]
        size = group.tokens_per_block
        end = length // size
        block_keys = self.keys_of(group, keys, 0, end)
        if group.first_block(end * size) == 0:
            # Every block is needed: the prefix ends at the first that is not there.
            num_there = 0
            while num_there < end and has(index, block_keys[num_there]):
                num_there += 1
            return num_there * size
        # Only blocks from `first_block` on are needed: walk back from the end, and move the end to
        # each block that is not there.
        block = end  # all blocks from here to `end` are there
        while block > group.first_block(end * size):
            block -= 1
            if not has(index, block_keys[block]):
                end = block
        return end * size

    def _room(self, tables: Sequence[Sequence[int]]) -> int:
        """Return the number of tokens for which every table has blocks."""
        rooms = []
        for table, group in zip(tables, self.groups, strict=True):
            rooms.append(len(table) * group.tokens_per_block)
        return min(rooms)

    def keys_of(
        self, group: CacheGroup, keys: Sequence[bytes], first: int, end: int
    ) -> Sequence[bytes]:
        """Return the keys of the sequence's blocks first … end - 1 in `group`: each is the prefix
        key of the last `block_size` tokens in the block.
        """
        keys_per_block = group.tokens_per_block // self.block_size
        return keys[(first + 1) * keys_per_block - 1 : end * keys_per_block : keys_per_block]
