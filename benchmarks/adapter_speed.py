"""Measure what adapters cost a decode step: requests with an adapter each, and the same without any.

    python benchmarks/adapter_speed.py [--shape llama-1b] [--quantization fp8] [--batch-size 8] [--adapters 8] \
        [--rank 16] [--rounds 20]

One engine over random weights, with adapters of random values for every module. Both cases run in
turns; a round's time is the median of its steps in which all requests decode. The ratio is of tokens
a second, with adapters to without, by round; its interval is that of order statistics, of at least
95 %.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from freight.engine.adapters import LoadedAdapter
from freight.engine.build import start_engine
from freight.engine.engine import Engine
from freight.lab.bench.drive import greedy, random_prompt
from freight.lab.bench.serving_figures import interval
from freight.model.adapted import adapted_modules
from freight.model.config.model import ModelConfig
from freight.model.open import open_random
from freight.settings.device import cpu_name
from freight.settings.engine import EngineArgs

WARM_UP = 2  # rounds of each case


def write_adapter(folder: Path, model: ModelConfig, rank: int, seed: int) -> None:
    """Write an adapter of random values for every module that takes one."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    parts = {}
    for module, (outputs, inputs) in adapted_modules(model).items():
        a = torch.randn(rank, inputs, generator=generator).bfloat16()
        b = torch.randn(outputs, rank, generator=generator).bfloat16()
        parts[f"base_model.model.{module}.lora_A.weight"] = a
        parts[f"base_model.model.{module}.lora_B.weight"] = b
    save_file(parts, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def decode(
    engine: Engine, prompts: list[list[int]], adapters: list[LoadedAdapter | None], steps: int
) -> float:
    """Return the median seconds of a step in which all prompts decode."""
    params = greedy(steps + 2)
    for index, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
        engine.add(str(index), engine.intake.accept(prompt, params), params, adapter)
    seconds = []
    while engine.has_unfinished:
        computed = engine.num_computed_tokens
        begin = time.perf_counter()
        engine.step()
        taken = time.perf_counter() - begin
        if engine.num_computed_tokens - computed == len(prompts):
            seconds.append(taken)
    for index in range(len(prompts)):
        engine.release(str(index))
    return statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--quantization", choices=("none", "fp8", "int8", "int4"), default="fp8")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args()
    args = EngineArgs(
        quantization=None if asked.quantization == "none" else asked.quantization,
        kv_cache_dtype="auto" if asked.quantization == "none" else "fp8",
        threads=asked.threads,
        max_num_seqs=asked.batch_size,
        max_model_len=asked.input_len + asked.steps + 8,
        skip_tokenizer_init=True,
        enable_lora=True,
        max_loras=asked.adapters,
        max_lora_rank=asked.rank,
        kv_cache_memory="1GiB",
    )
    engine, config = start_engine(open_random(args, asked.shape))
    model = engine.runner.model.config
    loaded = []
    with tempfile.TemporaryDirectory() as temporary:
        for index in range(asked.adapters):
            folder = Path(temporary, str(index))
            write_adapter(folder, model, asked.rank, index)
            loaded.append(engine.adapters.load(str(index), str(folder)))
    numbers = random.Random(0)
    prompts = []
    cases: dict[str, list[LoadedAdapter | None]] = {"without": [], "with": []}
    for index in range(asked.batch_size):
        prompts.append(random_prompt(asked.input_len, model.vocab_size, numbers))
        cases["without"].append(None)
        cases["with"].append(loaded[index % len(loaded)])
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(asked.rounds + WARM_UP):
        for name, adapters in cases.items():
            seconds[name].append(decode(engine, prompts, adapters, asked.steps))
    pairs = zip(seconds["without"][WARM_UP:], seconds["with"][WARM_UP:], strict=True)
    ratios = [without / with_adapters for without, with_adapters in pairs]
    low, high, _ = interval(ratios)
    step = statistics.median(seconds["without"][WARM_UP:])
    print(
        f"{cpu_name()}, {asked.shape}, {config.weight_format if args.quantization != 'int4' else 'int4'} weights, "
        f"batch {asked.batch_size}, {asked.adapters} adapters of rank {asked.rank}: "
        f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}) of {asked.batch_size / step:.1f} tokens a second"
    )


if __name__ == "__main__":
    main()
