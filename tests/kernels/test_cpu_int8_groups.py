"""Products of weights in 4 bits with inputs rounded to INT8 in groups: the same bits in every build,
in the reference, in numpy, and in a file.

The definition is checked here by numpy alone: integers, then float32 operations one at a time.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels.group_cases import CASES, DIGESTS, GroupCase, digest, experts_digests
from tests.kernels.test_cpu_four_bit import KINDS, Kind, random_scales, random_weight, values_of
from torch import Tensor

from freight.kernels import reference
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.reference_set import REFERENCE
from freight.operands.weight import Activations, Codes, Groups, Weight

BUILDS = library.runnable()
NAN = torch.nan
ALL = (*KINDS, Kind(Codes.INT8, 32, torch.float16), Kind(Codes.INT8, 128, torch.bfloat16))


def by_numpy(x: Tensor, weight: Weight, bias: Tensor) -> np.ndarray:
    """The product in float32, one rounding at a time. The weight's integers come from its values."""
    values = x.float().numpy()
    size = weight.group_size
    width = max(size, 32)
    scales = (
        weight.groups.scales.float().numpy()
        if weight.groups is not None
        else (2.0 ** (weight.scale.view(torch.uint8).double() - 127)).float().numpy()
    )
    four_bits = weight.groups is not None and weight.groups.codes is not Codes.INT8
    plain = replace(
        weight, activations=Activations.PLAIN, scale=weight.scale if weight.is_mxfp4 else None
    )
    exact = values_of(plain) if four_bits else plain.dequantized().double().numpy()
    wide = np.repeat(scales, size, 1).astype(np.float64)
    integers = np.divide(exact, wide, out=np.zeros_like(exact), where=wide != 0)
    if weight.groups is None or size == 16:
        integers, scales = integers * 2, scales / np.float32(2)
    assert (integers == np.rint(integers)).all()
    out = np.zeros((len(values), len(exact)), np.float32)
    for row, line in enumerate(values):
        for first in range(0, line.size, size):
            group = line[first // width * width : first // width * width + width]
            finite = np.abs(group[np.isfinite(group)])
            scale = np.float32(max(np.float32(finite.max(initial=0)) / np.float32(127), 2.0**-126))
            with np.errstate(invalid="ignore"):
                codes = np.clip(np.rint(line[first : first + size] / scale), -128, 127)
            if np.isnan(group).any():
                codes, scale = np.zeros(size), np.float32(np.nan)
            sums = (integers[:, first : first + size] @ codes).astype(np.float32)
            with np.errstate(over="ignore"):
                out[row] = out[row] + sums * (scales[:, first // size] * scale)
    if weight.scale is not None and not weight.is_mxfp4:
        out = out * weight.scale.numpy()
    return out + bias.float().numpy()


def wide_rows(rows: int, inputs: int) -> Tensor:
    """Rows whose groups have very different magnitudes."""
    spread = torch.exp2(torch.randint(-8, 8, (rows, inputs)).float())
    return (torch.randn(rows, inputs) * spread).bfloat16()


def any_weight(kind: Kind, outputs: int, inputs: int) -> Weight:
    """Of 4 bits, or INT8 with -128 among the codes."""
    if kind.codes is not Codes.INT8:
        return replace(random_weight(kind, outputs, inputs), activations=Activations.GROUPS)
    data = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    data[0, :3] = -128
    scales = random_scales(kind, (outputs, inputs // kind.size))
    return Weight(data, None, Activations.GROUPS, groups=Groups(kind.codes, kind.size, scales))


@pytest.mark.parametrize("kind", ALL, ids=repr)
@pytest.mark.parametrize("rows", [1, 5])
def test_the_definition_is_numpys(kind, rows):
    torch.manual_seed(rows)
    weight = any_weight(kind, 21, 3 * max(kind.size, 32))
    weight = replace(weight, scale=torch.rand(21) + 0.5)
    x = wide_rows(rows, weight.shape[1])
    x[0, 3], x[0, 40], x[rows - 1, 70] = torch.inf, -torch.inf, 0
    bias = torch.randn(21)
    expected = torch.from_numpy(by_numpy(x, weight, bias))
    assert torch.equal(reference.linear(x, weight, bias, float32=True), expected)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("kind", ALL, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_build_has_the_bits_of_the_reference(build, kind, dtype):
    torch.manual_seed(kind.size)
    kernels = CpuKernels(library.load(build))
    for outputs, groups in ((1, 1), (33, 3), (100, 10)):
        weight = any_weight(kind, outputs, groups * max(kind.size, 32))
        weight = replace(weight, scale=torch.rand(outputs) + 0.5)
        packed = kernels.pack(weight)
        for rows in (1, 2, 3, 5, 7, 13, 33):
            x, bias = wide_rows(rows, weight.shape[1]).to(dtype), torch.randn(outputs).to(dtype)
            expected = reference.linear(x, weight, bias)
            assert torch.equal(kernels.linear(x, packed, bias), expected)
            wide = reference.linear(x, weight, bias, float32=True)
            assert torch.equal(kernels.linear(x, packed, bias, float32=True), wide)


@pytest.mark.parametrize("build", [*BUILDS, "reference"])
def test_a_nan_makes_its_row_nan_and_no_other(build):
    kernels = REFERENCE if build == "reference" else CpuKernels(library.load(build))
    weight = replace(random_weight(KINDS[0], 40, 96), activations=Activations.GROUPS)
    x = torch.randn(9, 96)
    x[4, 50] = NAN
    out = kernels.linear(x, kernels.pack(weight))
    assert out[4].isnan().all()
    assert out[torch.arange(9) != 4].isfinite().all()


@pytest.mark.parametrize("build", BUILDS)
def test_rows_in_many_parts_have_the_bits_of_few(build):
    """More rows than are staged at once, and columns staged by several threads."""
    torch.manual_seed(0)
    kernels = CpuKernels(library.load(build))
    weight = replace(random_weight(KINDS[2], 70, 2176), activations=Activations.GROUPS)
    packed = kernels.pack(weight)
    x = wide_rows(530, 2176)
    whole = kernels.linear(x, packed)
    for first, count in ((0, 1), (3, 4), (515, 15), (529, 1)):
        assert torch.equal(
            kernels.linear(x[first : first + count], packed), whole[first : first + count]
        )


@pytest.mark.parametrize("build", BUILDS)
def test_inputs_in_another_order(build):
    torch.manual_seed(1)
    kernels = CpuKernels(library.load(build))
    weight = replace(random_weight(KINDS[1], 50, 1280), activations=Activations.GROUPS)
    weight = replace(weight, order=torch.randperm(1280))
    x = wide_rows(3, 1280)
    assert torch.equal(kernels.linear(x, kernels.pack(weight)), reference.linear(x, weight))


RECORDED = json.loads(DIGESTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("build", [*BUILDS, "reference"])
def test_bits_are_those_of_the_file(build, case: GroupCase):
    kernels = REFERENCE if build == "reference" else CpuKernels(library.load(build))
    assert digest(kernels, case) == RECORDED[str(case)]


@pytest.mark.parametrize("build", [*BUILDS, "reference"])
def test_bits_of_experts_are_those_of_the_file(build):
    kernels = REFERENCE if build == "reference" else CpuKernels(library.load(build))
    for name, value in experts_digests(kernels).items():
        assert value == RECORDED[name]
