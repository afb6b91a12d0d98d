"""Measure what ranks cost: a row gathered between two of them, and the CPU time of one of two.

    python benchmarks/rank_efficiency.py [--shape llama-1b] [--fp8] [--repeats 5]

Rows: two processes, each bound to a processor of its own, gather rows of bfloat16 over shared
memory, in a recording as in a decode step. They need two idle cores.

Efficiency: the CPU time of one rank with one thread, divided by twice that of rank 0 of two ranks
with one thread each. The other rank's parts count as there, so rank 0 never waits: it reads memory
that nobody writes, and its results mean nothing. Rank 0 does all that rank 1 does, and the
embedding and the sampling beside. The smallest time of the repeats, of both in turns: other
programs only add to it.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freight.base.tables import markdown
from freight.engine import build
from freight.engine.engine import Engine
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.cpu.recording import Arena, record
from freight.lab.bench.drive import greedy, random_prompt
from freight.model.open import open_random
from freight.parallel.ranks import Ranks
from freight.parallel.shared import SharedFiles, SharedMemory
from freight.settings.device import cpu_name
from freight.settings.engine import EngineArgs

VALUES = (2048, 4096)  # of a gathered row
GATHERS = 64  # of a recording; of it
REPLAYS = 400
PROMPT = 512  # tokens
DECODED = 32
VOCABULARY = 4096  # token ids that prompts have: every shape has more
FIRST = 4  # steps of decoding that record and warm up
TIMEOUT = 60.0  # seconds for the other process
ARRIVED = 1 << 62  # a turn beyond all that are taken


@dataclass(frozen=True)
class Times:
    """CPU milliseconds of a step."""

    prefill: float
    decode: float


def gather_times(values: int, cpus: tuple[int, int]) -> list[float]:
    """Return the microseconds of a gather, one number for each replay, as rank 0 sees them."""
    files = SharedFiles.create(2)
    reading, writing = os.pipe()
    child = os.fork()
    rank = 1 if child == 0 else 0
    for number in files.of_others(rank):
        os.close(number)
    result = _gather(SharedMemory(files, rank, TIMEOUT), values, cpus[rank])
    if child == 0:
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(result, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert len(pickle.load(pipe)) == len(result)
    os.waitpid(child, 0)
    return result


def _gather(memory: SharedMemory, values: int, cpu: int) -> list[float]:
    os.sched_setaffinity(0, {cpu})
    torch.set_num_threads(1)
    loaded = library.load()
    x = torch.ones(1, values // 2, dtype=torch.bfloat16)
    ranks = Ranks(memory.rank, 2, memory)

    def run(recording: library.Library) -> Tensor:
        kernels = CpuKernels(recording, ranks=ranks)
        for _ in range(GATHERS - 1):
            kernels.gather(x)
        return kernels.gather(x)

    recorded = record(loaded, Arena(1), run)
    assert recorded.recording is not None, recorded.obstacle
    results = []
    for _ in range(REPLAYS):
        begin = time.perf_counter()
        recorded.recording.replay()
        results.append(1e6 * (time.perf_counter() - begin) / GATHERS)
    return results[REPLAYS // 10 :]


def one_rank(args: EngineArgs, shape: str) -> Engine:
    """Return an engine of one rank."""
    return build.start_engine(open_random(args, shape))[0]


def rank_of_two(args: EngineArgs, shape: str) -> Engine:
    """Return the engine of rank 0 of two. The other has arrived at all turns beforehand."""
    memory = SharedMemory(SharedFiles.create(2), 0, TIMEOUT)
    memory._numbers[1] = ARRIVED
    opened = open_random(args, shape).as_rank(Ranks(0, 2, memory), cores=1)
    opened = replace(opened, args=replace(args, tensor_parallel_size=2))
    return build._start(opened, None, None, None)[0]  # without starting the other


def measure(engine: Engine, repeat: int) -> Times:
    """Return the CPU time of a prompt's step, and the smallest of a decode step."""
    params = greedy(DECODED)
    decodes = []
    prompt = random_prompt(PROMPT, VOCABULARY, random.Random(repeat))
    engine.add(str(repeat), engine.accept(prompt, params), params)
    prefill = _cpu_ms(engine.step)
    for _ in range(FIRST):
        engine.step()
    while engine.has_unfinished:
        decodes.append(_cpu_ms(engine.step))
    return Times(prefill, min(decodes))


def smallest(times: Sequence[Times]) -> Times:
    """Return the smallest time of each kind of step."""
    return Times(min(item.prefill for item in times), min(item.decode for item in times))


def _cpu_ms(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return 1e3 * (time.process_time() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--fp8", action="store_true", help="weights and cache in FP8")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"{cpu_name()}; {options.shape}; {'FP8' if options.fp8 else '16 bits'}\n")

    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise SystemExit("two processors are needed, one for each rank")
    rows = [
        (f"{values:,}", f"{statistics.median(result):.2f}", f"{min(result):.2f}")
        for values in VALUES
        for result in [gather_times(values, (cpus[0], cpus[1]))]
    ]
    print(markdown([("values of a row", "median µs", "smallest µs"), *rows], num_left=1), "\n")

    torch.set_num_threads(1)
    args = EngineArgs(
        threads=1,
        kv_cache_memory="128MiB",
        max_model_len=PROMPT + DECODED + 1,
        max_num_batched_tokens=PROMPT,
        enable_prefix_caching=False,
        **({"quantization": "fp8", "kv_cache_dtype": "fp8"} if options.fp8 else {}),
    )
    engines = one_rank(args, options.shape), rank_of_two(args, options.shape)
    rounds = [[measure(engine, repeat) for engine in engines] for repeat in range(options.repeats)]
    one_rank_times, rank_times = (smallest(times) for times in zip(*rounds, strict=True))
    table = [
        (name, f"{alone:.1f}", f"{each:.1f}", f"{alone / each / 2:.3f}")
        for name, alone, each in (
            (f"prefill of {PROMPT}", one_rank_times.prefill, rank_times.prefill),
            ("decode, one sequence", one_rank_times.decode, rank_times.decode),
        )
    ]
    heads = ("step", "one rank, CPU ms", "a rank of two, CPU ms", "efficiency")
    print(markdown([heads, *table], num_left=1))


if __name__ == "__main__":
    main()
