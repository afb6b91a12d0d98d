"""What a layer's cache looks like, what a token costs in it, and which layers form a group. Imports no torch.

Format and granularity belong to each layer, so mixed caches need no new concept; the pool sums bytes, scales included.

A group is the layers whose kind of cache and window are equal, however many bytes a token has in each of them. A group
has its own blocks and its own block tables: a window's layers give back blocks that no later token sees, while other
layers keep theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from freight.fp8.formats import Format, Granularity
from freight.operands.tiles import KEY_TILE


@dataclass(frozen=True)
class LayerKVSpec:
    """One layer's K and V pages. `granularity` is None for 16 bits, `window` for a layer that sees every token.

    `source` is the layer whose pages this one reads; it has none of its own then.
    """

    format: Format
    granularity: Granularity | None
    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None
    source: int | None = None

    @property
    def values_per_token(self) -> int:
        if self.source is not None:
            return 0
        return self.num_kv_heads * (self.k_dim + self.v_dim)

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token, with its `token` scales (one bfloat16 per KV head, K and V apart)."""
        if self.source is not None:
            return 0
        values = self.values_per_token * self.format.bytes
        return values + (2 * 2 * self.num_kv_heads if self.granularity is Granularity.TOKEN else 0)


class CacheGroup(Protocol):
    """What decides which blocks a sequence needs in one group. Entry i of its block table is block i of the sequence.

    tokens_per_block    a multiple of the block size that prefix keys are made for
    """

    @property
    def tokens_per_block(self) -> int: ...

    def first_block(self, start: int) -> int:
        """The first entry that computing a token at position `start`, or a later one, reads; rises with `start`.

        So a sequence can continue at `start`, a multiple of tokens_per_block, from the entries first_block(start) …
        start / tokens_per_block - 1 alone.
        """
        ...

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Blocks that a sequence holds at most at once until it has `num_tokens` tokens, `step_tokens` a step."""
        ...

    def describe(self) -> str:
        """Its layers, for messages: 'the layers with a window of 1024 tokens'."""
        ...


@dataclass(frozen=True)
class Pages:
    """The K and V pages of `layers`, indices into the model's. `bytes_per_token` is the sum over them."""

    layers: tuple[int, ...]
    bytes_per_token: int
    window: int | None
    tokens_per_block: int

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.tokens_per_block

    def first_block(self, start: int) -> int:
        """The block in which the first key tile lies that the window of the token at `start` touches.

        Attention reads that tile whole, so a key before the window must not have been overwritten if it lies there.
        """
        if self.window is None or start < self.window:
            return 0
        return (start - self.window + 1) // KEY_TILE * KEY_TILE // self.tokens_per_block

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Of a window: itself and a step, and what lies before it in its first tile or block."""
        if self.window is not None:
            before = max(KEY_TILE, self.tokens_per_block) - 1
            num_tokens = min(num_tokens, before + self.window - 1 + step_tokens)
        return -(-num_tokens // self.tokens_per_block)

    def describe(self) -> str:
        return "every layer" if self.window is None else f"the layers with a window of {self.window} tokens"


@dataclass(frozen=True)
class KVCacheSpec:
    """All layers of one model's cache, cut into blocks of `block_size` tokens."""

    layers: tuple[LayerKVSpec, ...]
    block_size: int

    @cached_property
    def groups(self) -> tuple[Pages, ...]:
        """In the order of their first layers."""
        members: dict[int | None, list[int]] = {}
        for index, layer in enumerate(self.layers):
            if layer.source is None:
                members.setdefault(layer.window, []).append(index)
        return tuple(
            Pages(tuple(layers), sum(self.layers[index].bytes_per_token for index in layers), window, self.block_size)
            for window, layers in members.items()
        )

    @property
    def bytes_per_token(self) -> int:
        """Of a token that every layer sees."""
        return sum(layer.bytes_per_token for layer in self.layers)

    def tokens_in(self, memory: int) -> int:
        """How many tokens that every layer sees `memory` bytes hold, in whole blocks."""
        return memory // (self.bytes_per_token * self.block_size) * self.block_size

    def bytes_of(self, num_blocks: tuple[int, ...]) -> int:
        """Bytes of so many blocks in each group."""
        return sum(count * group.bytes_per_block for count, group in zip(num_blocks, self.groups, strict=True))
