"""Measure decoding on a CPU as a fraction of memory speed, read before and after each step.

    python benchmarks/decode_roofline.py [--shape llama-1b] [--batch-size 1] [--input-len 128] [--steps 300] \
        [--quantization int4]

A step reads the weights once, and each sequence's keys and values. Its fraction is the time that
reading as many bytes took right before and after the step, divided by the step's time: 1.0 is a
step in which only reading takes time. (`freight bench latency` reads memory only before and after a
full run, and takes the best of three.)
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from freight.engine.build import start_engine
from freight.lab.bench.drive import greedy, linears_of, random_prompt, weight_bytes
from freight.lab.bench.serving_figures import interval
from freight.lab.bench.timing import MemoryProbe
from freight.model.open import open_random
from freight.settings.device import cpu_name
from freight.settings.engine import EngineArgs

WARM_UP = 4  # steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--quantization",
        choices=("none", "fp8", "int8", "int4"),
        default="fp8",
        help="of weights, over an FP8 cache (default fp8); none: weights and cache in 16 bits",
    )
    asked = parser.parse_args()
    # The first sequence decodes while the last one's prompt is computed. A chunk is 512 tokens or
    # more: with too few tokens to generate, no step would have one of every sequence.
    filling = asked.batch_size * asked.input_len // 512 if asked.batch_size > 1 else 0
    generated = asked.steps + WARM_UP + 2 + filling
    plain = asked.quantization == "none"
    args = EngineArgs(
        quantization=None if plain else asked.quantization,
        kv_cache_dtype="auto" if plain else "fp8",
        threads=asked.threads,
        max_num_seqs=asked.batch_size,
        max_model_len=asked.input_len + generated,
        skip_tokenizer_init=True,
    )
    opened = open_random(args, asked.shape)
    engine, config = start_engine(opened)
    model = engine.runner.model.config
    formats = (config.compute_format, config.weight_format)
    linear_of = linears_of(opened, config)
    weights = weight_bytes(model, *formats, asked.batch_size, linear_of)
    per_token = engine.runner.pool.spec.bytes_per_token
    numbers = random.Random(0)
    for index in range(asked.batch_size):
        prompt = random_prompt(asked.input_len, model.vocab_size, numbers)
        engine.add(str(index), engine.intake.accept(prompt, greedy(generated)), greedy(generated))
    probe = MemoryProbe(2**29)
    fractions: list[float] = []
    seconds: list[float] = []
    speeds: list[float] = []
    before = 0.0
    produced = 0
    while engine.has_unfinished:
        begin = time.perf_counter()
        deltas = engine.step()
        taken = time.perf_counter() - begin
        after = probe.reading()
        if before and len(deltas) == asked.batch_size:
            speed = 2 / (1 / before + 1 / after)
            read = weights + (asked.batch_size * asked.input_len + produced) * per_token
            fractions.append(read / taken / speed)
            seconds.append(taken)
            speeds.append(speed)
        before = after
        produced += len(deltas)
    fractions = fractions[WARM_UP:]
    seconds = seconds[WARM_UP:]
    speeds = speeds[WARM_UP:]
    low, high, _ = interval(fractions)
    print(
        f"{cpu_name()}, {engine.runner.model.config.num_layers} layers of {asked.shape}, batch {asked.batch_size}, "
        f"weights {asked.quantization}: {weights / 1e9:.2f} GB read"
    )
    print(f"{len(fractions)} steps, median {statistics.median(seconds) * 1e3:.2f} ms")
    print(f"memory: {statistics.median(speeds) / 1e9:.1f} GB/s")
    print(
        f"fraction of the bandwidth: {statistics.median(fractions):.3f} ({low:.3f} to {high:.3f})"
    )


if __name__ == "__main__":
    main()
