"""StoredLinear: the part of a matrix that a rank reads."""

from __future__ import annotations

import pytest
import torch

from freight.checkpoint.linears import StoredLinear
from freight.errors import ConfigError
from freight.fp8.formats import Format
from freight.operands.weight import Activations


def in_blocks(rows: int) -> StoredLinear:
    """A matrix of `rows` rows and 256 inputs, whose block scales are numbered."""
    blocks = torch.arange(-(-rows // 128) * 2, dtype=torch.float32).view(-1, 2)
    return StoredLinear("w", (rows, 256), Format.E4M3FN, blocks, Activations.DYNAMIC, None, None)


def test_a_last_block_of_fewer_rows_keeps_its_scales():
    part = in_blocks(200).of_rows([slice(128, 200)])
    assert part.shape == (72, 256)
    assert part.scale.tolist() == [[2.0, 3.0]]


def test_parts_of_several_places_have_the_scales_of_each():
    part = in_blocks(640).of_rows([slice(128, 256), slice(384, 640)])
    assert part.shape == (384, 256)
    assert part.scale.tolist() == [[2.0, 3.0], [6.0, 7.0], [8.0, 9.0]]


def test_a_part_that_would_cut_a_block_is_refused():
    with pytest.raises(ConfigError, match="multiples of 128"):
        in_blocks(640).of_rows([slice(64, 256)])
