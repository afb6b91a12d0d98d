"""States: one layer's part of the blocks in which sequences keep a state, and which block each row of a step uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from freight.operands.batch import Sequences


@dataclass(frozen=True)
class Stretch:
    """Consecutive rows of one sequence that fall into one block.

    rows      of the batch
    source    the block with the state before them; None: they begin the sequence, whose state is that of no token
    target    the block that has the state behind them; it may be the source, and nobody else reads it then
    """

    rows: slice[int, int, None]
    source: int | None
    target: int


@dataclass(frozen=True)
class States:
    """The states of one layer. A block has that of one sequence behind the last token so far of its `every` tokens.

    parts    by name: [num_blocks, *shape of one state]. A block that was never written holds anything
    """

    parts: Mapping[str, Tensor]
    every: int

    def stretches(self, sequences: Sequences) -> Iterator[Stretch]:
        """The rows of a step in the order in which they have to be computed. Reads lengths on the host."""
        starts, lengths = sequences.query_starts.tolist(), sequences.context_lens.tolist()
        for begin, end, length, table in zip(
            starts, starts[1:], lengths, sequences.block_tables.tolist(), strict=False
        ):
            row, source = begin, None
            position = length - (end - begin)
            if position > 0:
                source = table[(position - 1) // self.every]
            while row < end:
                block = position // self.every
                count = min((block + 1) * self.every - position, end - row)
                yield Stretch(slice(row, row + count), source, table[block])
                row, position, source = row + count, position + count, table[block]
