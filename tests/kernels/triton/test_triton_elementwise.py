"""Row-wise operations in Triton against the reference."""

from __future__ import annotations

import pytest
import torch

from freight.kernels import reference
from freight.kernels.triton import elementwise
from freight.kernels.triton.formats import current_target
from freight.operands.activation import GatedActivation

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to one rounding of the result, and exp and rsqrt in float32."""
    assert got.dtype == expected.dtype
    bound = torch.finfo(got.dtype).eps * expected.float().abs() * 2 + 1e-6
    assert ((got.float() - expected.float()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype, device):
    torch.manual_seed(0)
    x, delta = (torch.randn(2, 5, 200) * 4).to(dtype).to(device)
    weight = torch.rand(200).to(dtype).to(device)
    total, normed = elementwise.add_rms_norm(current_target(), x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    assert_close(normed, reference.add_rms_norm(x, delta, weight, 1e-5)[1])
    same, without = elementwise.add_rms_norm(
        current_target(), total, None, weight, 1e-5
    )  # fused is the composition of its parts
    assert same is total
    assert torch.equal(without, normed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [72, 1500])
def test_gated(dtype, size, device):
    torch.manual_seed(0)
    x = (torch.randn(3, 2 * size) * 5).to(dtype).to(device)
    assert_close(elementwise.gated(current_target(), x, GatedActivation.SILU), reference.gated(x, GatedActivation.SILU))
