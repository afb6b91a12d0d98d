"""Ropes that turn neighbouring channels: rows of q and k in another order compute the same, or are
refused.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.shares import examples

from freight.errors import CheckpointError
from freight.kernels import reference
from freight.model.layers.rope import half_pairs
from freight.operands.weight import Activations, Weight


@settings(max_examples=examples(25))
@given(
    heads=st.integers(1, 4), half=st.integers(1, 6), rest=st.integers(0, 5), seed=st.integers(0, 99)
)
def test_turning_halves_of_reordered_channels_is_turning_neighbours(
    heads: int, half: int, rest: int, seed: int
):
    head_dim, generator = 2 * half + rest, torch.Generator().manual_seed(seed)
    x = torch.randn(5, heads, head_dim, generator=generator)
    cos, sin = torch.randn(2, 5, half, generator=generator)
    even, odd, kept = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2], x[..., 2 * half :]
    turned = (even * cos[:, None] - odd * sin[:, None], odd * cos[:, None] + even * sin[:, None])
    expected = torch.cat((torch.stack(turned, -1).flatten(-2), kept), -1)
    rows = half_pairs(heads, head_dim, 2 * half)
    found = reference.rotate(x.flatten(1)[:, rows].view_as(x), cos, sin)
    assert torch.equal(found.flatten(1), expected.flatten(1)[:, rows])


@pytest.mark.parametrize("blocks", [False, True])
def test_scales_go_with_their_rows(blocks: bool):
    data = torch.randn(256, 128, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5], [0.25]]) if blocks else torch.arange(1, 257) / 256
    weight, rows = Weight(data, scale, Activations.DYNAMIC), half_pairs(2, 128, 64)
    reordered = weight.reordered(rows, "q_proj")
    assert reordered.data.dtype is torch.float8_e4m3fn
    assert torch.equal(reordered.dequantized(), weight.dequantized()[rows])
    assert reordered.activations is Activations.DYNAMIC


def test_heads_that_span_blocks_of_scales_are_refused_by_name():
    weight = Weight(
        torch.zeros(192, 128).to(torch.float8_e4m3fn), torch.ones(2, 1), Activations.DYNAMIC
    )
    with pytest.raises(CheckpointError, match=r"layers\.3\.q_proj.*128 x 128"):
        weight.reordered(half_pairs(2, 96, 96), "layers.3.q_proj")
    assert torch.equal(
        weight.reordered(half_pairs(2, 96, 32), "q_proj").data, weight.data
    )  # within a block
