"""Time products in INT8 beside those in E4M3: CPU time of one thread, the two in turns.

    python benchmarks/int8_products.py [BUILD]

Prints a row for each shape and number of rows. Activations are bfloat16 and rounded in the call, a
scale per row. Each matrix has copies that exceed the caches of a core together. CPU time says what a
product costs on a machine that does other things too; it leaves out what threads wait for.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from freight.fp8.formats import Format
from freight.fp8.weights import quantize_rows
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.operands.weight import Activations, Weight

SHAPES = ((8192, 2048), (2048, 8192))  # out_features, in_features
ROWS = (1, 4, 8, 32, 64, 512, 1024)
FORMATS = (Format.INT8, Format.E4M3FN)
COPIES = 3
ROUNDS = 9


def main(build: str | None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kernels = CpuKernels(library.load(build))
    print(
        f"{kernels.name}: out_features in_features rows, ms in INT8 and E4M3, E4M3 / INT8, GOP/s in INT8"
    )
    for outputs, inputs in SHAPES:
        matrices = [torch.randn(outputs, inputs) / inputs**0.5 for _ in range(COPIES)]
        packed = {
            format: [
                kernels.pack(Weight(*quantize_rows(matrix, format), Activations.DYNAMIC))
                for matrix in matrices
            ]
            for format in FORMATS
        }
        for rows in ROWS:
            x = torch.randn(rows, inputs).bfloat16()
            seconds: dict[Format, list[float]] = {format: [] for format in FORMATS}
            for _ in range(ROUNDS):
                for format in FORMATS:
                    begin = time.thread_time()
                    for weight in packed[format]:
                        kernels.linear(x, weight)
                    seconds[format].append((time.thread_time() - begin) / COPIES)
            int8, e4m3 = (statistics.median(seconds[format]) for format in FORMATS)
            print(
                f"{outputs} {inputs} {rows:5d} {int8 * 1e3:9.3f} {e4m3 * 1e3:9.3f} {e4m3 / int8:6.2f} "
                f"{2 * rows * outputs * inputs / int8 / 1e9:7.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
