"""Measure requests per second where the memory of the KV cache binds: Freight and vLLM, each with a
16-bit and an FP8 cache of equal size, in alternation.

All requests arrive at once. Their lengths are those of `freight bench throughput`, the same for all
engines: evenly from half to one and a half times the ones given. The weights are what the folder
holds, the same for all. Every figure comes from a process of its own, and each round begins with
another engine. A ratio is taken within a round, and its interval is that of order statistics for
the median. Run it in Freight's environment.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from side_by_side import HERE, machine, run_json

from freight.lab.bench.serving_figures import interval
from freight.lab.bench.throughput import draw_lengths
from freight.settings.resolve import parse_memory

BASE = "freight-fp8"  # what the others are compared with
LABELS = {
    "freight-auto": "Freight, bfloat16",
    BASE: "Freight, fp8_e4m3fn",
    "vllm-auto": "vLLM, bfloat16 (`auto`)",
    "vllm-fp8": "vLLM, `fp8`",
}


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command line of each row."""
    lengths = draw_lengths(args.num_requests, args.input_len, args.output_len, random.Random(0))
    results = {}
    for cache in ("auto", "fp8"):
        options = [
            *("--kv-cache-dtype", cache),
            *("--kv-cache-memory", str(parse_memory(args.kv_cache_memory))),
            *("--threads", str(args.threads)),
        ]
        results[f"freight-{cache}"] = [
            *(args.freight, "bench", "throughput", str(args.model), "--json"),
            *("--num-requests", str(args.num_requests)),
            *("--input-len", str(args.input_len), "--output-len", str(args.output_len)),
            *("--max-num-seqs", str(args.num_requests)),
            *options,
        ]
        if args.vllm:
            results[f"vllm-{cache}"] = [
                *(args.vllm, str(HERE / "run_vllm.py"), "--model", str(args.model)),
                *("--requests", json.dumps(lengths)),
                *options,
            ]
    return results


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every row once a round. Every result is written as it comes."""
    results: list[dict[str, Any]] = []
    todo = list(commands(args).items())
    for number in range(args.rounds):
        first = number % len(todo)
        for name, command in todo[first:] + todo[:first]:
            result = run_json(command, args.timeout, ["requests_per_second"])
            results.append({"round": number, "row": name, "found": result})
            summary = result.get("error") or f"{result['requests_per_second']:.4f} requests/s"
            print(f"round {number + 1}, {LABELS[name]}: {summary}", file=sys.stderr, flush=True)
            args.output.write_text(
                json.dumps({"machine": machine(), "results": results}, indent=1), encoding="utf-8"
            )
    return results


def table(results: list[dict[str, Any]]) -> list[str]:
    """Return Markdown lines: the median of each row, and how many times as fast Freight with its FP8
    cache was.
    """
    lines = [
        "| engine, KV cache | requests/s | peak memory, MiB | Freight with FP8 ÷ it | interval |",
        "|---|---:|---:|---:|---|",
    ]
    rates: dict[str, dict[int, float]] = {}
    peaks: dict[str, list[float]] = {}
    for result in results:
        if "error" not in result["found"]:
            rates.setdefault(result["row"], {})[result["round"]] = result["found"][
                "requests_per_second"
            ]
            peaks.setdefault(result["row"], []).append(result["found"]["peak_rss_bytes"] / 2**20)
    for row, label in LABELS.items():
        if row not in rates:
            continue
        shared = rates[row].keys() & rates.get(BASE, {}).keys()
        ratios = [rates[BASE][number] / rates[row][number] for number in shared]
        ratio = "1 | "
        if row != BASE and ratios:
            low, high, coverage = interval(ratios)
            ratio = f"{statistics.median(ratios):.2f} | {low:.2f} to {high:.2f} ({coverage:.0%})"
        rate = statistics.median(rates[row].values())
        lines.append(f"| {label} | {rate:.4f} | {statistics.median(peaks[row]):.0f} | {ratio} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--freight", default="freight", help="Freight's command (default: PATH's)")
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter of vLLM's environment")
    parser.add_argument("--num-requests", type=int, default=8, metavar="COUNT")
    parser.add_argument("--input-len", type=int, default=8192, metavar="TOKENS")
    parser.add_argument("--output-len", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--kv-cache-memory", default="144MiB", metavar="SIZE")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=1200, metavar="SECONDS")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON")
    args = parser.parse_args()
    results = measure(args)
    here = machine()
    print(f"{here['processor']}, {here['cores']} cores with {' '.join(here['units'])}\n")
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
