"""The formats of the blocks of GGUF files: their sizes. Imports no torch.

Layouts: ggml-common.h of llama.cpp; `fp8.blocks` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

_GROUP = 32  # inputs of a block
_SUPER = 256  # those of a block of the formats that end in k or xs


class BlockFormat(StrEnum):
    """A format of blocks, by llama.cpp's name in lower case."""

    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    Q8_0 = "q8_0"
    Q2_K = "q2_k"
    Q3_K = "q3_k"
    Q4_K = "q4_k"
    Q5_K = "q5_k"
    Q6_K = "q6_k"
    IQ4_NL = "iq4_nl"
    IQ4_XS = "iq4_xs"
    MXFP4 = "mxfp4"

    @property
    def inputs(self) -> int:
        """Inputs of a row that a block has."""
        return _LAYOUTS[self].inputs

    @property
    def bytes(self) -> int:
        """Bytes of a block."""
        return _LAYOUTS[self].bytes

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return _LAYOUTS[self].group

    @property
    def floats(self) -> tuple[int, ...]:
        """Bytes of a block at which its float16 numbers begin: scales and minima."""
        return _LAYOUTS[self].floats

    @property
    def bits(self) -> float:
        """Bits of an input, with its part of the scales."""
        return 8 * self.bytes / self.inputs

    @property
    def is_multiplied(self) -> bool:
        """Whether kernels multiply it as it is stored; the others are decoded as they are loaded."""
        return self not in (BlockFormat.Q2_K, BlockFormat.Q3_K)

    def row_bytes(self, inputs: int) -> int:
        """Return the bytes of a row of `inputs`, a multiple of a block's."""
        assert inputs % self.inputs == 0
        return inputs // self.inputs * self.bytes


@dataclass(frozen=True)
class _Layout:
    """A block: its inputs and bytes, the inputs of a group, and where its float16 numbers are."""

    inputs: int
    bytes: int
    group: int
    floats: tuple[int, ...]


_LAYOUTS: Mapping[BlockFormat, _Layout] = {
    BlockFormat.Q4_0: _Layout(_GROUP, 18, 32, (0,)),
    BlockFormat.Q4_1: _Layout(_GROUP, 20, 32, (0, 2)),
    BlockFormat.Q5_0: _Layout(_GROUP, 22, 32, (0,)),
    BlockFormat.Q5_1: _Layout(_GROUP, 24, 32, (0, 2)),
    BlockFormat.Q8_0: _Layout(_GROUP, 34, 32, (0,)),
    BlockFormat.Q2_K: _Layout(_SUPER, 84, 16, (80, 82)),
    BlockFormat.Q3_K: _Layout(_SUPER, 110, 16, (108,)),
    BlockFormat.Q4_K: _Layout(_SUPER, 144, 32, (0, 2)),
    BlockFormat.Q5_K: _Layout(_SUPER, 176, 32, (0, 2)),
    BlockFormat.Q6_K: _Layout(_SUPER, 210, 16, (208,)),
    BlockFormat.IQ4_NL: _Layout(_GROUP, 18, 32, (0,)),
    BlockFormat.IQ4_XS: _Layout(_SUPER, 136, 32, (0,)),
    BlockFormat.MXFP4: _Layout(_GROUP, 17, 32, ()),
}
