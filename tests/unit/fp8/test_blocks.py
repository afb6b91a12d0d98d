"""Blocks of GGUF files: every bit of their values is what llama.cpp's package `gguf` decodes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from freight.errors import CheckpointError
from freight.fp8 import blocks
from freight.fp8.blocks import BlockFormat
from freight.operands.weight import Weight

NO_FLOATS = {BlockFormat.MXFP4}  # every byte of them is a finite number
# where a block's float16 numbers begin
FLOATS = {
    BlockFormat.Q4_1: (0, 2),
    BlockFormat.Q5_1: (0, 2),
    BlockFormat.Q2_K: (80, 82),
    BlockFormat.Q3_K: (108,),
    BlockFormat.Q4_K: (0, 2),
    BlockFormat.Q5_K: (0, 2),
    BlockFormat.Q6_K: (208,),
}


def rows_of(format: BlockFormat, fill: str) -> torch.Tensor:
    """uint8 [5, bytes of a row of three blocks], with finite scales."""
    shape = (5, 3, format.bytes)
    numbers = torch.Generator().manual_seed(3)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=numbers)
    if fill == "zeros":
        data.zero_()
    if fill == "ones":
        data.fill_(255)
    if fill == "either":
        data = torch.where(data > 127, 255, 0).to(torch.uint8)
    if format not in NO_FLOATS:
        for at in FLOATS.get(format, (0,)):
            data[..., at + 1] &= 0xBB
    return data.flatten(1)


@pytest.mark.parametrize("fill", ["random", "zeros", "ones", "either"])
@pytest.mark.parametrize("format", list(BlockFormat))
def test_values_are_those_of_gguf(format: BlockFormat, fill: str) -> None:
    data = rows_of(format, fill)
    kind = gguf.GGMLQuantizationType[format.name]
    assert gguf.GGML_QUANT_SIZES[kind] == (format.inputs, format.bytes)
    with np.errstate(over="ignore"):
        expected = torch.from_numpy(gguf.dequantize(data.numpy(), kind))
    weight = Weight(data, blocks=format)
    assert weight.shape == expected.shape
    assert torch.equal(weight.dequantized().view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("format", list(BlockFormat))
def test_codes_are_integers_in_the_groups_that_are_named(format: BlockFormat) -> None:
    data = rows_of(format, "random")
    codes, scales, minima = blocks.integers(data, format)
    groups = 3 * format.inputs // format.group
    assert codes.shape == (5, groups, format.group)
    assert scales.shape == (5, groups)
    assert minima is None or minima.shape == (5, groups)
    assert torch.equal(codes, codes.round())
    assert codes.abs().max() <= 128


@pytest.mark.parametrize("format", sorted(set(BlockFormat) - NO_FLOATS))
def test_a_scale_that_is_not_finite_is_refused_with_the_tensors_name(format: BlockFormat) -> None:
    data = rows_of(format, "random")
    blocks.require_finite(data, format, "blk.0.ffn_up.weight")
    for at in FLOATS.get(format, (0,)):
        for bits in (0x7C, 0xFC, 0x7E):
            wrong = data.clone()
            wrong[2, format.bytes + at + 1] = bits
            with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight.*not finite"):
                blocks.require_finite(wrong, format, "blk.0.ffn_up.weight")


def test_rows_of_blocks_are_merged_and_reordered_as_bytes() -> None:
    first = Weight(rows_of(BlockFormat.Q6_K, "random"), blocks=BlockFormat.Q6_K)
    other = Weight(rows_of(BlockFormat.Q6_K, "either"), blocks=BlockFormat.Q6_K)
    assert Weight.mergeable([first, other])
    merged = Weight.concat([first, other])
    assert merged.shape == (10, 768)
    assert torch.equal(merged.dequantized()[5:], other.dequantized())
    order = torch.tensor([4, 0, 2])
    assert torch.equal(first.reordered(order, "x").dequantized(), first.dequantized()[order])
    q5 = Weight(rows_of(BlockFormat.Q5_K, "random"), blocks=BlockFormat.Q5_K)
    assert not Weight.mergeable([first, q5])
