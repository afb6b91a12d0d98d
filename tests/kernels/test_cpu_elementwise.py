"""The compiled row-wise operations: every build that runs here against the reference, and its bits.

Rounding to the dtype may fall to the other side where the float32 value before it differs in its last bits: one unit
in the last place for SiLU times up, two for RMSNorm, which rounds twice. The residual sum has the reference's bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from freight.kernels import reference
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.operands.activation import GatedActivation

SILU = GatedActivation.SILU

BUILDS = library.runnable()
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SIZES = [1, 16, 31, 64, 300, 2048, 5000]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def agrees(out: Tensor, expected: Tensor, units: int) -> bool:
    """Within `units` in the last place of the dtype; float32: within 1e-5. What is below 1e-36 counts as zero."""
    assert out.dtype == expected.dtype
    assert out.shape == expected.shape
    relative = 1e-5 if out.dtype == torch.float32 else units * torch.finfo(out.dtype).eps
    smallest = torch.finfo(out.dtype).smallest_normal * relative
    return torch.allclose(out.float(), expected.float(), rtol=relative, atol=max(smallest, 1e-36), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("build", BUILDS)
def test_add_rms_norm(build, size, dtype):
    torch.manual_seed(size)
    (x, delta), weight = torch.randn(2, 5, size).to(dtype), torch.randn(size).to(dtype)
    x[1] = delta[1] = 0
    x[2] *= 100
    add_rms_norm = CpuKernels(library.load(build)).add_rms_norm
    total, normed = add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    assert agrees(normed, reference.add_rms_norm(x, delta, weight, 1e-5)[1], 2)
    same, without = add_rms_norm(total, None, weight, 1e-5)  # fused is the composition of its parts
    assert same is total
    assert torch.equal(without, normed)
    delta[3, 0] = torch.nan
    assert add_rms_norm(x, delta, weight, 1e-5)[1].isnan().any(1).tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("build", BUILDS)
def test_gated(build, size, dtype):
    torch.manual_seed(size)
    x = (torch.randn(5, 2 * size) * 4).to(dtype)
    x[0, 0], x[1, 0], x[2, 0], x[3, 0], x[4, 0] = torch.inf, -torch.inf, torch.nan, -80.0, 0.0
    assert agrees(CpuKernels(library.load(build)).gated(x, SILU), reference.gated(x, SILU), 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("build", BUILDS)
def test_silu_of_every_value(build, dtype):
    gate = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)[:, None]
    x = torch.cat([gate, torch.ones_like(gate)], 1)
    assert agrees(CpuKernels(library.load(build)).gated(x, SILU), reference.gated(x, SILU), 1)


@pytest.mark.parametrize("build", BUILDS)
def test_rows_do_not_see_each_other_nor_the_threads(build):
    torch.manual_seed(0)
    loaded = library.load(build)
    kernels = CpuKernels(loaded)
    (x, delta), weight = torch.randn(2, 40, 4096).bfloat16(), torch.randn(4096).bfloat16()

    def every(rows: slice) -> list[Tensor]:
        return [*kernels.add_rms_norm(x[rows], delta[rows], weight, 1e-5), kernels.gated(x[rows], SILU)]

    torch.set_num_threads(1)
    whole = every(slice(0, 40))
    for count in (1, 3):
        torch.set_num_threads(count)
        for rows in (slice(0, 1), slice(3, 4), slice(5, 40), slice(0, 40)):
            for out, expected in zip(every(rows), whole, strict=True):
                assert torch.equal(out, expected[rows])
