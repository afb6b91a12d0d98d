"""Compare the speed of two builds of the CPU kernels in one process, over the same memory.

    python benchmarks/two_builds.py OLD.so [NEW.so] [--threads 2] [--seconds 2]

The address of a process's memory changes speed by several percent. Here both builds read the same
memory in alternation, so a difference of one percent shows. Both have this checkout's C interface;
NEW is the installed build unless named. Ratios are of speed, taken within a pair; their interval is
that of order statistics, of at least 95 %.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from freight.fp8.formats import Format, Granularity
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.cpu.library import load_file, path_of, runnable
from freight.lab.bench.cases import Bench, Case, Heads
from freight.lab.bench.serving_figures import interval
from freight.lab.bench.timing import bytes_beyond_caches, seconds_of

LEAST = 20  # pairs of a row
MOST = 1000
HEADS = Heads(32, 8, 64)
CACHES = (
    (Format.E4M3FN, Granularity.TENSOR),
    (Format.E4M3FN, Granularity.TOKEN),
    (Format.BFLOAT16, None),
)


def cases(kernels: CpuKernels) -> Iterator[Case]:
    """Yield what decoding and prefill of a 1 B model call, reading from memory."""
    bench = Bench(kernels, "cpu", bytes_beyond_caches())
    for rows in (1, 8, 512):
        for format in (Format.E4M3FN, Format.BFLOAT16):
            yield bench.linear(rows, (8192, 2048), format)
    for format, granularity in CACHES:
        for batch, new_tokens, context in (
            (1, 1, 2048),
            (8, 1, 1024),
            (1, 1, 16384),
            (1, 512, 512),
            (1, 512, 16384),
        ):
            yield bench.attention(batch, new_tokens, context, HEADS, format, granularity)
    yield bench.attention(1, 1, 16384, Heads(32, 8, 128), *CACHES[0])


def with_kernels(
    kernels: CpuKernels, name: str, call: Callable[[], object]
) -> Callable[[], object]:
    """Return the same call with other kernels."""
    assert isinstance(call, partial)
    return partial(getattr(kernels, name), *call.args, **call.keywords)


def in_turns(
    old: Sequence[Callable[[], object]], new: Sequence[Callable[[], object]], seconds: float
) -> list[tuple[float, float]]:
    """Time calls of both, half a round through the same memory apart, so that neither finds it in a
    cache; return pairs in seconds.
    """
    for call in (*old, *new):
        call()
    pairs = []
    end = time.perf_counter() + seconds
    while len(pairs) < LEAST or (time.perf_counter() < end and len(pairs) < MOST):
        index = len(pairs)
        mine = old[index % len(old)]
        other = new[(index + len(new) // 2) % len(new)]
        if index % 2:
            of_old = seconds_of(mine)
            of_new = seconds_of(other)
        else:
            of_new = seconds_of(other)
            of_old = seconds_of(mine)
        pairs.append((of_old, of_new))
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=path_of(runnable()[0]))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads or torch.get_num_threads())
    old, new = [
        CpuKernels(load_file(path, path.stem.removeprefix("freight_")))
        for path in (asked.old, asked.new)
    ]
    print("| kernel | format | shape | old, us | new, us | speed, old = 1 | interval | pairs |")
    print("|---|---|---|---:|---:|---:|---|---:|")
    for case in cases(old):
        pairs = in_turns(
            case.calls, [with_kernels(new, case.kernel, call) for call in case.calls], asked.seconds
        )
        ratios = [before / after for before, after in pairs]
        low, high, _ = interval(ratios)
        times = " | ".join(
            f"{statistics.median(item) * 1e6:.1f}" for item in zip(*pairs, strict=True)
        )
        print(
            f"| {case.kernel} | {case.format} | {list(case.shape)} | {times} | {statistics.median(ratios):.3f} "
            f"| {low:.3f} to {high:.3f} | {len(pairs)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
