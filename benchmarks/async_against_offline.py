"""Measure what AsyncLLM costs: its tokens per second and those of `LLM.generate`, in turns.

Both engines stay loaded and take turns, as in `serve_against_offline.py`: LLM in a process of its
own, AsyncLLM in this one with its engine where `--engine` says. Every round has prompts of its own.
All prompts of a round begin at once, every output of a request is taken, and every answer has the
same number of tokens (`ignore_eos`, greedy). Ratios are taken within a round, because a machine
that others use changes its speed between rounds. The CPU time of each
engine's process and of this one says more on a busy machine, with `--threads 1`, so that no thread
spins.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from serve_against_offline import (
    Offline,
    Turn,
    add_round_options,
    cpu_seconds,
    offline_process,
    ratio_figures,
)

from freight import AsyncLLM, SamplingParams
from freight.lab.bench.prompts import Ask, Ids, Lengths


async def answer(llm: AsyncLLM, ask: Ask, params: SamplingParams) -> int:
    """Return the number of tokens of one answer."""
    count = 0
    async for output in llm.generate(ask.content, params):
        count = len(output.outputs[0].token_ids)
    return count


async def turn(llm: AsyncLLM, asks: Sequence[Ask]) -> Turn:
    params = SamplingParams(max_tokens=asks[0].max_tokens, temperature=0.0, ignore_eos=True)
    begin = time.perf_counter()
    used = time.process_time()
    engine = cpu_seconds(llm._host.pid)
    counts = await asyncio.gather(*(answer(llm, ask, params) for ask in asks))
    seconds = time.perf_counter() - begin
    used = time.process_time() - used
    return Turn(sum(counts), seconds, cpu_seconds(llm._host.pid) - engine, used)


def offline_turn(offline: Offline, asks: Sequence[Ask]) -> Turn:
    engine = cpu_seconds(offline.pid)
    return replace(offline.turn(asks), server_cpu=cpu_seconds(offline.pid) - engine)


def measure(args: argparse.Namespace, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each number of requests."""
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    lengths = [Lengths(size, size) for size in (args.prompt_tokens, args.output_tokens)]
    extra = {"engine": args.engine, "max_events_per_second": args.max_events_per_second}
    llm = AsyncLLM(speculate=0, **options, **extra)  # as the other
    rows = []
    with offline_process(flags) as offline, asyncio.Runner() as runner:
        prompts = Ids(offline.vocab_size, *lengths)
        for requests in args.concurrency:
            turns: list[tuple[Turn, Turn]] = []
            for number in range(-args.warmup, args.rounds):
                seed = random.Random(f"{requests} {number}").randrange(2**32)
                asks = list(islice(prompts.asks(seed), requests))
                if number % 2:
                    offline_run = offline_turn(offline, asks)
                    async_run = runner.run(turn(llm, asks))
                else:
                    async_run = runner.run(turn(llm, asks))
                    offline_run = offline_turn(offline, asks)
                assert offline_run.tokens == async_run.tokens
                if number >= 0:
                    turns.append((offline_run, async_run))
            rows.append(describe(requests, turns))
            print(shown(rows[-1]), file=sys.stderr, flush=True)
        llm.shutdown()
    return rows


def describe(requests: int, turns: Sequence[tuple[Turn, Turn]]) -> dict[str, Any]:
    ratios = [async_run.rate / offline_run.rate for offline_run, async_run in turns]
    tokens = sum(async_run.tokens for _, async_run in turns)
    return {
        "requests": requests,
        "offline_tokens_per_second": statistics.median(
            offline_run.rate for offline_run, _ in turns
        ),
        "async_tokens_per_second": statistics.median(async_run.rate for _, async_run in turns),
        **ratio_figures(ratios),
        "llm_cpu_us_per_token": sum(offline_run.server_cpu for offline_run, _ in turns)
        / tokens
        * 1e6,
        "engine_cpu_us_per_token": sum(async_run.server_cpu for _, async_run in turns)
        / tokens
        * 1e6,
        "cpu_us_per_token": sum(async_run.client_cpu for _, async_run in turns) / tokens * 1e6,
    }


def shown(row: dict[str, Any]) -> str:
    return (
        f"{row['requests']:4} requests: LLM {row['offline_tokens_per_second']:8.1f} tok/s, "
        f"AsyncLLM {row['async_tokens_per_second']:8.1f} tok/s, "
        f"ratio {row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f}, {row['coverage']:.0%}); "
        f"CPU in us/token: LLM {row['llm_cpu_us_per_token']:.1f}, "
        f"AsyncLLM's engine {row['engine_cpu_us_per_token']:.1f}, "
        f"this process {row['cpu_us_per_token']:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--concurrency", type=int, action="append", metavar="REQUESTS", help="default: 32 and 256"
    )
    parser.add_argument("--engine", default="process", choices=("process", "thread"))
    parser.add_argument("--max-events-per-second", type=float, default=50.0)
    add_round_options(parser)
    parser.add_argument("--threads", type=int, help="of each engine")
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    args = parser.parse_args()
    args.concurrency = args.concurrency or [32, 256]
    options = {"kv_cache_dtype": args.kv_cache_dtype, "kv_cache_memory": args.kv_cache_memory}
    options |= {"threads": args.threads} if args.threads else {}
    rows = measure(args, options)
    if args.json:
        print(json.dumps(vars(args) | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
