"""Measure attention's share of a prompt's time, and its speed: by operation, on a CPU.

    python benchmarks/attention_share.py [--shape glm-4.7-flash:8] [--input-len 1024 8192 32768] [--repeats 3]

Each length is one sequence of random tokens, computed in the engine's steps; then 32 tokens are
decoded. A prompt's operations are called one by one, and timed as they are called. Attention's
GFLOP/s count the two products of each query with every key that it sees. A decode step is recorded
and runs as one call, so its attention is the difference to a step after 16 tokens. Medians of the
repeats.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from freight.base.tables import markdown
from freight.engine.build import start_engine
from freight.engine.engine import Engine
from freight.kernels.interface import KernelSet
from freight.lab.bench.drive import drive, greedy, random_prompt
from freight.lab.bench.latency import split
from freight.model.config.model import ModelConfig
from freight.model.mixers.attention.spec import AttentionConfig
from freight.model.mixers.latent.spec import LatentConfig
from freight.model.open import open_random
from freight.settings.device import cpu_name
from freight.settings.engine import EngineArgs

SHORT = 16  # tokens
DECODED = 32
OPERATIONS = (
    "attention",
    "by_head",
    "linear",
    "experts",
    "gated",  # SwiGLU
    "add_rms_norm",
    "rotate_store",
)


@dataclass
class Clock:
    """The seconds of each operation since `start`."""

    seconds: dict[str, float] = field(default_factory=dict)

    def watch(self, kernels: KernelSet, name: str) -> None:
        """Time the operation `name` of the class of `kernels` from now on."""
        operation: Callable[..., Any] = getattr(type(kernels), name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = operation(*args, **kwargs)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
            return result

        setattr(type(kernels), name, timed)


@dataclass
class Run:
    prefill: float  # seconds
    shares: dict[str, float]  # seconds by operation, of the prompt
    step: float  # median seconds of a decode step


def run(engine: Engine, clock: Clock, prompt: list[int]) -> Run:
    """Compute `prompt` and decode behind it."""
    clock.seconds.clear()
    prefill, steps = split(drive(engine, [prompt], [greedy(DECODED)]), batch_size=1)
    return Run(prefill, dict(clock.seconds), statistics.median(step.seconds for step in steps))


def flops(model: ModelConfig, num_keys: int) -> float:
    """Count attention's operations over `num_keys` keys of one query, in all layers. Windows are
    ignored.
    """
    total = 0.0
    for layer in model.layers:
        mixer = layer.mixer
        if isinstance(mixer, AttentionConfig):
            total += 2.0 * mixer.num_heads * (mixer.k_dim + mixer.v_dim) * num_keys
        # A latent is the key, and all but its rotated channels are the value
        elif isinstance(mixer, LatentConfig):
            total += 2.0 * mixer.num_heads * (mixer.rotated + 2 * mixer.latent) * num_keys
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="glm-4.7-flash:8")
    parser.add_argument("--input-len", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv-cache-dtype", default="fp8")
    parser.add_argument("--quantization", default="fp8", choices=["fp8", "none"], help="of weights")
    asked = parser.parse_args()
    args = EngineArgs(
        quantization=None if asked.quantization == "none" else asked.quantization,
        kv_cache_dtype=asked.kv_cache_dtype,
        threads=asked.threads,
        max_num_seqs=1,
        max_model_len=max(asked.input_len) + DECODED,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    engine, config = start_engine(open_random(args, asked.shape))
    model = engine.runner.model.config
    clock = Clock()
    for name in OPERATIONS:
        clock.watch(engine.runner.model.kernels, name)
    numbers = random.Random(0)

    def repeated(length: int) -> Run:
        prompts = [random_prompt(length, model.vocab_size, numbers) for _ in range(asked.repeats)]
        runs = [run(engine, clock, prompt) for prompt in prompts]
        middle = sorted(runs, key=lambda item: item.prefill)[len(runs) // 2]
        return Run(middle.prefill, middle.shares, statistics.median(item.step for item in runs))

    repeated(SHORT)  # warms up
    base = repeated(SHORT).step
    print(
        f"{cpu_name()}, {asked.shape}, weights {config.weight_format}, cache {asked.kv_cache_dtype}: a decode step"
    )
    print(f"behind {SHORT} tokens {base * 1e3:.2f} ms")
    rows = [
        [
            "tokens",
            "prefill tokens/s",
            *OPERATIONS,
            "GFLOP/s",
            "decode ms",
            "attention of it",
            "GFLOP/s",
        ]
    ]
    for length in asked.input_len:
        result = repeated(length)
        speed = flops(model, length * (length + 1) // 2) / result.shares["attention"] / 1e9
        shares = [f"{result.shares.get(name, 0.0) / result.prefill:.0%}" for name in OPERATIONS]
        behind = result.step - base
        decoding = flops(model, length) / behind / 1e9
        decoded = [f"{result.step * 1e3:.2f}", f"{behind / result.step:.0%}", f"{decoding:.0f}"]
        rows.append(
            [f"{length:,}", f"{length / result.prefill:.0f}", *shares, f"{speed:.0f}", *decoded]
        )
    print(markdown(rows, num_left=0))


if __name__ == "__main__":
    main()
