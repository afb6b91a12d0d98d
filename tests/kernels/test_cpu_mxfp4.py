"""Products with weights in MXFP4: their values are exact, and they have the bits of the same
weights in bfloat16.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from freight.errors import KernelError
from freight.fp8 import mxfp4
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.operands.activation import Activation, AnyActivation, GatedActivation
from freight.operands.experts import ExpertLayers
from freight.operands.weight import Weight

BUILDS = library.runnable()
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# out_features, in_features: rows that fill no block, one of two blocks of a band; inputs of several
# panels
SHAPES = [(1, 32), (16, 64), (33, 96), (70, 416), (160, 288)]
ROWS = (1, 2, 3, 4, 5, 12, 13, 33, 70, 530)  # each height of tiles; on matrix tiles from 5 on


def random_weight(outputs: int, inputs: int, lowest: int = 110, highest: int = 130) -> Weight:
    """Some groups are zeros, with scales that no other group may have."""
    groups = inputs // mxfp4.GROUP
    blocks = torch.randint(0, 256, (outputs, groups, 16), dtype=torch.uint8)
    scales = torch.randint(lowest, highest + 1, (outputs, groups), dtype=torch.uint8)
    zeros = torch.rand(outputs, groups) < 0.1
    blocks[zeros] &= 0x88
    scales[zeros] = torch.randint(0, 256, (int(zeros.sum()),), dtype=torch.uint8)
    return Weight(blocks.flatten(1).view(mxfp4.CODES), scales.view(mxfp4.SCALES))


def in_bfloat16(weight: Weight) -> Weight:
    blocks, scales = weight.mxfp4_bytes
    zeros = ((blocks & 0x77) == 0).all(-1)
    return Weight(mxfp4.to_bfloat16(blocks, scales.masked_fill(zeros, 127)))


def experts_of(
    kernels: CpuKernels,
    weights: tuple[list[Weight], list[Weight]],
    x: Tensor,
    ids: Tensor,
    activation: AnyActivation = GatedActivation.CLAMPED_SWIGLU,
) -> Tensor:
    gate_up, down = (kernels.pack_experts(side) for side in weights)
    shares = torch.full(ids.shape, 0.5)
    return kernels.experts(x, ids, shares, ExpertLayers(gate_up, down, activation))


@pytest.mark.parametrize("build", BUILDS)
def test_every_code_under_every_scale_has_its_value(build: str):
    """An input of 1 among zeros reads a column of the matrix. Rows are scales, columns codes."""
    kernels = CpuKernels(library.load(build))
    codes = (torch.arange(16)[:, None] | torch.arange(16).roll(1)[:, None] << 4).to(torch.uint8)
    blocks = codes.T.repeat(250, 1)
    weight = Weight(
        blocks.view(mxfp4.CODES),
        torch.arange(3, 253, dtype=torch.uint8)[:, None].view(mxfp4.SCALES),
    )
    expected = weight.dequantized().T
    packed = kernels.pack(weight)
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 4, 32):  # by vectors, and on tiles
            columns = torch.eye(32, dtype=dtype).split(rows)
            found = torch.cat([kernels.linear(column, packed) for column in columns])
            assert torch.equal(found.float(), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("build", BUILDS)
def test_products_have_the_bits_of_those_in_bfloat16(
    build: str, outputs: int, inputs: int, dtype: torch.dtype
):
    torch.manual_seed(outputs)
    kernels, weight = CpuKernels(library.load(build)), random_weight(outputs, inputs)
    packed, wide = kernels.pack(weight), kernels.pack(in_bfloat16(weight))
    bias = torch.randn(outputs).to(dtype)
    for rows in ROWS:
        x = torch.randn(rows, inputs).to(dtype)
        assert torch.equal(kernels.linear(x, packed, bias), kernels.linear(x, wide, bias))


@pytest.mark.parametrize("build", BUILDS)
def test_sums_of_tiny_values_have_them_too(build: str):
    """Where tiles take subnormal products for zeros, vectors do, whatever the format of the
    weights.
    """
    torch.manual_seed(2)
    kernels, weight = CpuKernels(library.load(build)), random_weight(64, 128, 3, 252)
    packed, wide = kernels.pack(weight), kernels.pack(in_bfloat16(weight))
    for rows in (1, 3, 8):
        x = (torch.randn(rows, 128) * 2.0 ** torch.randint(-110, 0, (rows, 128))).bfloat16()
        found, expected = kernels.linear(x, packed), kernels.linear(x, wide)
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    "activation", [GatedActivation.CLAMPED_SWIGLU, Activation.RELU_SQUARED], ids=str
)
def test_experts_have_the_bits_of_those_in_bfloat16(
    build: str, dtype: torch.dtype, activation: AnyActivation
):
    torch.manual_seed(3)
    kernels = CpuKernels(library.load(build))
    width = 96 if isinstance(activation, Activation) else 192
    sides = [random_weight(width, 64) for _ in range(4)], [random_weight(64, 96) for _ in range(4)]
    wide = [in_bfloat16(one) for one in sides[0]], [in_bfloat16(one) for one in sides[1]]
    for rows in (1, 3, 40):
        x = torch.randn(rows, 64).to(dtype) / 64
        ids = torch.rand(rows, 4).argsort(-1)[:, :2].sort(-1).values.to(torch.int32)
        found, expected = (
            experts_of(kernels, every, x, ids, activation) for every in (sides, wide)
        )
        assert torch.equal(found, expected)


@pytest.mark.parametrize("build", BUILDS)
def test_a_weight_takes_four_bits_and_a_quarter(build: str):
    packed = CpuKernels(library.load(build)).pack(random_weight(64, 128))
    assert packed.data.nbytes * 8 == 64 * 128 * 4.25
    assert (packed.out_features, packed.in_features) == (64, 128)


@pytest.mark.parametrize(
    ("scale", "byte", "taken"), [(2, 0x10, False), (253, 0x01, False), (2, 0x88, True)]
)
def test_what_may_leave_the_range_of_bfloat16_is_refused(scale: int, byte: int, taken: bool):
    blocks = torch.zeros(2, 32, dtype=torch.uint8)
    blocks[1, 20] = byte
    scales = torch.full((2, 2), 127, dtype=torch.uint8)
    scales[1, 1] = scale
    weight = Weight(blocks.view(mxfp4.CODES), scales.view(mxfp4.SCALES))
    kernels = CpuKernels(library.load(BUILDS[-1]))
    if taken:
        assert not kernels.linear(torch.ones(1, 64), kernels.pack(weight)).any()
        return
    with pytest.raises(KernelError, match="scale bytes are 3 to 252"):
        kernels.pack(weight)
