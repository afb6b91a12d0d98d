"""States: one layer's part of the blocks in which sequences keep a state, and the blocks that each
row of a step uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from freight.operands.batch import Sequences


@dataclass(frozen=True)
class Stretch:
    """Consecutive rows of one sequence that fall into one block.

    rows      rows of the batch
    position  position of the first row in the sequence
    source    block with the state before these rows; None: they begin the sequence, from the empty
              state
    target    block for the state after these rows. It may be the source, which no other sequence
              reads then
    """

    rows: slice[int, int, None]
    position: int
    source: int | None
    target: int


@dataclass(frozen=True)
class States:
    """The states of one layer. A block holds the state of one sequence after the last computed
    token of the block's `every` tokens.

    parts    tensors by name: [num_blocks, *shape of one state]. The content of a block that was
             never written is unspecified
    every    tokens of a block

    Names of parts that the operations of `KernelSet` know:

    columns  [kept, channels] in the compute dtype: the last inputs of a convolution, with the input of
             position p at p % kept. A row reads width - 1 of them; of more than these as many rows can
             be taken back
    state    [heads, k_dim, v_dim] float32, bfloat16, int8 or E4M3: the matrix S of each head at the
             start of the open tile of STATE_TILE tokens. A tile stays open until the first token
             after it is computed, so a full block holds the start and the rows of its last tile
    scale    [heads, v_dim] bfloat16: scale of each column of S, in the 8-bit formats
    k, u     [STATE_TILE, key_heads, k_dim], [STATE_TILE, heads, v_dim] in the compute dtype: the
             rows of the open tile
    decay    [STATE_TILE, heads] float32: logarithm of each row's decay since the tile's start; with
             a decay per key channel, [STATE_TILE, heads, k_dim]

    Rows are taken back by computing others at their positions. That is exact in the tile of the first
    row: S is that of the tile's start, and each row of the tile is written before it is read.
    """

    parts: Mapping[str, Tensor]
    every: int

    def stretches(self, sequences: Sequences) -> Iterator[Stretch]:
        """Yield the rows of a step in the order in which they must be computed. Copies lengths to
        the host.
        """
        starts = sequences.query_starts.tolist()
        lengths = sequences.context_lens.tolist()
        for begin, end, length, table in zip(
            starts, starts[1:], lengths, sequences.block_tables.tolist(), strict=False
        ):
            row = begin
            source = None
            position = length - (end - begin)
            if position > 0:
                source = table[(position - 1) // self.every]
            while row < end:
                block = position // self.every
                count = min((block + 1) * self.every - position, end - row)
                yield Stretch(slice(row, row + count), position, source, table[block])
                row = row + count
                position = position + count
                source = table[block]
