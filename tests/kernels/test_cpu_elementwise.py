"""The compiled row-wise operations: every build that runs here against the reference, and its bits.

Rounding to the dtype may fall to the other side where the float32 value before it differs in its
last bits: one unit in the last place for gated activations and for RMSNorm with a float32 weight,
two for RMSNorm with a weight in the dtype, which rounds twice. The residual sum has the reference's
bits.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from freight.kernels import reference
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.reference_set import REFERENCE
from freight.operands.activation import Activation, GatedActivation, clamped_silu

SILU, GELU, CLAMPED = (
    GatedActivation.SILU,
    GatedActivation.GELU_TANH,
    GatedActivation.CLAMPED_SWIGLU,
)

BUILDS = library.runnable()
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SIZES = [1, 16, 31, 64, 300, 2048, 5000]


def agrees(out: Tensor, expected: Tensor, units: int) -> bool:
    """Within `units` in the last place of the dtype; float32: within 1e-5. What is below 1e-36
    counts as zero.
    """
    assert out.dtype == expected.dtype
    assert out.shape == expected.shape
    relative = 1e-5 if out.dtype == torch.float32 else units * torch.finfo(out.dtype).eps
    smallest = torch.finfo(out.dtype).smallest_normal * relative
    return torch.allclose(
        out.float(), expected.float(), rtol=relative, atol=max(smallest, 1e-36), equal_nan=True
    )


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
    expected = [False, False, False, True, False]
    assert add_rms_norm(x, delta, weight, 1e-5)[1].isnan().any(1).tolist() == expected


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


def exact_gelu(x: Tensor) -> Tensor:
    """gelu_tanh(gate) * up in float64; 1 + tanh(z / 2) is 2 / (1 + e^-z), which cancels nothing for
    z far below 0.
    """
    gate, up = x.double().chunk(2, dim=-1)
    z = 2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return gate / (1 + torch.exp(-z)) * up


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("build", BUILDS)
def test_gelu(build, size, dtype):
    torch.manual_seed(size)
    x = (torch.randn(7, 2 * size) * 2).clamp(-6, 9).to(dtype)
    out = CpuKernels(library.load(build)).gated(x, GELU)
    assert agrees(out, exact_gelu(x).to(dtype), 1)
    # the reference subtracts nearly equal numbers where the gate is far below 0
    assert torch.allclose(
        out.float(), reference.gated(x, GELU).float(), rtol=torch.finfo(dtype).eps, atol=2e-5
    )
    x[0, 0], x[1, 0], x[2, 0], x[3, 0], x[4, 0], x[5, 0] = (
        torch.inf,
        -torch.inf,
        torch.nan,
        -1e4,
        0.0,
        1e4,
    )
    x[:, size] = 2
    first = CpuKernels(library.load(build)).gated(x, GELU)[:, 0]
    assert (
        first[:3].isnan().tolist()
        == reference.gated(x, GELU)[:3, 0].isnan().tolist()
        == [False, True, True]
    )
    assert [first[0], *first[3:6].tolist()] == [torch.inf, 0, 0, 2 * x[5, 0]]


def exact_erf_gelu(x: Tensor) -> Tensor:
    """x / 2 * (1 + erf(x / sqrt(2))) in float64, by erfc, which cancels nothing for x far below 0."""
    wide = x.double()
    return wide / 2 * torch.special.erfc(-wide / math.sqrt(2))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("build", BUILDS)
def test_gelu_by_the_error_function(build, size, dtype):
    """With a gate and without one."""
    torch.manual_seed(size)
    kernels = CpuKernels(library.load(build))
    x = (torch.randn(7, 2 * size) * 2).clamp(-8, 9).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    alone = gate.to(dtype).contiguous()
    assert agrees(kernels.gated(x, GatedActivation.GEGLU), (exact_erf_gelu(gate) * up).to(dtype), 1)
    assert agrees(kernels.activated(alone, Activation.GELU), exact_erf_gelu(gate).to(dtype), 1)
    for out, expected in (
        (kernels.gated(x, GatedActivation.GEGLU), reference.gated(x, GatedActivation.GEGLU)),
        (kernels.activated(alone, Activation.GELU), REFERENCE.activated(alone, Activation.GELU)),
    ):
        assert agrees(out, expected, 1)
    ends = torch.tensor([torch.inf, -torch.inf, torch.nan, -1e4, 0.0, 1e4]).to(dtype)
    got = kernels.activated(ends[:, None].contiguous(), Activation.GELU)[:, 0]
    assert got.isnan().tolist() == [False, True, True, False, False, False]
    assert torch.equal(got[[0, 3, 4, 5]], torch.tensor([torch.inf, 0.0, 0.0, 1e4]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("build", BUILDS)
def test_gelu_of_every_value(build, dtype):
    """Against the exact function; what is below 1e-30 may be 0."""
    gate = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)[:, None]
    gate = gate[gate.isfinite()][:, None]
    x = torch.cat([gate, torch.ones_like(gate)], 1)
    out, want = CpuKernels(library.load(build)).gated(x, GELU).double(), exact_gelu(x)
    numbers = torch.finfo(dtype)
    unit = want.abs().clamp(min=numbers.smallest_normal) * numbers.eps
    want[gate == 0] = 0
    wrong = (out - want).abs() > 0.51 * unit + 1e-30
    assert not wrong[want.isfinite()].any()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("build", BUILDS)
def test_clamped_swiglu(build, size, dtype):
    """Gates beyond 7 count as 7, those far below 0 as they are; ups beyond 7 or below -7 count as
    these.
    """
    torch.manual_seed(size)
    x = (torch.randn(7, 2 * size) * 6).to(dtype)
    x[0, 0], x[1, 0], x[2, 0], x[3, 0], x[4, 0], x[5, 0] = (
        torch.inf,
        -torch.inf,
        torch.nan,
        -80.0,
        0.0,
        9.0,
    )
    x[:, size] = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, torch.inf, torch.nan])
    gate, up = x.double().chunk(2, -1)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    want = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    for kernels in (CpuKernels(library.load(build)), REFERENCE):
        out = kernels.gated(x, CLAMPED)
        assert agrees(out, want.to(dtype), 1)
        assert out[:, 0].isnan().tolist() == [False, True, True, False, False, False, True]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("limit", [0.25, 7.0, 1e30])
@pytest.mark.parametrize("build", BUILDS)
def test_clamped_silu(build, limit, size, dtype):
    """What SiLU makes of a gate is at most the limit, ups lie within it on both sides; a limit
    beyond all is SiLU.
    """
    torch.manual_seed(size)
    x = (torch.randn(7, 2 * size) * 8).to(dtype)
    x[0, 0], x[1, 0], x[2, 0], x[3, 0], x[4, 0], x[5, 0] = (
        torch.inf,
        -torch.inf,
        torch.nan,
        -80.0,
        0.0,
        9.0,
    )
    x[:, size] = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, -torch.inf, torch.nan])
    gate, up = x.double().chunk(2, -1)
    want = (gate * torch.sigmoid(gate)).clamp(max=limit) * up.clamp(-limit, limit)
    for kernels in (CpuKernels(library.load(build)), REFERENCE):
        out = kernels.gated(x, clamped_silu(limit))
        assert agrees(out, want.to(dtype), 1)
        assert out[:, 0].isnan().tolist() == [False, True, True, False, False, False, True]
        if limit == 1e30:
            assert torch.equal(out[:, 1:], kernels.gated(x, SILU)[:, 1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [31, 300, 2048])
@pytest.mark.parametrize("build", BUILDS)
def test_a_float32_weight_multiplies_before_the_one_rounding(build, size, dtype):
    torch.manual_seed(size)
    (x, delta), weight = torch.randn(2, 5, size).to(dtype), torch.randn(size)
    total, normed = CpuKernels(library.load(build)).add_rms_norm(x, delta, weight, 1e-5)
    values = (x + delta).double()
    exact = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-5) * weight
    assert torch.equal(total, x + delta)
    assert agrees(normed, exact.to(dtype), 1)
    assert (
        normed != exact.to(dtype)
    ).float().mean() < 0.01  # a rounding before the product changes every fourth
    assert agrees(normed, reference.add_rms_norm(x, delta, weight, 1e-5)[1], 1)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("size", [1, 31, 2048])
@pytest.mark.parametrize("wide", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("build", BUILDS)
def test_the_norm_of_delta_is_added(build, wide, size, dtype):
    """In one call, with the bits of a norm, then the sum."""
    torch.manual_seed(size)
    x, delta = torch.randn(2, 5, size).to(dtype)
    weight, of_delta = (
        torch.randn(size).to(torch.float32 if is_wide else dtype) for is_wide in wide
    )
    add_rms_norm = CpuKernels(library.load(build)).add_rms_norm
    total, normed = add_rms_norm(x, delta, weight, 1e-5, delta_weight=of_delta)
    first = add_rms_norm(delta, None, of_delta, 1e-5)[1]
    expected = add_rms_norm(x, first, weight, 1e-5)
    assert torch.equal(total, x + first)
    assert torch.equal(total, expected[0])
    assert torch.equal(normed, expected[1])
    assert agrees(first, reference.rms_norm(delta, of_delta, 1e-5), 2)
    same, without = add_rms_norm(x, None, weight, 1e-5, delta_weight=of_delta)
    assert same is x
    assert torch.equal(without, add_rms_norm(x, None, weight, 1e-5)[1])


@pytest.mark.parametrize("build", BUILDS)
def test_rows_do_not_see_each_other_nor_the_threads(build):
    torch.manual_seed(0)
    loaded = library.load(build)
    kernels = CpuKernels(loaded)
    (x, delta), weight = torch.randn(2, 40, 4096).bfloat16(), torch.randn(4096).bfloat16()
    wide = torch.randn(4096)

    def every(rows: slice) -> list[Tensor]:
        norms = [
            *kernels.add_rms_norm(x[rows], delta[rows], weight, 1e-5),
            *kernels.add_rms_norm(x[rows], delta[rows], wide, 1e-5, delta_weight=wide),
        ]
        return norms + [
            kernels.gated(x[rows], activation)
            for activation in (SILU, GELU, CLAMPED, clamped_silu(0.5))
        ]

    torch.set_num_threads(1)
    whole = every(slice(0, 40))
    for count in (1, 3):
        torch.set_num_threads(count)
        for rows in (slice(0, 1), slice(3, 4), slice(5, 40), slice(0, 40)):
            for out, expected in zip(every(rows), whole, strict=True):
                assert torch.equal(out, expected[rows])
