"""What a layer's cache looks like and what a token costs in it: the arithmetic of memory, by layer.

Format and granularity belong to each layer, so mixed caches need no new concept; the pool sums bytes, scales included.
"""

from __future__ import annotations

from dataclasses import dataclass

from freight.fp8.formats import Format, Granularity


@dataclass(frozen=True)
class LayerKVSpec:
    """One layer's K and V pages. `granularity` is None for 16 bits."""

    format: Format
    granularity: Granularity | None
    num_kv_heads: int
    k_dim: int
    v_dim: int

    @property
    def values_per_token(self) -> int:
        return self.num_kv_heads * (self.k_dim + self.v_dim)

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token, with its `token` scales (one bfloat16 per KV head, K and V apart)."""
        values = self.values_per_token * self.format.bytes
        return values + (2 * 2 * self.num_kv_heads if self.granularity is Granularity.TOKEN else 0)


@dataclass(frozen=True)
class KVCacheSpec:
    """All layers of one model's cache, cut into blocks of `block_size` tokens."""

    layers: tuple[LayerKVSpec, ...]
    block_size: int

    @property
    def bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def blocks_in(self, memory: int) -> int:
        """How many blocks `memory` bytes hold."""
        return memory // self.bytes_per_block

    def tokens_in(self, memory: int) -> int:
        """How many tokens `memory` bytes hold, in whole blocks."""
        return self.blocks_in(memory) * self.block_size
