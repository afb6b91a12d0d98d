"""A product whose inputs and outputs are on all ranks: the bits of one rank's product, in every
format, layout and number of rows, staged together or not.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.forked_ranks import over_memory
from torch import Tensor

from freight.fp8.formats import Format
from freight.fp8.weights import quantize_blocks, quantize_rows
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.operands.weight import Activations, Codes, Groups, Weight
from freight.parallel.ranks import Ranks
from freight.parallel.shared import CAPACITY, SharedMemory

ROWS = (1, 8, 9, 17, 40, 530)  # the last are more than are staged at once
INPUTS, OUTPUTS = 1024, 256  # shares of 512 inputs, whole panels of tiles also in INT8
DYNAMIC, STATIC = Activations.DYNAMIC, Activations.STATIC


def matrix() -> Tensor:
    return torch.randn(OUTPUTS, INPUTS) / INPUTS**0.5


def in_int4() -> Weight:
    scales = torch.rand(OUTPUTS, INPUTS // 32).half() / 100
    codes = torch.randint(0, 256, (OUTPUTS, INPUTS // 2), dtype=torch.uint8)
    return Weight(codes, groups=Groups(Codes.INT4, 32, scales))


FORMATS: dict[str, tuple[torch.dtype, Callable[[], Weight]]] = {
    "bfloat16": (torch.bfloat16, lambda: Weight(matrix().bfloat16())),
    "float32": (torch.float32, lambda: Weight(matrix())),
    "W8A8": (torch.bfloat16, lambda: Weight(*quantize_rows(matrix(), Format.E4M3FN), DYNAMIC)),
    "static W8A8": (
        torch.float16,
        lambda: Weight(*quantize_rows(matrix(), Format.E4M3FN), STATIC, 0.013),
    ),
    "W8A8 in blocks": (
        torch.bfloat16,
        lambda: Weight(*quantize_blocks(matrix(), Format.E4M3FN), DYNAMIC),
    ),
    "INT8": (torch.bfloat16, lambda: Weight(*quantize_rows(matrix(), Format.INT8), DYNAMIC)),
    "INT4": (torch.bfloat16, in_int4),
}


def inputs_of(rows: int, dtype: torch.dtype) -> Tensor:
    """Rows whose largest values, infinities and NaNs are each on one rank."""
    x = torch.randn(rows, INPUTS) * torch.exp2(torch.randint(-8, 8, (rows, 1)))
    x[0, 3], x[rows // 2, -5] = 50.0, -70.0
    if rows > 8:
        x[5, 700], x[6, 9], x[7, 511] = float("nan"), float("inf"), float("nan")
    return x.to(dtype)


def share(x: Tensor, rank: int, size: int) -> Tensor:
    return x.chunk(size, 1)[rank].contiguous()


def rows_of(weight: Weight, rank: int, size: int) -> Weight:
    return weight.reordered(torch.arange(OUTPUTS).chunk(size)[rank], "weight")


@pytest.mark.parametrize("capacity", [CAPACITY, 1 << 14])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("build", library.runnable())
def test_a_product_of_ranks_has_the_bits_of_one(
    build: str, kind: str, size: int, capacity: int
) -> None:
    """Slots of 16 KiB are too small for most of it: then inputs and outputs are copied."""
    dtype, make = FORMATS[kind]
    torch.manual_seed(3)
    loaded, weight, bias = library.load(build), make(), torch.randn(OUTPUTS).to(dtype)
    xs = [inputs_of(rows, dtype) for rows in ROWS]
    alone = CpuKernels(loaded)
    packed = alone.pack(weight)
    expected = [alone.linear(x, packed, bias).view(torch.uint8) for x in xs]

    def computed(memory: SharedMemory, _: CpuKernels) -> list[bool]:
        rank = memory.rank
        kernels = CpuKernels(loaded, ranks=Ranks(rank, size, memory))
        own = kernels.pack(rows_of(weight, rank, size))
        of_bias = bias.chunk(size)[rank].contiguous()
        found = []
        for x, result in zip(xs, expected, strict=True):
            whole = kernels.shared_linear(x, own, of_bias, whole=True)
            cut = kernels.shared_linear(share(x, rank, size), own, of_bias)
            found += [torch.equal(y.view(torch.uint8), result) for y in (whole, cut)]
        return found

    for found in over_memory(size, computed, capacity=capacity):
        assert found == [True] * (2 * len(ROWS))
