"""BlockAllocator: examples for each promise, and a state machine that holds all of them over any
order of events.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from tests.shares import examples

from freight.cache.blocks import BlockAllocator
from freight.cache.prefix import block_key, root_key


def chain(*contents: str, salt: str | None = None) -> list[bytes]:
    """Keys of a sequence whose blocks hold these texts, one token per character."""
    keys, parent = [], root_key(salt)
    for content in contents:
        parent = block_key(parent, [ord(character) for character in content])
        keys.append(parent)
    return keys


def computed(allocator: BlockAllocator, keys: list[bytes]) -> list[int]:
    """Blocks of a sequence that was computed and registered; still held."""
    blocks = allocator.allocate(len(keys))
    assert blocks is not None
    for block, key in zip(blocks, keys, strict=True):
        allocator.register(block, key)
    return blocks


def counts(allocator: BlockAllocator) -> tuple[int, int, int]:
    return allocator.num_free, allocator.num_held, allocator.num_cached


def test_key_depends_on_tokens_on_everything_before_and_on_the_salt() -> None:
    ab = chain("aa", "bb")
    assert chain("aa", "bb") == ab
    assert chain("aa", "bc")[0] == ab[0]
    assert chain("aa", "bc")[1] != ab[1]
    assert chain("ac", "bb")[1] != ab[1]
    assert chain("bb")[0] != ab[1]
    salts = [None, "", "x", "y", "\ud800"]
    assert len({chain("aa", salt=salt)[0] for salt in salts}) == len(salts)


def test_key_separates_tokens_that_share_their_digits() -> None:
    root = root_key(None)
    keys = {
        block_key(root, tokens)
        for tokens in ([1, 23], [12, 3], [123], [1, 2, 3], [256], [1], [1, 0], [0, 1])
    }
    assert len(keys) == 8


def test_first_parents_separate_salts_and_adapters() -> None:
    """A salt separates clients with an adapter, too."""
    roots = {
        root_key(salt, adapter)
        for salt in (None, "", "mine", "a")
        for adapter in (None, "", "mine", "a")
    }
    assert len(roots) == 16


def test_blocks_for_rounds_up() -> None:
    allocator = BlockAllocator(4, 16)
    assert [allocator.blocks_for(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_allocate_is_all_or_nothing() -> None:
    allocator = BlockAllocator(4, 2)
    first = allocator.allocate(3)
    assert first is not None
    assert counts(allocator) == (1, 3, 0)
    assert allocator.allocate(2) is None
    assert counts(allocator) == (1, 3, 0)
    last = allocator.allocate(1)
    assert last is not None
    assert sorted(first + last) == [0, 1, 2, 3]
    assert allocator.allocate(0) == []


def test_registered_blocks_are_cached_when_released_and_others_free() -> None:
    allocator = BlockAllocator(4, 2)
    blocks = allocator.allocate(3)
    assert blocks is not None
    (key,) = chain("aa")
    allocator.register(blocks[0], key)
    allocator.release(blocks)
    assert counts(allocator) == (3, 0, 1)
    assert allocator.acquire_prefix([key]) == [blocks[0]]
    assert counts(allocator) == (3, 1, 0)


def test_hit_is_the_longest_indexed_run_from_the_start() -> None:
    allocator = BlockAllocator(8, 2)
    keys = chain("aa", "bb", "cc")
    blocks = computed(allocator, keys)
    assert allocator.acquire_prefix([*keys[:2], *chain("xx")]) == blocks[:2]
    assert allocator.acquire_prefix([*chain("xx"), *keys]) == []
    assert allocator.acquire_prefix(keys[1:]) == blocks[1:]  # a key says what precedes it


def test_held_blocks_are_shared_and_live_until_the_last_release() -> None:
    allocator = BlockAllocator(2, 2)
    keys = chain("aa")
    blocks = computed(allocator, keys)
    assert allocator.acquire_prefix(keys) == blocks
    allocator.release(blocks)
    assert counts(allocator) == (1, 1, 0)
    assert allocator.allocate(2) is None
    allocator.release(blocks)
    assert counts(allocator) == (1, 0, 1)


def test_second_block_with_the_same_content_stays_unindexed() -> None:
    allocator = BlockAllocator(4, 2)
    keys = chain("aa")
    first, second = computed(allocator, keys), computed(allocator, keys)
    allocator.release(second)
    assert counts(allocator) == (3, 1, 0)
    assert allocator.acquire_prefix(keys) == first


def test_eviction_takes_free_blocks_first_then_the_longest_unheld_tail_first() -> None:
    allocator = BlockAllocator(5, 2)
    old, new = chain("aa", "bb"), chain("xx", "yy")
    old_blocks, new_blocks = computed(allocator, old), computed(allocator, new)
    allocator.release(old_blocks)
    allocator.release(new_blocks)
    assert allocator.num_free == 1
    taken = allocator.allocate(2)
    assert taken is not None
    assert taken[1] == old_blocks[1]  # the free block, then the tail of the older sequence
    assert allocator.allocate(1) == [old_blocks[0]]
    assert allocator.allocate(1) == [new_blocks[1]]
    assert allocator.acquire_prefix(old) == []
    assert allocator.acquire_prefix(new) == [new_blocks[0]]


def test_hit_renews_a_cached_block() -> None:
    allocator = BlockAllocator(2, 2)
    a, b = chain("aa"), chain("bb")
    a_blocks, b_blocks = computed(allocator, a), computed(allocator, b)
    allocator.release(a_blocks)
    allocator.release(b_blocks)
    allocator.release(allocator.acquire_prefix(a))
    assert allocator.allocate(1) == b_blocks


def test_evicted_block_can_be_registered_anew() -> None:
    allocator = BlockAllocator(1, 2)
    old, new = chain("aa"), chain("bb")
    allocator.release(computed(allocator, old))
    blocks = computed(allocator, new)
    assert allocator.acquire_prefix(old) == []
    assert allocator.acquire_prefix(new) == blocks


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    allocator = BlockAllocator(2, 2, enable_prefix_caching=False)
    keys = chain("aa")
    blocks = computed(allocator, keys)
    assert allocator.acquire_prefix(keys) == []
    allocator.release(blocks)
    assert counts(allocator) == (2, 0, 0)


def test_misuse_is_an_assertion() -> None:
    allocator = BlockAllocator(2, 2)
    blocks = allocator.allocate(1)
    assert blocks is not None
    allocator.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        allocator.release(blocks)
    with pytest.raises(AssertionError, match="not held"):
        allocator.register(blocks[0], chain("aa")[0])
    held = computed(allocator, chain("aa"))
    with pytest.raises(AssertionError, match="another key"):
        allocator.register(held[0], chain("bb")[0])


class AllocatorMachine(RuleBasedStateMachine):
    """Sequences come, take hits, fill blocks and leave in any order, beside a model of what the
    pool contains.

    The model writes the content (all text up to the end of the block) of every block that is
    computed, and remembers in which order unheld indexed blocks were released.
    """

    sequences = Bundle("sequences")
    texts = st.lists(st.sampled_from(["aa", "bb"]), max_size=4)

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(6, 2)
        self.owners: dict[int, list[int]] = {}  # sequence -> blocks
        self.content: dict[int, str] = {}  # block -> what was last written there
        self.indexed: dict[int, bytes] = {}  # block -> key
        self.lru: list[int] = []
        self.next_sequence = 0

    def holders(self, block: int) -> int:
        return sum(blocks.count(block) for blocks in self.owners.values())

    def take_fresh(self, count: int) -> list[int] | None:
        """allocate(), checked: nothing held is handed out, and eviction follows the order of
        release.
        """
        free, available = (
            self.allocator.num_free,
            self.allocator.num_free + self.allocator.num_cached,
        )
        blocks = self.allocator.allocate(count)
        assert (blocks is None) == (count > available)
        if blocks is None:
            return None
        assert len(set(blocks)) == count
        assert all(self.holders(block) == 0 for block in blocks)
        evicted = self.lru[: max(count - free, 0)]
        assert blocks[count - len(evicted) :] == evicted
        del self.lru[: len(evicted)]
        for block in evicted:
            del self.indexed[block]
        return blocks

    @rule(target=sequences, texts=texts, salt=st.sampled_from([None, "s"]), computes=st.booleans())
    def start(self, texts: list[str], salt: str | None, computes: bool) -> int:
        keys = chain(*texts, salt=salt)
        hits = self.allocator.acquire_prefix(keys)
        for depth, block in enumerate(hits):
            assert self.indexed[block] == keys[depth]
            assert self.content[block] == f"{salt}:" + "".join(texts[: depth + 1])
            if block in self.lru:
                self.lru.remove(block)
        missed = keys[len(hits)] if len(hits) < len(keys) else None
        assert missed not in self.indexed.values()
        sequence = self.next_sequence
        self.next_sequence += 1
        self.owners[sequence] = hits
        fresh = self.take_fresh(len(keys) - len(hits))
        if fresh is None:
            self.give_back(sequence)
            return sequence
        self.owners[sequence] = hits + fresh
        for depth in range(len(hits), len(keys)):
            block = self.owners[sequence][depth]
            self.content[block] = f"{salt}:" + "".join(texts[: depth + 1])
            if computes:
                self.allocator.register(block, keys[depth])
                if keys[depth] not in self.indexed.values():
                    self.indexed[block] = keys[depth]
        return sequence

    @rule(sequence=sequences, count=st.integers(0, 3))
    def grow(self, sequence: int, count: int) -> None:
        if sequence in self.owners:
            self.owners[sequence] += self.take_fresh(count) or []

    @rule(sequence=consumes(sequences))
    def give_back(self, sequence: int) -> None:
        blocks = self.owners.pop(sequence, [])
        self.allocator.release(blocks)
        self.lru += [
            block
            for block in reversed(blocks)
            if self.holders(block) == 0 and block in self.indexed
        ]

    @invariant()
    def every_block_is_in_exactly_one_state(self) -> None:
        held = {block for blocks in self.owners.values() for block in blocks}
        free, num_held, cached = counts(self.allocator)
        assert free + num_held + cached == self.allocator.num_blocks
        assert num_held == len(held)
        assert cached == len(self.lru)

    @invariant()
    def only_indexed_blocks_are_shared_and_at_one_position(self) -> None:
        for blocks in self.owners.values():
            assert len(set(blocks)) == len(blocks)
            for depth, block in enumerate(blocks):
                if self.holders(block) > 1:
                    assert block in self.indexed
                    assert all(b.index(block) == depth for b in self.owners.values() if block in b)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=examples(150), stateful_step_count=40)


def test_a_block_that_was_allocated_anew_is_another_even_under_its_old_key() -> None:
    """What another thread copied of its first use may be what was written meanwhile."""
    allocator = BlockAllocator(num_blocks=1, block_size=2)
    (key,) = chain("aa")
    (block,) = computed(allocator, [key])
    use = allocator.use_of(block)
    assert allocator.is_same(block, key, use)
    allocator.release([block])
    assert allocator.is_same(block, key, use)
    assert computed(allocator, chain("bb")) == [block]
    assert not allocator.is_same(block, key, use)
    allocator.release([block])
    assert computed(allocator, [key]) == [block]
    assert not allocator.is_same(block, key, use)
    assert allocator.is_same(block, key, allocator.use_of(block))
