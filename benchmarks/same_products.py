"""Compare matrix products of two builds of the CPU kernels to the bit, for weights and experts.

    python benchmarks/same_products.py OLD.so [NEW.so] [--only "FP8 blocks"]

Both libraries have this checkout's C interface; NEW is the installed build unless named. The AMX
build with emulated tiles (`make test-tiles` leaves it in build/tiles) runs on machines without AMX.
Numbers of rows end at many places of a tile, of a pair of tiles and of the rows that are computed
at once. Values are ordinary, or have subnormal products, or include infinities and NaN. Exits with
1 if a case differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from freight.fp8 import mxfp4
from freight.fp8.formats import Format
from freight.fp8.weights import quantize_blocks, quantize_rows
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.cpu.library import load_file, path_of, runnable
from freight.operands.activation import GatedActivation
from freight.operands.experts import ExpertLayers
from freight.operands.weight import Activations, Codes, Groups, Weight

SHAPES = [(1, 32), (17, 64), (33, 96), (48, 160), (130, 224), (260, 320), (129, 1024), (1000, 544)]
ODD_SHAPES = [(1, 1), (33, 129), (260, 300)]  # not for 4 bits, in groups of up to 32 inputs
ROWS = (1, 3, 4, 5, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 511, 512, 513, 1025)
# The second where activations become FP8, which pairs and tiles take as well
DTYPES = (torch.bfloat16, torch.float32)
THREADS = 3  # one, two and three in turn: they decide how many bands a task has
EXPERTS = 5
HIDDEN = 288
INNER = 160
TOP_K = 2

Maker = Callable[[Tensor], Weight]


def in_mxfp4(matrix: Tensor) -> Weight:
    """Return random codes, some groups of zeros, under scales about as large as the matrix."""
    outputs = matrix.shape[0]
    groups = matrix.shape[1] // mxfp4.GROUP
    blocks = torch.randint(0, 256, (outputs, groups, 16), dtype=torch.uint8)
    blocks[torch.rand(outputs, groups) < 0.1] &= 0x88
    exponent = int(matrix.abs().mean().clamp_min(2.0**-120).log2())
    scales = (
        torch.randint(125 + exponent, 129 + exponent, (outputs, groups))
        .clamp(3, 252)
        .to(torch.uint8)
    )
    return Weight(blocks.flatten(1).view(mxfp4.CODES), scales.view(mxfp4.SCALES))


def in_groups(codes: Codes, size: int, dtype: torch.dtype, zeros: bool) -> Maker:
    """Return random codes under scales about as large as the matrix."""

    def make(matrix: Tensor) -> Weight:
        shape = matrix.shape[0], matrix.shape[1] // size
        scales = (matrix.abs().mean() * torch.rand(shape)).clamp_min(2.0**-120).to(dtype)
        given = torch.randint(0, 16, shape, dtype=torch.uint8) if zeros else None
        data = torch.randint(0, 256, (matrix.shape[0], matrix.shape[1] // 2), dtype=torch.uint8)
        return Weight(data, groups=Groups(codes, size, scales, given))

    return make


def in_fp8(
    quantize: Callable[[Tensor, Format], tuple[Tensor, Tensor]], activations: Activations
) -> Maker:
    given = 0.013 if activations is Activations.STATIC else None
    return lambda matrix: Weight(*quantize(matrix, Format.E4M3FN), activations, given)


MAKERS: dict[str, Maker] = {
    "BF16": lambda matrix: Weight(matrix.bfloat16()),
    "MXFP4": in_mxfp4,
    "INT4": in_groups(Codes.INT4, 32, torch.float16, zeros=False),
    "INT4 with zero points": in_groups(Codes.INT4, 32, torch.bfloat16, zeros=True),
    "NVFP4": in_groups(Codes.E2M1, 16, torch.float8_e4m3fn, zeros=False),
    **{
        f"FP8 rows, {item}": in_fp8(quantize_rows, item)
        for item in (Activations.PLAIN, Activations.DYNAMIC, Activations.STATIC)
    },
    **{
        f"FP8 blocks, {item}": in_fp8(quantize_blocks, item)
        for item in (Activations.PLAIN, Activations.DYNAMIC, Activations.STATIC)
    },
}


def values(shape: tuple[int, int], kind: str) -> Tensor:
    """Return float32 [rows, inputs]."""
    x = torch.randn(shape)
    if kind == "subnormal":
        return torch.ldexp(x, torch.randint(-140, -60, shape))
    if kind == "not finite":
        x.view(-1)[:: max(1, x.numel() // 7)] = torch.tensor(float("inf"))
        x[-1, 0] = float("nan")
    return x


def matrix_of(shape: tuple[int, int], kind: str) -> Tensor:
    matrix = torch.randn(shape) / shape[1] ** 0.5
    matrix[0] *= 1e-38
    return matrix * 2.0**-60 if kind == "subnormal" else matrix


def same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def products(sets: list[CpuKernels], name: str) -> Iterator[tuple[str, bool]]:
    """Yield each case, and whether its bits are the same."""
    count = 0
    for shape in SHAPES if "4" in name.partition(" ")[0] else SHAPES + ODD_SHAPES:
        for kind in ("ordinary", "subnormal", "not finite"):
            weight = MAKERS[name](matrix_of(shape, kind))
            packed = [kernels.pack(weight) for kernels in sets]
            for rows in ROWS:
                x = values((rows, shape[1]), kind)
                for dtype in DTYPES[: 1 if weight.activations is Activations.PLAIN else 2]:
                    count += 1
                    torch.set_num_threads(count % THREADS + 1)
                    bias = torch.randn(shape[0]).to(dtype) if count % 2 else None
                    results = [
                        kernels.linear(x.to(dtype), item, bias)
                        for kernels, item in zip(sets, packed, strict=True)
                    ]
                    case = f"{name}, {list(shape)}, {rows} rows, {dtype}, {kind}, bias {bias is not None}"
                    yield case, same_bits(*results)


def experts(sets: list[CpuKernels], name: str) -> Iterator[tuple[str, bool]]:
    """Yield the same for mixtures of experts: few of their rows have many, and one has none."""
    shapes = (2 * INNER, HIDDEN), (HIDDEN, INNER)
    sides = []
    for shape in shapes:
        sides.append([MAKERS[name](matrix_of(shape, "ordinary")) for _ in range(EXPERTS)])
    for dtype in DTYPES:
        biases = [torch.randn(EXPERTS, shape[0]).to(dtype) for shape in shapes]
        given = list(zip(sides, biases, strict=True))
        packed = []
        for kernels in sets:
            packed.append([kernels.pack_experts(*side) for side in given])
        for rows in ROWS:
            torch.set_num_threads(rows % THREADS + 1)
            x = torch.randn(rows, HIDDEN).to(dtype)
            shares = torch.rand(rows, TOP_K)
            ids = (
                torch.stack([torch.randperm(EXPERTS - 1)[:TOP_K] for _ in range(rows)])
                .sort(-1)
                .values.int()
            )
            results = [
                kernels.experts(x, ids, shares, ExpertLayers(gate_up, down, GatedActivation.SILU))
                for kernels, (gate_up, down) in zip(sets, packed, strict=True)
            ]
            yield f"experts, {name}, {rows} rows, {dtype}", same_bits(*results)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?")
    parser.add_argument("--only", default="", help="kinds of weights with this in their name")
    asked = parser.parse_args()
    new = asked.new or path_of(runnable()[0])
    sets = [
        CpuKernels(load_file(path, path.stem.removeprefix("freight_"))) for path in (asked.old, new)
    ]
    torch.manual_seed(0)
    different = 0
    for name in [name for name in MAKERS if asked.only in name]:
        for what, cases in (("products", products(sets, name)), ("experts", experts(sets, name))):
            begin = time.monotonic()
            result = list(cases)
            wrong = [case for case, same in result if not same]
            different += len(wrong)
            print(
                f"{what}, {name}: {len(wrong)} differ of {len(result)} ({time.monotonic() - begin:.0f} s)",
                flush=True,
            )
            for case in wrong[:5]:
                print(f"  {case}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
