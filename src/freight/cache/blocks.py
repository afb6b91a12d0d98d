"""BlockAllocator: the blocks in use. The only writer of reference counts, free list and prefix
index.

A block is in exactly one of three states, so that num_free + num_held + num_cached is always the
size of the pool:

    free     no references; its content is unspecified
    held     at least one request has a reference
    cached   no references, but its content is indexed: a later request may reuse it, or it is
             evicted

The prefix index maps a key (cache/prefix.py) to the block with that content.

Eviction takes the block that was released longest ago; of blocks released together, the one
farthest from the start of the sequence, because a prefix hit needs all blocks before it. Not
thread-safe. Imports no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from freight.cache.events import CacheEvents


class BlockAllocator:
    """An allocator of the blocks 0 … num_blocks - 1, of `block_size` tokens each. Finds computed
    blocks again by their key.

    Without prefix caching `register` does nothing and `acquire_prefix` finds nothing.

    events  collects what the index loses, and whether `register` changed it is to be told there as
            well; None: nobody asks
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        assert min(num_blocks, block_size) > 0, (num_blocks, block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.events: CacheEvents | None = None
        # how often each block was allocated, which `reset` does not set back
        self._uses = [0] * num_blocks
        self.reset()

    def reset(self) -> None:
        """Make every block free and forget what was indexed."""
        self._free = list(range(self.num_blocks - 1, -1, -1))  # a stack: low numbers first
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest release first
        self._num_held = 0
        self._references = [0] * self.num_blocks
        # key under which each block is indexed
        self._keys: list[bytes | None] = [None] * self.num_blocks
        self._index: dict[bytes, int] = {}  # the inverse of _keys
        if self.events is not None:
            self.events.cleared()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self._num_held

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can return: free ones, and cached ones after eviction."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` blocks with unspecified content, one reference each; None, and no
        change, if fewer are available.

        Free blocks are used first; then cached ones are evicted.
        """
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block = self._evict()
            self._references[block] = 1
            self._uses[block] += 1
            blocks.append(block)
        self._num_held += count
        return blocks

    def acquire_prefix(self, keys: Iterable[bytes]) -> list[int]:
        """Take a reference on each block of the longest indexed run at the start of `keys`, and
        return them.

        They are shared: a holder reads them and never writes them.
        """
        blocks = []
        for key in keys:
            block = self._index.get(key)
            if block is None:
                break
            if self._references[block] == 0:
                del self._cached[block]
                self._num_held += 1
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def is_indexed(self, key: bytes) -> bool:
        """Return whether a block is indexed under `key`; takes no reference."""
        return key in self._index

    def use_of(self, block: int) -> int:
        """Return how often `block` was allocated: while that and its key stay, so does what it has."""
        return self._uses[block]

    def is_same(self, block: int, key: bytes, use: int) -> bool:
        """Return whether `block` is still indexed under `key`, and of the same `use_of`. The only
        method that other threads may call.
        """
        return self._keys[block] == key and self._uses[block] == use

    def register(self, block: int, key: bytes) -> bool:
        """Index a held block whose every slot is computed and stored. A block already indexed under
        `key` stays; then the index does not change, and False is returned.
        """
        assert self._references[block] > 0, f"block {block} is registered but not held"
        if not self.enable_prefix_caching or key in self._index:
            return False
        assert self._keys[block] is None, f"block {block} is already indexed under another key"
        self._keys[block] = key
        self._index[key] = block
        return True

    def release(self, blocks: Sequence[int], forget: bool = False) -> None:
        """Release one reference to each block of a sequence, given in sequence order. A block
        without references becomes cached or free.

        With `forget` their content is removed from the index, so no later request reuses it.
        """
        for block in reversed(blocks):  # the tail becomes evictable before the head
            assert self._references[block] > 0, (
                f"block {block} is released more often than it was taken"
            )
            if forget:
                self._forget(block)
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            self._num_held -= 1
            if self._keys[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def forget(self, keys: Iterable[bytes]) -> None:
        """Remove content from the index, so that no later request reuses it. Blocks that no request
        holds become free.
        """
        for key in keys:
            block = self._index.get(key)
            if block is None:
                continue
            self._forget(block)
            if self._references[block] == 0:
                del self._cached[block]
                self._free.append(block)

    def forget_all(self) -> None:
        """Index nothing any longer. Blocks that no request holds become free."""
        self.forget(list(self._index))

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            self._keys[block] = None
            del self._index[key]
            if self.events is not None:
                self.events.removed(key)
