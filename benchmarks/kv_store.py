"""What a store of prefixes is worth: time to the first token of a prompt that is computed, read from
the disk, and read from memory; what storing costs; what requests beside notice.

    python benchmarks/kv_store.py --shape llama-1b --tokens 8192 --rounds 3 > kv_store.json

Weights are random, so answers mean nothing, but those of the three must be equal. Before each read
from the disk the system is told to forget the store's files (posix_fadvise). Each round computes a
prompt of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from freight import SamplingParams
from freight.config.engine import EngineArgs
from freight.engine.build import start_engine
from freight.engine.engine import Engine
from freight.engine.intake import AcceptedPrompt
from freight.models.open import open_random

ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)


def first_token(engine: Engine, name: str, prompt: tuple[int, ...]) -> tuple[float, int, int]:
    """Seconds to the first token, the token, and how many of the prompt were found."""
    began = time.perf_counter()
    engine.add(name, AcceptedPrompt(None, prompt), ONE)
    while not engine.is_finished(name):
        engine.step()
    seconds = time.perf_counter() - began
    output = engine.output(name)
    engine.release(name)
    return seconds, output.outputs[0].token_ids[0], output.num_cached_tokens


def forget_files(folder: Path) -> None:
    """Drop the folder's files from the system's memory."""
    for path in folder.rglob("*.blocks"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def steps_beside(engine: Engine, prompt: tuple[int, ...] | None, seconds: float) -> list[float]:
    """Seconds of the steps of a request that decodes, while `prompt` comes from the store, if one
    is given; else for `seconds`.
    """
    params = SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True, detokenize=False)
    engine.add("beside", AcceptedPrompt(None, tuple(range(64))), params)
    for _ in range(8):
        engine.step()
    if prompt is not None:
        engine.add("read", AcceptedPrompt(None, prompt), ONE)
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        began, computed = time.perf_counter(), engine.num_computed_tokens
        engine.step()
        if engine.num_computed_tokens - computed > 1 or engine.is_finished("beside"):
            break  # the prompt is there
        times.append(time.perf_counter() - began)
    for name in ("beside", "read"):
        engine.release(name)
    return times


def opened(args: argparse.Namespace, store: Path | None) -> Engine:
    options: dict[str, Any] = {} if store is None else {"kv_store": str(store)}
    engine_args = EngineArgs(
        kv_cache_dtype=args.kv_cache_dtype,
        quantization="fp8",
        max_model_len=args.tokens + 2100,
        kv_cache_memory=args.memory,
        **options,
    )
    engine, _ = start_engine(open_random(engine_args, args.shape))
    if engine._store is not None:
        while not engine._store.mover.tiers.is_open:
            time.sleep(0.01)
    return engine


def measure(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    numbers = random.Random(args.seed)
    prompts = [
        tuple(numbers.randrange(1000) for _ in range(args.tokens)) for _ in range(args.rounds)
    ]
    found: dict[str, list[float]] = {name: [] for name in ("plain", "cold", "memory", "disk")}
    answers: dict[str, list[int]] = {name: [] for name in found}

    def note(name: str, engine: Engine, prompt: tuple[int, ...], least: int) -> None:
        engine.scheduler.rebuild(())  # nothing is left in the pool
        seconds, token, cached = first_token(engine, name, prompt)
        assert cached >= least, f"{name}: {cached} of {least} tokens were found"
        found[name].append(seconds)
        answers[name].append(token)

    plain, stored = opened(args, None), opened(args, root)
    store = stored._store
    assert store is not None
    whole = (args.tokens - 1) // 16 * 16
    for engine in (plain, stored):  # the first passes are slower
        first_token(engine, "warm", tuple(range(200)))
    for prompt in prompts:
        note("plain", plain, prompt, 0)
        note("cold", stored, prompt, 0)
        store.mover.flush(120)
        note("memory", stored, prompt, whole)
        store.mover.tiers._memory.clear()
        forget_files(root)
        note("disk", stored, prompt, whole)
    stored.scheduler.rebuild(())
    alone = steps_beside(stored, None, 5.0)
    store.mover.tiers._memory.clear()
    stored.scheduler.rebuild(())
    beside = steps_beside(stored, prompts[0], 60.0)
    stats = store.stats()
    stored.close()
    spec = stored.runner.pool.spec
    middle = {name: statistics.median(values) for name, values in found.items()}
    return {
        "shape": args.shape,
        "tokens": args.tokens,
        "kv_cache_dtype": args.kv_cache_dtype,
        "threads": len(os.sched_getaffinity(0)),
        "bytes_per_token": spec.bytes_per_token,
        "equal": len({tuple(values) for values in answers.values()}) == 1,
        "seconds": found,
        "median": middle,
        "sooner_from_disk": middle["plain"] / middle["disk"],
        "sooner_from_memory": middle["plain"] / middle["memory"],
        "storing_costs": middle["cold"] / middle["plain"],
        "step_alone": statistics.median(alone),
        "step_beside_reading": statistics.median(beside),
        "mean_step_ratio": statistics.mean(beside) / statistics.mean(alone),
        "steps_beside_reading": len(beside),
        "dropped": stats.dropped,
        "corrupt": stats.corrupt,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-cache-dtype", default="fp8")
    parser.add_argument("--memory", default="1GiB", help="of the KV cache")
    parser.add_argument("--store", help="a folder on the disk to measure; default: a temporary one")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.store) as folder:
        print(json.dumps(measure(args, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
