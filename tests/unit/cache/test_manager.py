"""CacheManager: examples of what windows and states give back and of hits, and a state machine over
all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from tests.shares import examples

from freight.cache.groups import Pages, StateBlocks
from freight.cache.manager import CacheManager, SequenceBlocks
from freight.cache.prefix import extend_keys

BLOCK = 32
STEP = 100


def states(tokens_per_block: int = 2 * BLOCK) -> StateBlocks:
    return StateBlocks((9,), 1, tokens_per_block)


def keys_of(text: str, salt: str | None = None) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(
        keys,
        len(text) // BLOCK,
        BLOCK,
        salt,
        lambda start, stop: [ord(letter) for letter in text[start:stop]],
    )
    return keys


def manager(
    *groups: Pages | StateBlocks, num_blocks: int = 20, caching: bool = True
) -> CacheManager:
    return CacheManager(groups, [num_blocks] * len(groups), BLOCK, STEP, caching)


def compute(
    cache: CacheManager, held: SequenceBlocks, text: str, start: int, end: int
) -> SequenceBlocks:
    grown = cache.grow(cache.trim(held, start), end)
    assert grown is not None
    cache.register(grown, keys_of(text), start, end)
    return grown


def run_through(cache: CacheManager, text: str) -> SequenceBlocks:
    admitted = cache.admit(keys_of(text)[: (len(text) - 1) // BLOCK], len(text), 0)
    assert admitted is not None
    held, start = admitted
    for begin in range(start, len(text), STEP):
        held = compute(cache, held, text, begin, min(begin + STEP, len(text)))
    return held


# -------------------------------------------------------------------------------------------------------------
# windows


@settings(max_examples=examples(300))
@given(
    window=st.integers(1, 300),
    size=st.sampled_from([8, 16, 32, 64, 128, 256]),
    start=st.integers(0, 1000),
    step=st.integers(1, 200),
)
def test_a_window_keeps_its_tiles_and_no_more(
    window: int, size: int, start: int, step: int
) -> None:
    group = Pages((0,), 1, window, size)
    first = group.first_block(start)
    tile = max(0, start - window + 1) // 64 * 64  # of the first position > start - window
    assert first * size <= tile < (first + 1) * size
    held = -(-(start + step) // size) - first
    assert held <= group.most_blocks(start + step, step) <= group.most_blocks(10**6, step)
    most = group.most_blocks(10**6, step) * size
    assert (
        most <= -(-(window + step) // 64) * 64 + max(64, size) + size
    )  # window and step, rounded up to tiles, a block


@pytest.mark.parametrize("size", [8, 64, 128])
def test_the_most_is_reached(size: int) -> None:
    group = Pages((0,), 1, 100, size)
    most = max(-(-(start + 70) // size) - group.first_block(start) for start in range(2000))
    assert most == group.most_blocks(10**6, 70)


def test_tables_stay_absolute_and_blocks_are_given_back_before_the_chunk() -> None:
    cache = manager(Pages((0,), 1, None, BLOCK), Pages((1,), 1, 64, BLOCK), caching=False)
    held = run_through(cache, "x" * 100)
    assert [len(table) for table in held.block_ids] == [4, 4]
    trimmed = cache.trim(held, 126)  # its window begins at 63, in the first tile
    assert trimmed is held
    trimmed = cache.trim(held, 127)
    assert trimmed.given_back == (0, 2)
    assert trimmed.block_ids == (held.block_ids[0], (0, 0, *held.block_ids[1][2:]))
    assert [allocator.num_free for allocator in cache.allocators] == [16, 18]
    assert cache.trim(trimmed, 127) is trimmed  # the step was not applied and comes again


def test_growing_is_all_or_nothing() -> None:
    cache = CacheManager(
        [Pages((0,), 1, None, BLOCK), Pages((1,), 1, 64, BLOCK)], [9, 3], BLOCK, STEP
    )
    held = run_through(cache, "x" * 96)
    assert cache.grow(held, 97) is None
    assert [allocator.num_held for allocator in cache.allocators] == [3, 3]
    assert cache.grow(held, 96) is held


def test_shrinking_gives_back_what_lies_behind() -> None:
    cache = CacheManager([Pages((0,), 1, None, 4), Pages((1,), 1, None, 8)], [8, 8], 4, 16)
    admitted = cache.admit([], 5, reserve=0)
    assert admitted is not None
    held = cache.grow(admitted[0], 5)
    assert held is not None
    grown = cache.grow(held, 17)
    assert grown is not None
    assert (cache.num_held, grown.room) == (5 + 3, 20)
    assert cache.shrink(grown, 17) is grown
    shrunk = cache.shrink(grown, 5)
    assert shrunk == held
    assert cache.num_held == 2 + 1


def test_what_never_fits_is_named_by_its_group() -> None:
    groups = [Pages((0,), 1, None, BLOCK), Pages((1,), 1, 64, BLOCK)]
    assert CacheManager(groups, [100, 8], BLOCK, STEP).shortfall(3200) is None
    short = CacheManager(groups, [100, 7], BLOCK, STEP).shortfall(3200)
    assert short is not None
    assert (short.group, short.needed, short.num_blocks) == (groups[1], 8, 7)


# --------------------------------------------------------------------------------------------------------------
# states


@settings(max_examples=examples(300))
@given(
    size=st.sampled_from([16, 32, 64, 256]), start=st.integers(0, 1000), step=st.integers(1, 600)
)
def test_a_sequence_holds_the_state_before_a_step_and_those_that_it_writes(
    size: int, start: int, step: int
) -> None:
    group = states(size)
    first, end = group.first_block(start), -(-(start + step) // size)
    assert first == (0 if start == 0 else (start - 1) // size)
    assert end - first <= group.most_blocks(start + step, step) <= group.most_blocks(10**6, step)
    assert max(
        -(-(at + step) // size) - group.first_block(at) for at in range(2 * size)
    ) == group.most_blocks(10**6, step)


def test_a_full_state_is_given_back_once_the_next_block_has_begun() -> None:
    cache = manager(Pages((0,), 1, None, BLOCK), states(), caching=False)
    held = run_through(cache, "x" * 64)
    assert cache.trim(held, 64) is held  # the token at 64 reads block 0, and writes block 1
    grown = cache.grow(held, 65)
    assert grown is not None
    assert len(grown.block_ids[1]) == 2
    trimmed = cache.trim(grown, 65)
    assert (trimmed.given_back, trimmed.block_ids[1]) == ((0, 1), (0, grown.block_ids[1][1]))


@pytest.mark.parametrize(("shared", "hit"), [(300, 256), (200, 192), (63, 0), (64, 64)])
def test_a_hit_is_a_multiple_of_a_state(shared: int, hit: int) -> None:
    cache = manager(Pages((0,), 1, None, BLOCK), states())
    text = "abcde" * 60
    cache.release(run_through(cache, text))
    other = text[:shared] + "z" * (300 - shared)
    held, start = cache.admit(keys_of(other)[: 299 // BLOCK], 300, 0) or (SequenceBlocks(), -1)
    assert start == hit
    assert held.given_back[1] == max(0, hit // 64 - 1)  # of the states the last alone


# ----------------------------------------------------------------------------------------------------------------
# hits


def test_a_hit_needs_of_a_window_what_the_first_token_reads() -> None:
    cache = manager(Pages((0,), 1, None, BLOCK), Pages((1,), 1, 64, BLOCK))
    text = "abcdefghij" * 32
    cache.release(run_through(cache, text))
    cache.allocators[1].forget(keys_of(text)[:5])
    held, start = cache.admit(keys_of(text)[:9], len(text), 0) or (None, 0)
    assert (start, held.given_back if held else None) == (288, (0, 6))
    cache.allocators[1].forget(keys_of(text)[6:7])
    assert cache.admit(keys_of(text)[:9], len(text), 0) is not None
    cache.allocators[1].forget(
        keys_of(text)[7:8]
    )  # what is left of 9 does not reach back to its window
    assert (cache.admit(keys_of(text)[:9], len(text), 0) or (None, -1))[1] == 0


def test_a_hit_is_as_long_as_every_group_can_serve() -> None:
    cache = manager(Pages((0,), 1, None, BLOCK), Pages((1,), 1, 33, BLOCK), states())
    text = "a" * 321
    cache.release(run_through(cache, text))
    found = []
    for group, block in ((None, 0), (0, 9), (2, 7), (1, 5), (0, 0)):
        if group is not None:
            cache.allocators[group].forget(keys_of(text)[block : block + 1])
        held, start = cache.admit(keys_of(text), len(text), 0) or (SequenceBlocks(), -1)
        found.append(start)
        cache.release(held)
    assert found == [320, 256, 192, 128, 0]  # 192 would need block 5 of the window


def test_a_failed_request_leaves_nothing_behind_in_any_group() -> None:
    cache = manager(Pages((0,), 1, None, BLOCK), Pages((1,), 1, 40, BLOCK), states())
    text = "abc" * 100
    held = run_through(cache, text)
    assert held.given_back[1] > 0
    assert cache.allocators[1].num_cached > 0
    cache.forget(held, keys_of(text))
    assert [allocator.num_free for allocator in cache.allocators] == [20, 20, 20]
    assert not any(one.is_indexed(key) for one in cache.allocators for key in keys_of(text))


# -------------------------------------------------------------------------------------------------------
# state machine


@dataclass
class Sequence:
    text: str
    computed: int
    held: SequenceBlocks
    keys: list[bytes]


class ManagerMachine(RuleBasedStateMachine):
    """Sequences come with hits, compute chunks, and leave; beside it, the text that every block
    holds.
    """

    sequences = Bundle("sequences")
    texts = st.lists(st.sampled_from("ab"), min_size=1, max_size=5)

    def __init__(self) -> None:
        super().__init__()
        groups = (
            Pages((0,), 1, None, BLOCK), Pages((1,), 1, 40, BLOCK), Pages((2,), 1, 1, BLOCK), states(), states(BLOCK),
        )  # fmt: skip
        self.cache = CacheManager(groups, (24, 12, 9, 7, 10), BLOCK, STEP)
        self.content: list[dict[int, str]] = [{} for _ in groups]
        self.indexed: list[dict[tuple[int, bytes], int]] = [{} for _ in groups]
        self.live: dict[int, Sequence] = {}
        self.num_started = 0

    def holders(self, group: int, block: int) -> int:
        return sum(
            one.held.block_ids[group][one.held.given_back[group] :].count(block)
            for one in self.live.values()
        )

    def can_serve(self, keys: list[bytes], length: int) -> bool:
        """By its definition: every group has all blocks that the token at `length` reads."""
        for group, allocator in zip(self.cache.groups, self.cache.allocators, strict=True):
            size = group.tokens_per_block
            needed = range(group.first_block(length), length // size)
            if length % size or not all(
                allocator.is_indexed(keys[(i + 1) * size // BLOCK - 1]) for i in needed
            ):
                return False
        return True

    def check_reads(self, one: Sequence, start: int) -> None:
        """Every block that a token at `start` reads holds the sequence's own text."""
        for index, group in enumerate(self.cache.groups):
            size = group.tokens_per_block
            for entry in range(group.first_block(start), -(-start // size)):
                block = one.held.block_ids[index][entry]
                assert self.content[index][block] == one.text[: min(start, (entry + 1) * size)]
            if isinstance(group, StateBlocks) and start > 0:
                source = one.held.block_ids[index][(start - 1) // size]
                assert self.content[index][source] == one.text[:start], (
                    "not the state behind the token before"
                )

    @rule(
        target=sequences, parts=texts, rest=st.integers(1, BLOCK), salt=st.sampled_from([None, "s"])
    )
    def start(self, parts: list[str], rest: int, salt: str | None) -> int:
        text = "".join(part * 2 * BLOCK for part in parts) + "c" * rest
        keys = keys_of(text, salt)
        hits = keys[: (len(text) - 1) // BLOCK]
        possible = [n * BLOCK for n in range(len(hits) + 1) if self.can_serve(keys, n * BLOCK)]
        before = self.cache.num_held
        admitted = self.cache.admit(hits, len(text), reserve=0)
        self.num_started += 1
        if admitted is None:
            assert self.live, "a sequence that is alone is always admitted"
            assert self.cache.num_held == before
            return self.num_started
        held, start = admitted
        assert start == max(possible)
        one = self.live[self.num_started] = Sequence(text, start, held, keys)
        self.check_reads(one, start)
        return self.num_started

    @rule(sequence=sequences, count=st.integers(1, STEP))
    def advance(self, sequence: int, count: int) -> None:
        one = self.live.get(sequence)
        if one is None or one.computed == len(one.text):
            return
        start, end = one.computed, min(one.computed + count, len(one.text))
        one.held = self.cache.trim(one.held, start)
        self.check_reads(one, start)
        grown = self.cache.grow(one.held, end)
        if grown is None:
            assert len(self.live) > 1, "a sequence that is alone always gets its blocks"
            return
        one.held = grown
        for index, group in enumerate(self.cache.groups):
            size = group.tokens_per_block
            assert len(grown.block_ids[index]) - grown.given_back[index] <= group.most_blocks(
                len(one.text), STEP
            )
            for entry in range(start // size, -(-end // size)):
                block = grown.block_ids[index][entry]
                assert self.holders(index, block) == 1, "a block that others read is written"
                self.content[index][block] = one.text[: min(end, (entry + 1) * size)]
        self.cache.register(grown, one.keys, start, end)
        one.computed = end

    @rule(sequence=consumes(sequences), fails=st.booleans())
    def leave(self, sequence: int, fails: bool) -> None:
        one = self.live.pop(sequence, None)
        if one is None:
            return
        if not fails:
            self.cache.release(one.held)
            return
        self.cache.forget(one.held, one.keys)
        for allocator, table, first in zip(
            self.cache.allocators, one.held.block_ids, one.held.given_back, strict=True
        ):
            assert not any(allocator._keys[block] for block in table[first:]), (
                "a later request would reuse it"
            )

    @invariant()
    def every_block_is_in_exactly_one_state(self) -> None:
        for index, allocator in enumerate(self.cache.allocators):
            tables = [
                (one.held.block_ids[index], one.held.given_back[index])
                for one in self.live.values()
            ]
            held = {block for table, first in tables for block in table[first:]}
            assert (
                allocator.num_free + allocator.num_held + allocator.num_cached
                == allocator.num_blocks
            )
            assert allocator.num_held == len(held)
            assert all(set(table[:first]) <= {0} for table, first in tables), (
                "a block that was given back is in a table"
            )

    @invariant()
    def no_block_is_written_once_it_is_indexed(self) -> None:
        """Checksums of what blocks hold, from when they are indexed until they are not."""
        for content, sums, allocator in zip(
            self.content, self.indexed, self.cache.allocators, strict=True
        ):
            now = {
                (block, key): hash(content[block])
                for block, key in enumerate(allocator._keys)
                if key is not None
            }
            for entry, checksum in now.items():
                assert sums.setdefault(entry, checksum) == checksum
            for entry in sums.keys() - now.keys():
                del sums[entry]

    @invariant()
    def a_block_has_two_owners_only_if_both_know_its_text(self) -> None:
        for index, group in enumerate(self.cache.groups):
            for one in self.live.values():
                for entry in range(
                    one.held.given_back[index], one.computed // group.tokens_per_block
                ):
                    block = one.held.block_ids[index][entry]
                    assert (
                        self.content[index][block]
                        == one.text[: (entry + 1) * group.tokens_per_block]
                    )

    def teardown(self) -> None:
        for one in self.live.values():
            self.cache.release(one.held)
        assert self.cache.num_held == 0
        assert self.cache.used_share == 0.0
        self.cache.reset()
        assert all(
            allocator.num_free == allocator.num_blocks for allocator in self.cache.allocators
        )


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=examples(20), stateful_step_count=30)


def test_a_last_block_that_is_not_full_counts() -> None:
    cache = manager(Pages((0,), 1, None, BLOCK), num_blocks=3, caching=False)
    assert cache.admit([], 3 * BLOCK + 1, 0) is None
    held = cache.admit([], 3 * BLOCK, 0)
    assert held is not None
    assert cache.grow(held[0], 3 * BLOCK) is not None
