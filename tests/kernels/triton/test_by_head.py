"""The product of each head in Triton, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from freight.kernels.reference_set import REFERENCE
from freight.kernels.triton.formats import current_target
from freight.kernels.triton.triton_set import TritonKernels
from freight.operands.weight import Weight

KERNELS = TritonKernels(current_target())
BOUNDS = {
    torch.float32: 2e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}  # of the rounding at the end, mostly


def columns(rows: int, heads: int, inputs: int, dtype: torch.dtype, device: str) -> Tensor:
    """[rows, heads, inputs] out of a larger tensor: neither rows nor heads follow one another."""
    return torch.randn(rows, heads, inputs + 5).to(dtype).to(device)[..., 3 : 3 + inputs]


def matrices(
    heads: int, outputs: int, inputs: int, dtype: torch.dtype, device: str
) -> list[Weight]:
    return [
        Weight((torch.randn(outputs, inputs) / inputs**0.5).to(dtype).to(device))
        for _ in range(heads)
    ]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("rows", "heads", "outputs", "inputs"),
    [
        (1, 20, 40, 128),
        (2, 3, 40, 96),
        (7, 1, 1, 16),
        (33, 3, 70, 192),
        (65, 2, 40, 128),
        (17, 2, 512, 32),
    ],
)
def test_every_head_is_a_product_of_the_reference(dtype, rows, heads, outputs, inputs, device):
    torch.manual_seed(0)
    weights = matrices(heads, outputs, inputs, dtype, device)
    x = columns(rows, heads, inputs, dtype, device)
    found = KERNELS.by_head(x, KERNELS.pack_experts(weights))
    exact = [Weight(weight.data.float()) for weight in weights]
    expected = REFERENCE.by_head(x.float(), REFERENCE.pack_experts(exact))
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert (found.float() - expected).abs().max() <= BOUNDS[dtype] * expected.abs().max()


@pytest.mark.parametrize("rows", [(1, 7, 16), (17, 33, 64), (65, 80)], ids=str)
def test_the_bits_of_a_row_are_its_own(rows, device):
    """Whatever rows are beside it, of a class of numbers of rows; a NaN stays in its row and head."""
    torch.manual_seed(1)
    packed = KERNELS.pack_experts(matrices(2, 40, 144, torch.bfloat16, device))
    x = columns(max(rows), 2, 144, torch.bfloat16, device)
    together = KERNELS.by_head(x, packed)
    for number in rows:
        part = x[-number:].clone()
        if number > 1:
            part[0, 1, 5] = torch.nan
        found = KERNELS.by_head(part, packed)
        if number > 1:
            assert found[0, 1].isnan().all()
            found[0, 1] = together[-number, 1]
        assert torch.equal(found, together[-number:])
