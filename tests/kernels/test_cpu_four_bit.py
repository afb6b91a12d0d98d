"""Products with weights in 4 bits with scales of groups: INT4 and NVFP4.

Values are checked against numpy and ml_dtypes. Products have the bits of the same products with
those values in bfloat16 for rows in bfloat16, else in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.refusals import refuses
from torch import Tensor

from freight.errors import KernelError
from freight.kernels import reference
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.cpu.recording import Arena, record
from freight.kernels.interface import KernelSet
from freight.kernels.reference_set import REFERENCE
from freight.operands.activation import GatedActivation
from freight.operands.experts import ExpertLayers
from freight.operands.weight import Codes, Groups, Weight

BUILDS = library.runnable()
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
HALF, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
# Heights of tiles; where other products of tiles begin; more than two tiles of rows
ROWS = (1, 2, 5, 13, 24, 25, 33, 40)


@dataclass(frozen=True)
class Kind:
    codes: Codes
    size: int
    dtype: torch.dtype
    zeros: bool = False

    def __repr__(self) -> str:
        return f"{self.codes}-{self.size}-{str(self.dtype)[6:]}{'-zeros' if self.zeros else ''}"


KINDS = [
    Kind(Codes.INT4, 32, HALF),
    Kind(Codes.INT4, 64, BF16, zeros=True),
    Kind(Codes.INT4, 128, HALF, zeros=True),
    Kind(Codes.INT4, 128, BF16),
    Kind(Codes.E2M1, 16, E4M3),
]
# Rows that fill no block, one, more than a band; several panels of tiles; numbers of groups
OUTPUTS, GROUPS = (1, 15, 33, 100), (1, 3, 10)


def random_scales(kind: Kind, shape: tuple[int, int]) -> Tensor:
    """Some are 0, and some negative."""
    scales = torch.rand(shape) * 0.05 * torch.where(torch.rand(shape) < 0.1, -1.0, 1.0)
    scales[torch.rand(shape) < 0.05] = 0
    return (scales * 100 if kind.dtype is E4M3 else scales).to(kind.dtype)


def random_weight(kind: Kind, outputs: int, inputs: int) -> Weight:
    shape = outputs, inputs // kind.size
    zeros = torch.randint(0, 16, shape, dtype=torch.uint8) if kind.zeros else None
    groups = Groups(kind.codes, kind.size, random_scales(kind, shape), zeros)
    data = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    return Weight(data, groups=groups)


def values_of(weight: Weight) -> np.ndarray:
    """The values in float64, by numpy alone: [out_features, in_features]."""
    groups = weight.groups
    assert groups is not None
    data = weight.data.numpy()
    codes = np.stack([data & 15, data >> 4], -1).reshape(len(data), -1)
    if groups.scales.dtype is BF16:
        scales = groups.scales.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    elif groups.scales.dtype is E4M3:
        scales = groups.scales.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    else:
        scales = groups.scales.numpy()
    scale = np.repeat(scales.astype(np.float64), groups.size, 1)
    if groups.codes is Codes.E2M1:
        return codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * scale
    zero = (
        8 if groups.zeros is None else np.repeat(groups.zeros.numpy().astype(int), groups.size, 1)
    )
    return (codes.astype(int) - zero) * scale


def seen_by(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The values that enter a product with rows in `dtype`, in that dtype or in float32."""
    values = values_of(weight)
    if dtype is BF16:
        rounded = values.astype(np.float32).astype(ml_dtypes.bfloat16)
        return torch.from_numpy(rounded.view(np.int16)).view(BF16)
    return torch.from_numpy(values.astype(np.float32))


def plain(weight: Weight, dtype: torch.dtype) -> Weight:
    return Weight(seen_by(weight, dtype), weight.scale)


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal values, NaN included."""
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


def shapes(kind: Kind) -> Iterator[tuple[int, int]]:
    for outputs in OUTPUTS:
        for groups in GROUPS:
            yield outputs, groups * kind.size


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("build", BUILDS)
def test_products_have_the_bits_of_those_with_the_same_values(
    build: str, kind: Kind, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    kernels = CpuKernels(library.load(build))
    for count, (outputs, inputs) in enumerate(shapes(kind)):
        weight = random_weight(kind, outputs, inputs)
        if count % 2:
            weight = replace(weight, scale=torch.rand(outputs) + 0.5)
        bias = torch.randn(outputs).to(dtype) if count % 3 else None
        packed, same_values = kernels.pack(weight), kernels.pack(plain(weight, dtype))
        for rows in ROWS:
            torch.set_num_threads(rows % 2 + 1)
            x = torch.randn(rows, inputs).to(dtype)
            if count == 1:
                x.view(-1)[:: max(1, x.numel() // 5)] = torch.inf
                x[-1, 0] = torch.nan
            found = kernels.linear(x, packed, bias)
            assert same(found, kernels.linear(x, same_values, bias)), (outputs, inputs, rows)
            whole = kernels.linear(x, packed, bias, float32=True)
            assert same(whole, kernels.linear(x, same_values, bias, float32=True))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("build", BUILDS)
def test_a_task_of_several_bands_has_the_same_bits(build: str, kind: Kind) -> None:
    """Many rows, and on tiles two bands in each task of one thread and a last one of one band; the
    last panel is shorter than the others.
    """
    torch.manual_seed(8)
    torch.set_num_threads(1)
    kernels = CpuKernels(library.load(build))
    outputs, inputs = 32 * 6 + 20, 5 * 128
    weight = random_weight(kind, outputs, inputs)
    packed, same_values = kernels.pack(weight), kernels.pack(plain(weight, BF16))
    for rows in (64, 97):
        x = torch.randn(rows, inputs).to(BF16)
        assert same(kernels.linear(x, packed), kernels.linear(x, same_values))
        assert torch.equal(kernels.linear(x, packed)[9:10], kernels.linear(x[9:10], packed))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("build", [*BUILDS, "reference"])
def test_products_are_those_of_float64(build: str, kind: Kind, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    inputs = 5 * kind.size
    weight = replace(random_weight(kind, 33, inputs), scale=torch.rand(33) + 0.5)
    weight = replace(weight, order=torch.randperm(inputs))
    x = torch.randn(7, inputs).to(dtype)
    kernels: KernelSet = REFERENCE if build == "reference" else CpuKernels(library.load(build))
    packed = kernels.pack(weight)
    found = kernels.linear(x, packed)
    gathered, values = x.double()[:, weight.order], seen_by(weight, dtype).double()
    expected = gathered @ values.T * weight.scale.double()
    size = gathered.abs() @ values.abs().T * weight.scale.double()
    error = (found.double() - expected).abs()
    assert (error <= expected.abs() * torch.finfo(dtype).eps / 2 + size * 2e-6).all()
    whole = kernels.linear(x, packed, float32=True)
    assert whole.dtype == torch.float32
    assert ((whole.double() - expected).abs() <= size * 2e-6).all()


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_every_code_has_its_value_under_every_zero_point_and_scale(
    build: str, dtype: torch.dtype
) -> None:
    """An input of 1 among zeros reads a column of the matrix. Rows are scales, columns codes."""
    kernels = CpuKernels(library.load(build))
    bits = torch.arange(0, 2**16, 97, dtype=torch.int32).to(torch.int16)
    scales = bits.view(dtype)
    magnitude = scales.float().abs()
    extremes = [0.0, -0.0, 2.0**-24, 65504.0] if dtype is HALF else [2.0**-126, -(2.0**100)]
    scales = scales[(magnitude >= 2.0**-126) & (magnitude <= 2.0**100)]
    scales = torch.cat((torch.tensor(extremes).to(dtype), scales))
    codes = torch.arange(8).repeat(2) * 0x22 + 0x10  # 0 1 2 .. 15
    data = codes.to(torch.uint8).expand(len(scales), 16).contiguous()
    zeros = (torch.arange(len(scales)) % 16).to(torch.uint8)
    for given in (None, zeros[:, None]):
        groups = Groups(Codes.INT4, 32, scales[:, None], given)
        weight = Weight(data, groups=groups)
        packed = kernels.pack(weight)
        for rows in (1, 16):
            for row_dtype in (torch.float32, BF16):
                columns = torch.eye(32, dtype=row_dtype)[:16].split(rows)
                found = torch.cat([kernels.linear(one, packed) for one in columns])
                assert torch.equal(found, seen_by(weight, row_dtype).to(row_dtype)[:, :16].T)


@pytest.mark.parametrize("build", BUILDS)
def test_every_number_of_nvfp4_has_its_value(build: str) -> None:
    kernels = CpuKernels(library.load(build))
    scales = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    scales = scales[(scales & 0x7F) != 0x7F].view(E4M3)[:, None]
    codes = (torch.arange(8) * 0x22 + 0x10).to(torch.uint8)
    weight = Weight(
        codes.expand(len(scales), 8).contiguous(), groups=Groups(Codes.E2M1, 16, scales)
    )
    packed = kernels.pack(weight)
    for dtype in (torch.float32, BF16):
        found = kernels.linear(torch.eye(16, dtype=dtype), packed)
        assert torch.equal(found, seen_by(weight, dtype).to(dtype).T)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("build", BUILDS)
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_threads(
    build: str, kind: Kind
) -> None:
    torch.manual_seed(2)
    kernels = CpuKernels(library.load(build))
    packed = kernels.pack(random_weight(kind, 70, 6 * kind.size))
    for dtype in (torch.float32, BF16):
        x = torch.randn(70, 6 * kind.size).to(dtype)
        whole = kernels.linear(x, packed)
        for threads, rows in ((1, 1), (2, 4), (2, 17), (1, 30)):
            torch.set_num_threads(threads)
            found = torch.cat([kernels.linear(part, packed) for part in x.split(rows)])
            assert torch.equal(found, whole)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("build", BUILDS)
def test_an_order_gathers_the_inputs(build: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    kernels = CpuKernels(library.load(build))
    weight = random_weight(KINDS[2], 40, 1280)
    order = torch.randperm(1280)
    packed, ordered = kernels.pack(weight), kernels.pack(replace(weight, order=order))
    for rows in (1, 20, 40):
        x = torch.randn(rows, 1280).to(dtype)
        assert torch.equal(kernels.linear(x, ordered), kernels.linear(x[:, order], packed))


@pytest.mark.parametrize("build", BUILDS)
def test_a_recording_gathers_them_too(build: str) -> None:
    torch.manual_seed(3)
    kernels = CpuKernels(library.load(build))
    weight, order = random_weight(KINDS[2], 40, 256), torch.randperm(256)
    packed, ordered = kernels.pack(weight), kernels.pack(replace(weight, order=order))
    x = torch.randn(2, 256).bfloat16()
    recorded = record(
        kernels.library, Arena(2), lambda recorder: CpuKernels(recorder).linear(x, ordered)
    )
    assert recorded.recording is not None, recorded.obstacle
    x.mul_(2)
    assert torch.equal(recorded.recording.replay(), kernels.linear(x[:, order], packed))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("build", BUILDS)
def test_experts_have_the_bits_of_those_with_the_same_values(
    build: str, kind: Kind, dtype: torch.dtype
) -> None:
    torch.manual_seed(4)
    kernels = CpuKernels(library.load(build))
    shares_of, hidden, inner = 0.5, 128, 256
    sides = [
        [random_weight(kind, *shape) for _ in range(4)]
        for shape in ((2 * inner, hidden), (hidden, inner))
    ]
    wide = [[plain(one, dtype) for one in side] for side in sides]
    for rows in (1, 3, 40):
        x = torch.randn(rows, hidden).to(dtype) / 8
        ids = torch.rand(rows, 4).argsort(-1)[:, :2].sort(-1).values.to(torch.int32)
        shares = torch.full(ids.shape, shares_of)
        found, expected = (
            kernels.experts(
                x,
                ids,
                shares,
                ExpertLayers(*map(kernels.pack_experts, every), GatedActivation.SILU),
            )
            for every in (sides, wide)
        )
        assert found.any()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("build", BUILDS)
def test_rows_of_experts_are_gathered_by_the_order_of_their_own(
    build: str, dtype: torch.dtype
) -> None:
    """Each row of x goes to one expert; more rows than a tile of each kind, and tokens in turn."""
    torch.manual_seed(7)
    kernels, kind = CpuKernels(library.load(build)), KINDS[2]
    weights = [
        replace(random_weight(kind, outputs, inputs), order=torch.randperm(inputs))
        for outputs, inputs in ((256, 1280), (256, 1280), (1280, 128), (1280, 128))
    ]
    gate_up, down = kernels.pack_experts(weights[:2]), kernels.pack_experts(weights[2:])
    for rows in (3, 80):
        ids = (torch.arange(rows, dtype=torch.int32) % 2)[:, None]
        x = torch.randn(rows, 1280).to(dtype) / 32
        found = kernels.experts(
            x, ids, torch.ones(rows, 1), ExpertLayers(gate_up, down, GatedActivation.SILU)
        )
        for expert in range(2):
            first = kernels.linear(x[expert::2], kernels.pack(weights[expert]))
            between = kernels.gated(first, GatedActivation.SILU)
            last = kernels.linear(between, kernels.pack(weights[2 + expert]))
            assert last.any()
            assert torch.equal(found[expert::2], last)


@pytest.mark.parametrize("build", BUILDS)
def test_experts_may_take_their_inputs_in_different_orders(build: str) -> None:
    torch.manual_seed(5)
    kernels, kind = CpuKernels(library.load(build)), KINDS[0]
    weights = [
        replace(random_weight(kind, outputs, inputs), order=torch.randperm(inputs))
        for outputs, inputs in ((128, 64), (128, 64), (64, 64), (64, 64))
    ]
    gate_up, down = kernels.pack_experts(weights[:2]), kernels.pack_experts(weights[2:])
    ids, shares = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([[0.25, 0.5]])
    x = torch.randn(1, 64).bfloat16()
    found = kernels.experts(x, ids, shares, ExpertLayers(gate_up, down, GatedActivation.SILU))
    expected = torch.zeros(1, 64)
    for expert in range(2):
        first = kernels.linear(x, kernels.pack(weights[expert]))
        between = kernels.gated(first, GatedActivation.SILU)
        last = kernels.linear(between, kernels.pack(weights[2 + expert]))
        expected += shares[0, expert] * last.float()
    assert torch.equal(found, expected.bfloat16())


@pytest.mark.parametrize("build", BUILDS)
def test_bits_of_a_weight(build: str) -> None:
    kernels = CpuKernels(library.load(build))
    for kind, bits in zip(KINDS, (4.5, 4.375, 4.1875, 4.125, 4.5), strict=True):
        packed = kernels.pack(random_weight(kind, 64, 256))
        assert packed.data.nbytes * 8 == 64 * 256 * bits, kind
        assert (packed.out_features, packed.in_features) == (64, 256)


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [
        (2.0**-127, BF16),
        (-(2.0**101), BF16),
        (torch.inf, HALF),
        (torch.nan, HALF),
        (torch.nan, E4M3),
    ],
)
def test_scales_that_leave_the_range_of_bfloat16_are_refused(
    scale: float, dtype: torch.dtype
) -> None:
    kernels = CpuKernels(library.load(BUILDS[-1]))
    kind = Kind(Codes.E2M1, 16, dtype) if dtype is E4M3 else Kind(Codes.INT4, 32, dtype)
    weight = random_weight(kind, 2, 64)
    assert weight.groups is not None
    scales = weight.groups.scales.float()
    scales[1, 1] = scale
    given = replace(weight, groups=replace(weight.groups, scales=scales.to(dtype)))
    with refuses(KernelError, "4-bit", "bfloat16"):
        kernels.pack(given)


@pytest.mark.parametrize(
    "kind",
    [Kind(Codes.INT4, 16, HALF), Kind(Codes.INT4, 32, E4M3), Kind(Codes.E2M1, 32, E4M3)],
    ids=str,
)
def test_other_groups_are_refused_by_name(kind: Kind) -> None:
    kernels = CpuKernels(library.load(BUILDS[-1]))
    weight = random_weight(kind, 2, 64)
    match = f"not with {kind.codes} in groups of {kind.size} with scales in {kind.dtype}"
    with pytest.raises(KernelError, match=match):
        kernels.pack(weight)
    with pytest.raises(KernelError, match=match):
        kernels.pack_experts([weight])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_row_of_the_reference_depends_on_that_row(kind: Kind, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    weight = random_weight(kind, 33, 3 * kind.size)
    x = torch.randn(40, 3 * kind.size).to(dtype)
    for given in (weight, replace(weight, scale=torch.rand(33))):
        whole = reference.linear(x, given)
        assert torch.equal(torch.cat([reference.linear(row, given) for row in x.split(1)]), whole)
    if dtype is not torch.float16:
        expected = reference.linear(x, Weight(seen_by(weight, dtype)))
        assert torch.equal(reference.linear(x, weight), expected)
