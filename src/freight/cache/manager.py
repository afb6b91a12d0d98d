"""CacheManager: the blocks of each sequence, in every group of the cache. The Scheduler's interface
to the cache. Imports no torch.

There is one BlockAllocator per group. A sequence has a block table per group, and tables are
absolute: entry i is block i of the sequence. Blocks that a group no longer reads
(`CacheGroup.first_block`) are released before the next chunk is computed; their entries become 0.
Full blocks are indexed as they are computed, and stay cached when they are released.

A prefix hit is the longest prefix that every group can serve. A group only needs the blocks that
the first token to compute reads: all of them for full attention, those of the last window for a
sliding one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freight.cache.blocks import BlockAllocator
from freight.cache.groups import CacheGroup


@dataclass(frozen=True, slots=True)
class Held:
    """The blocks of one sequence, by group. Replaced, never changed in place, so that a step may
    keep a reference.

    block_ids    block tables; () for a sequence that holds nothing
    given_back   by group, the number of released entries at the start of the table, which are 0
    room         tokens for which every table has blocks
    """

    block_ids: tuple[tuple[int, ...], ...] = ()
    given_back: tuple[int, ...] = ()
    room: int = 0


NOTHING = Held()


@dataclass(frozen=True)
class Shortfall:
    """A group with `num_blocks` blocks, of which one sequence would hold `needed` at once."""

    group: CacheGroup
    needed: int
    num_blocks: int

    def describe(self, limit: int) -> str:
        """Return the tokens that fit, and for a group that needs less than all `limit` tokens at
        once, those needed.
        """
        size = self.group.tokens_per_block
        has, needed = self.num_blocks * size, self.needed * size
        return (
            f"{has}"
            if needed >= limit
            else f"{has} of the {needed} that it needs at once in {self.group.describe()}"
        )


class CacheManager:
    """The block allocators of all groups, with `num_blocks` blocks in each. Prefix keys are made
    for every `block_size` tokens.

    A step computes at most `step_tokens` tokens of a sequence. `capacity_tokens` are the tokens of
    complete sequences that fit: into the groups that release nothing before the end, or into all
    groups if none does.
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
        self.allocators = tuple(
            BlockAllocator(count, group.tokens_per_block, enable_prefix_caching)
            for group, count in zip(groups, num_blocks, strict=True)
        )
        self._step_tokens = step_tokens
        self._giving_back = tuple(
            index for index, group in enumerate(groups) if not group.keeps_all
        )
        tokens = [allocator.num_blocks * allocator.block_size for allocator in self.allocators]
        self.capacity_tokens = min(
            [n for index, n in enumerate(tokens) if index not in self._giving_back] or tokens
        )

    @property
    def num_held(self) -> int:
        """Blocks that sequences hold, over all groups."""
        return sum(allocator.num_held for allocator in self.allocators)

    @property
    def used_share(self) -> float:
        """Share of held blocks, in the group in which it is largest."""
        return max(
            1.0 - allocator.num_available / allocator.num_blocks for allocator in self.allocators
        )

    def usage(self) -> tuple[int, int]:
        """Return the tokens of `capacity_tokens` in held blocks, and in cached blocks without
        references.

        Both are those of the group with the largest held share, scaled to `capacity_tokens`.
        """
        fullest = max(self.allocators, key=lambda one: one.num_held / one.num_blocks)
        capacity, num_blocks = self.capacity_tokens, fullest.num_blocks
        return (
            fullest.num_held * capacity // num_blocks,
            fullest.num_cached * capacity // num_blocks,
        )

    def reset(self) -> None:
        """Make every block free and forget what was indexed."""
        for allocator in self.allocators:
            allocator.reset()

    def shortfall(self, num_tokens: int) -> Shortfall | None:
        """Return the first group that could not hold a sequence of `num_tokens` tokens even alone;
        None if all could.
        """
        for group, allocator in zip(self.groups, self.allocators, strict=True):
            needed = group.most_blocks(num_tokens, self._step_tokens)
            if needed > allocator.num_blocks:
                return Shortfall(group, needed, allocator.num_blocks)
        return None

    def admit(
        self, keys: Sequence[bytes], num_tokens: int, reserve: int
    ) -> tuple[Held, int] | None:
        """Take the blocks of the longest cached prefix; return them and its tokens. None, and no
        change, if the request does not fit.

        `keys` are those of the full blocks that may be hits, from the first on. The request fits if
        every group has the blocks for the rest of `num_tokens` tokens, and `reserve` more.
        """
        start = self._longest_hit(keys)
        tables, given_back, fits = [], [], True
        for group, allocator in zip(self.groups, self.allocators, strict=True):
            first, end = group.first_block(start), start // group.tokens_per_block
            taken = allocator.acquire_prefix(self._keys_of(group, keys, first, end))
            assert len(taken) == end - first, f"{len(taken)} blocks of a hit of {end - first}"
            tables.append((0,) * first + tuple(taken))
            given_back.append(first)
            rest = allocator.blocks_for(num_tokens) - first
            needed = min(rest, group.most_blocks(num_tokens, self._step_tokens)) - len(taken)
            fits = fits and needed + reserve <= allocator.num_available
        held = Held(tuple(tables), tuple(given_back), start)
        if not fits:
            self.release(held)
            return None
        return held, start

    @property
    def gives_back(self) -> bool:
        """True if `trim` can have an effect in some group."""
        return bool(self._giving_back)

    def trim(self, held: Held, start: int) -> Held:
        """Release the blocks that no token from position `start` on reads."""
        block_ids = given_back = None
        for index in self._giving_back:
            first, before = self.groups[index].first_block(start), held.given_back[index]
            if first <= before:
                continue
            if block_ids is None or given_back is None:
                block_ids, given_back = list(held.block_ids), list(held.given_back)
            table = block_ids[index]
            block_ids[index], given_back[index] = (0,) * first + table[first:], first
            self.allocators[index].release(table[before:first])
        if block_ids is None or given_back is None:
            return held
        return Held(tuple(block_ids), tuple(given_back), held.room)

    def grow(self, held: Held, num_tokens: int) -> Held | None:
        """Allocate the missing blocks for `num_tokens` tokens; None, and no change, if a group has
        too few.
        """
        if num_tokens <= held.room:
            return held
        missing = [
            max(allocator.blocks_for(num_tokens) - len(table), 0)
            for table, allocator in zip(held.block_ids, self.allocators, strict=True)
        ]
        if any(
            count > one.num_available for count, one in zip(missing, self.allocators, strict=True)
        ):
            return None
        tables = []
        for table, count, allocator in zip(held.block_ids, missing, self.allocators, strict=True):
            fresh = allocator.allocate(count)
            assert fresh is not None
            tables.append(table + tuple(fresh))
        room = min(
            len(table) * group.tokens_per_block
            for table, group in zip(tables, self.groups, strict=True)
        )
        return Held(tuple(tables), held.given_back, room)

    def register(self, held: Held, keys: Sequence[bytes], before: int, after: int) -> None:
        """Index the blocks that became full when the computed tokens rose from `before` to `after`.

        `keys` are those of the sequence's full blocks, at least `after` // block_size.
        """
        for group, allocator, table in zip(
            self.groups, self.allocators, held.block_ids, strict=True
        ):
            first, end = before // group.tokens_per_block, after // group.tokens_per_block
            for block, key in zip(
                table[first:end], self._keys_of(group, keys, first, end), strict=True
            ):
                allocator.register(block, key)

    def release(self, held: Held) -> None:
        """Release all blocks. Full blocks stay cached."""
        self._release(held, forget=False)

    def forget(self, held: Held, keys: Sequence[bytes]) -> None:
        """Release all blocks, and remove from the index all that the sequence computed, released
        before or not.
        """
        if not held.block_ids:
            return
        for group, allocator, first in zip(
            self.groups, self.allocators, held.given_back, strict=True
        ):
            known = len(keys) * self.block_size // group.tokens_per_block
            allocator.forget(self._keys_of(group, keys, 0, min(first, known)))
        self._release(held, forget=True)

    def _release(self, held: Held, forget: bool) -> None:
        for allocator, table, first in zip(
            self.allocators, held.block_ids, held.given_back, strict=False
        ):
            allocator.release(table[first:], forget)

    def _longest_hit(self, keys: Sequence[bytes]) -> int:
        """Return the tokens of the longest prefix that every group can serve. The groups shorten it
        in turn until all agree.
        """
        length, agreed, index = len(keys) * self.block_size, 0, 0
        while agreed < len(self.groups):
            shorter = self._longest_hit_of(index, keys, length)
            agreed = agreed + 1 if shorter == length else 1
            length, index = shorter, (index + 1) % len(self.groups)
        return length

    def _longest_hit_of(self, index: int, keys: Sequence[bytes], length: int) -> int:
        """Return the tokens of the longest prefix, `length` at most, that one group can serve."""
        group, allocator = self.groups[index], self.allocators[index]
        size = group.tokens_per_block
        per = size // self.block_size
        end = length // size
        if group.first_block(end * size) == 0:  # every block is needed: the first gap ends the hit
            run = 0
            while run < end and allocator.is_indexed(keys[(run + 1) * per - 1]):
                run += 1
            return run * size
        block = end  # blocks from here to `end` are indexed
        while block > group.first_block(end * size):
            block -= 1
            if not allocator.is_indexed(keys[(block + 1) * per - 1]):
                end = block
        return end * size

    def _keys_of(
        self, group: CacheGroup, keys: Sequence[bytes], first: int, end: int
    ) -> Sequence[bytes]:
        """Return the keys of a group's blocks first … end - 1: each is the key of the last
        `block_size` tokens in the block.
        """
        per = group.tokens_per_block // self.block_size
        return keys[(first + 1) * per - 1 : end * per : per]
