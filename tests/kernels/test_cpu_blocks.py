"""Products with matrices in blocks of GGUF files, as they are stored: the same bits in every build, in
the reference, and in numpy. Their digests are among those of `int8_groups.json`.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tests.kernels.group_cases import BLOCKS, block_weight
from torch import Tensor

from freight.errors import KernelError
from freight.fp8 import blocks
from freight.fp8.blocks import BlockFormat
from freight.kernels import reference
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.reference_set import REFERENCE
from freight.operands.weight import Activations, Weight

BUILDS = library.runnable()


def by_numpy(x: Tensor, weight: Weight) -> np.ndarray:
    """The product in float32, one rounding at a time."""
    assert weight.blocks is not None
    stored = blocks.integers(weight.data, weight.blocks)
    codes = stored.codes.numpy().astype(np.int64)
    scales = stored.scales.numpy()
    size = codes.shape[-1]
    out = np.zeros((len(x), len(codes)), np.float32)
    for row, line in enumerate(x.float().numpy()):
        for group in range(codes.shape[1]):
            first = group * size // 32 * 32
            shared = line[first : first + 32]
            scale = max(np.abs(shared).max() / np.float32(127), np.float32(2.0**-126))
            own = np.rint(line[group * size : (group + 1) * size] / scale).astype(np.int64)
            sums = (codes[:, group] @ own).astype(np.float32)
            out[row] = out[row] + sums * (scales[:, group] * scale)
            if stored.minima is not None:
                of_minima = np.float32(own.sum()) * scale
                out[row] = out[row] + of_minima * stored.minima[:, group].numpy()
    return out


def wide_rows(rows: int, inputs: int) -> Tensor:
    """Rows whose groups have very different magnitudes."""
    spread = torch.exp2(torch.randint(-8, 8, (rows, inputs)).float())
    return (torch.randn(rows, inputs) * spread).bfloat16()


@pytest.mark.parametrize("format", BLOCKS)
def test_the_definition_is_numpys(format: BlockFormat) -> None:
    torch.manual_seed(0)
    weight = block_weight(format, 21, 3 * format.inputs, random.Random(format))
    x = wide_rows(5, weight.shape[1])
    expected = torch.from_numpy(by_numpy(x, weight))
    assert torch.equal(reference.linear(x, weight, float32=True), expected)


@pytest.mark.parametrize("format", BLOCKS)
def test_the_product_is_near_that_of_the_decoded_matrix(format: BlockFormat) -> None:
    torch.manual_seed(1)
    weight = block_weight(format, 64, 1024, random.Random(format))
    x = torch.randn(8, 1024)
    exact = x.double() @ weight.dequantized().double().T
    error = (reference.linear(x, weight).double() - exact).norm() / exact.norm()
    assert error < 0.02


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_build_has_the_bits_of_the_reference(
    build: str, format: BlockFormat, dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    kernels = CpuKernels(library.load(build))
    for outputs, count in ((1, 1), (33, 3), (100, 5)):
        weight = block_weight(format, outputs, count * format.inputs, random.Random(outputs))
        packed = kernels.pack(weight)
        for rows in (1, 2, 3, 5, 7, 13, 33):
            x = wide_rows(rows, weight.shape[1]).to(dtype)
            bias = torch.randn(outputs).to(dtype)
            expected = reference.linear(x, weight, bias)
            assert torch.equal(kernels.linear(x, packed, bias), expected)
            wide = reference.linear(x, weight, bias, float32=True)
            assert torch.equal(kernels.linear(x, packed, bias, float32=True), wide)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize("code", [0x00, 0x0F, 0xF0, 0xFF])
def test_the_largest_sums_are_exact(build: str, format: BlockFormat, code: int) -> None:
    """All codes of the matrix and all of x the largest in magnitude: -128 is that of -inf."""
    kernels = CpuKernels(library.load(build))
    weight = block_weight(format, 32, 2 * format.inputs, random.Random(0))
    data = torch.full_like(weight.data, code).view(32, 2, -1)
    for at in BLOCKS[format]:
        data[..., at : at + 2] = torch.tensor([0x00, 0x3C], dtype=torch.uint8)  # 1
    if format is BlockFormat.MXFP4:
        data[..., 0] = 127
    weight = Weight(data.flatten(1), activations=Activations.GROUPS, blocks=format)
    packed = kernels.pack(weight)
    for value in (1.0, -1.0, torch.inf, -torch.inf):
        x = torch.full((17, weight.shape[1]), value)
        assert torch.equal(kernels.linear(x, packed), reference.linear(x, weight))


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("format", [format for format in BLOCKS if BLOCKS[format]])
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01])
def test_numbers_that_are_not_finite_are_refused(
    build: str, format: BlockFormat, bits: int
) -> None:
    kernels = CpuKernels(library.load(build))
    for at in BLOCKS[format]:
        weight = block_weight(format, 40, 3 * format.inputs, random.Random(0))
        data = weight.data.view(40, 3, -1)
        data[39, 2, at : at + 2] = torch.tensor([bits & 0xFF, bits >> 8], dtype=torch.uint8)
        with pytest.raises(KernelError, match="scale or minimum that is infinite, NaN"):
            kernels.pack(weight)


@pytest.mark.parametrize("build", [*BUILDS, "reference"])
def test_scales_of_mxfp4(build: str) -> None:
    """A group of zeros may have any scale; others have those from 2 on, up to 2 ** 127."""
    kernels = REFERENCE if build == "reference" else CpuKernels(library.load(build))
    weight = block_weight(BlockFormat.MXFP4, 16, 64, random.Random(0))
    data = weight.data.view(16, 2, -1)
    data[:, 0, 0] = torch.arange(240, 256, dtype=torch.uint8)
    data[:, 1, 0] = torch.arange(2, 18, dtype=torch.uint8)
    x = torch.randn(3, 64).clamp(-1, 1) * 2.0**-8
    expected = reference.linear(x, weight)
    assert expected.isfinite().all()
    assert torch.equal(kernels.linear(x, kernels.pack(weight)), expected)
    data[:, :, 1:] &= 0x88
    data[0, :, 0] = torch.tensor([0, 1], dtype=torch.uint8)
    assert torch.equal(kernels.linear(x, kernels.pack(weight)), torch.zeros(3, 16))


@pytest.mark.parametrize("build", BUILDS)
def test_a_scale_of_mxfp4_that_is_too_small_is_refused(build: str) -> None:
    weight = block_weight(BlockFormat.MXFP4, 16, 64, random.Random(0))
    weight.data[7, 0] = 1
    with pytest.raises(KernelError, match="below 2"):
        CpuKernels(library.load(build)).pack(weight)


@pytest.mark.parametrize("build", BUILDS[:1])
@pytest.mark.parametrize(
    ("format", "activations"),
    [(BlockFormat.Q4_K, Activations.PLAIN), (BlockFormat.Q2_K, Activations.GROUPS)],
)
def test_what_is_not_multiplied_as_stored_is_refused(
    build: str, format: BlockFormat, activations: Activations
) -> None:
    data = torch.zeros(4, format.bytes, dtype=torch.uint8)
    with pytest.raises(KernelError, match="decode the matrix to bfloat16"):
        CpuKernels(library.load(build)).pack(Weight(data, activations=activations, blocks=format))


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("format", BLOCKS)
def test_a_matrix_takes_little_more_than_in_the_file(build: str, format: BlockFormat) -> None:
    weight = block_weight(format, 64, 1024, random.Random(0))
    packed = CpuKernels(library.load(build)).pack(weight)
    bits = 8 * packed.data.numel() / (64 * 1024)
    assert format.bits <= bits <= format.bits + 0.125


def test_the_reference_decodes_blocks_where_inputs_are_not_rounded() -> None:
    torch.manual_seed(3)
    weight = block_weight(BlockFormat.Q4_K, 24, 512, random.Random(0))
    plain = Weight(weight.data, blocks=weight.blocks)
    x = torch.randn(3, 512).bfloat16()
    decoded = Weight(weight.dequantized().bfloat16())
    assert torch.equal(reference.linear(x, plain), reference.linear(x, decoded))


@pytest.mark.parametrize("build", BUILDS)
def test_a_nan_makes_its_row_nan_and_no_other(build: str) -> None:
    kernels = CpuKernels(library.load(build))
    weight = block_weight(BlockFormat.Q4_K, 40, 256, random.Random(0))
    x = torch.randn(9, 256)
    x[4, 50] = torch.nan
    out = kernels.linear(x, kernels.pack(weight))
    assert out[4].isnan().all()
    assert out[torch.arange(9) != 4].isfinite().all()


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("multiplier", [1.0, 11.3])
def test_rows_of_a_packed_matrix_are_those_of_the_decoded_one(
    build: str, format: BlockFormat, dtype: torch.dtype, multiplier: float
) -> None:
    weight = block_weight(format, 71, 2 * format.inputs, random.Random(format))
    kernels = CpuKernels(library.load(build), int8_activations=True)
    ids = torch.tensor([70, 0, 31, 32, 15, 16, 47, 48, 63, 64, 0])
    expected = weight.dequantized()[ids].to(dtype)
    if multiplier != 1:
        expected = expected * multiplier
    rows = kernels.packed_rows(kernels.pack(weight), ids, dtype, multiplier)
    assert torch.equal(rows, expected)
    assert torch.equal(REFERENCE.packed_rows(weight, ids, dtype, multiplier), expected)
    base = torch.randn(len(ids), weight.shape[1]).to(dtype)
    added = kernels.packed_rows(kernels.pack(weight), ids, dtype, multiplier, base, 0.7)
    assert torch.equal(added, (base + expected) * 0.7)


@pytest.mark.parametrize("row", [-1, 40, 2**40])
def test_a_row_that_a_packed_matrix_does_not_have_is_refused(row: int) -> None:
    weight = block_weight(BlockFormat.Q6_K, 40, 256, random.Random(1))
    kernels = CpuKernels(library.load(), int8_activations=True)
    with pytest.raises(KernelError, match="outside the embedding"):
        kernels.packed_rows(kernels.pack(weight), torch.tensor([3, row]), torch.bfloat16)
