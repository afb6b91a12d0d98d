"""Row-wise operations in Triton against the reference."""

from __future__ import annotations

import pytest
import torch

from freight.kernels import reference
from freight.kernels.triton import elementwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to one rounding of the result, and exp and rsqrt in float32."""
    assert got.dtype == expected.dtype
    bound = torch.finfo(got.dtype).eps * expected.float().abs() * 2 + 1e-6
    assert ((got.float() - expected.float()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype, device):
    torch.manual_seed(0)
    x, weight = (torch.randn(5, 200) * 4).to(dtype).to(device), torch.rand(200).to(dtype).to(device)
    assert_close(elementwise.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_of_heads(device):
    torch.manual_seed(0)
    _, heads = torch.randn(3, 5, 16).bfloat16().to(device).split((2, 3), dim=1)
    weight = torch.rand(16).bfloat16().to(device)
    assert_close(elementwise.rms_norm(heads, weight, 1e-5), reference.rms_norm(heads, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [72, 1500])
def test_silu_mul(dtype, size, device):
    torch.manual_seed(0)
    x = (torch.randn(3, 2 * size) * 5).to(dtype).to(device)
    assert_close(elementwise.silu_mul(x), reference.silu_mul(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(3, 40), (40, 128)])
def test_rotate(dtype, heads, dim, device):
    torch.manual_seed(0)
    x = torch.randn(4, heads + 2, dim).to(dtype).to(device)[:, 1:-1]
    angles = torch.rand(4, dim // 2) * 6
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    assert_close(elementwise.rotate(x, cos, sin), reference.rotate(x, cos, sin))
