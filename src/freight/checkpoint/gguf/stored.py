"""Matrices in the blocks of a GGUF file: found by their names, and read as they are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from freight.checkpoint.headers import Shape
from freight.checkpoint.reader import Checkpoint
from freight.fp8.block_formats import BlockFormat
from freight.fp8.blocks import require_finite
from freight.operands.weight import Weight


@dataclass(frozen=True)
class StoredBlocks:
    """A matrix in blocks, not read yet. `rows`: the output rows that are read; empty: all."""

    name: str
    format: BlockFormat
    rows: tuple[slice, ...] = ()

    def read(self, checkpoint: Checkpoint, device: str) -> Weight:
        """Read the matrix. Raises CheckpointError for scales that are not finite."""
        data = checkpoint.take_blocks(self.name)
        if self.rows:
            data = torch.cat([data[rows] for rows in self.rows])
        require_finite(data, self.format, f"{checkpoint.path}: {self.name}")
        return Weight(data.to(device), blocks=self.format)

    def of_rows(self, rows: Sequence[slice]) -> StoredBlocks:
        """Return the matrix of these output rows."""
        return replace(self, rows=tuple(rows))


def find_blocks(checkpoint: Checkpoint, shapes: Mapping[str, Shape]) -> dict[str, StoredBlocks]:
    """Find the matrices, of the names in `shapes`, that are in blocks that kernels multiply."""
    matrices = {}
    for name, shape in shapes.items():
        if len(shape) != 2 or name not in checkpoint.names:
            continue
        format = checkpoint.block_format(name)
        if format is not None and format.is_multiplied:
            matrices[name] = StoredBlocks(name, format)
    return matrices
