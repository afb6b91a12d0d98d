"""Shared parts of the drivers: arguments, figures and the JSON line. Needs no packages.

The figures are those of `freight bench latency --json`. Prefill lasts until the last of the batch
has its first token. A decode step counts if every sequence gets a token in it. One warm-up run
precedes the runs that count; medians are over runs. A driver runs in its engine's environment, so
nothing of Freight is imported.

The second half is for compare_*.py, which compare log-probabilities of first tokens: their
arguments, the prompts, Freight's answer and the differences. Only `first_tokens` imports Freight.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROMPTS = (
    *(
        "def main(",
        "class Stack:\n    def __init__(self",
        "import os\nimport",
        "for i in range(",
        "    return self.",
    ),
    *(
        "# Copyright",
        "if not isinstance(",
        "    raise ValueError(",
        "with open(path) as",
        "@property\n    def",
    ),
    *(
        "try:\n    import",
        "    for name, value in",
        "x = [",
        "def __repr__(self):\n        return",
        "while True:\n",
    ),
)
Top = dict[int, float]  # log-probability by token
# One run: seconds of each step, and the number of sequences that got a token in it
Steps = Sequence[tuple[float, int]]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser with the arguments of every driver."""
    made = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    made.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="PATH",
        help="a folder or file of the engine's form",
    )
    made.add_argument(
        "--batch-size",
        type=positive,
        default=1,
        metavar="COUNT",
        help="sequences that arrive at once",
    )
    made.add_argument(
        "--input-len", type=positive, default=128, metavar="TOKENS", help="length of a prompt"
    )
    made.add_argument(
        "--output-len",
        type=positive,
        default=33,
        metavar="TOKENS",
        help="tokens generated for each",
    )
    made.add_argument("--threads", type=positive, default=2, metavar="COUNT", help="CPU threads")
    made.add_argument(
        "--repeats", type=positive, default=3, metavar="COUNT", help="runs that count"
    )
    return made


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def random_prompts(
    args: argparse.Namespace, vocab_size: int, numbers: random.Random
) -> list[list[int]]:
    """Draw `batch_size` prompts of `input_len` token ids, new ones at every call, so that no prefix
    is found in a cache.
    """
    prompts = []
    for _ in range(args.batch_size):
        prompts.append([numbers.randrange(vocab_size) for _ in range(args.input_len)])
    return prompts


def measure(args: argparse.Namespace, run: Callable[[], Steps]) -> dict[str, Any]:
    """Call `run` once to warm up and `repeats` times; return tokens per second of prefill and
    decode, and their spread.
    """
    run()
    prefill = []
    decode = []
    for _ in range(args.repeats):
        until_first, full = split(run(), args.batch_size)
        prefill.append(args.batch_size * args.input_len / until_first)
        decode.append(args.batch_size * len(full) / sum(full))
    return figures({"prefill_tokens_per_second": prefill, "decode_tokens_per_second": decode})


def split(steps: Steps, batch_size: int) -> tuple[float, list[float]]:
    """Return (seconds until every sequence has its first token, seconds of each later step in which
    all get one).
    """
    full = [index for index, (_, sampled) in enumerate(steps) if sampled == batch_size]
    if len(full) < 2:
        sys.exit(
            f"of {batch_size} sequences the first ends before all decode together: raise --output-len"
        )
    return sum(seconds for seconds, _ in steps[: full[0] + 1]), [
        steps[index][0] for index in full[1:]
    ]


def figures(samples: dict[str, list[float]]) -> dict[str, Any]:
    """Return the median of each, and under `spread` its quartiles."""
    spread = {}
    for name, values in samples.items():
        low = high = values[0]
        if len(values) > 1:
            low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        spread[name] = {
            "median": statistics.median(values),
            "low": low,
            "high": high,
            "count": len(values),
        }
    return {name: spread[name]["median"] for name in samples} | {"spread": spread}


def report(
    args: argparse.Namespace, engine: str, version: str, ran: dict[str, Any], result: dict[str, Any]
) -> None:
    """Print the JSON line, the last on standard output."""
    asked = {
        name: getattr(args, name)
        for name in ("threads", "batch_size", "input_len", "output_len", "repeats")
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    line = {"engine": engine, "version": version, "model": args.model.name, "ran": ran}
    print(json.dumps(line | asked | result | {"peak_rss_bytes": peak}), flush=True)


def comparison(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser with the arguments of every script that quantizes a model and compares."""
    made = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    made.add_argument(
        "model",
        nargs="?",
        default="demo",
        help="a folder or 'demo', the model that ships (default)",
    )
    made.add_argument("--data", type=Path, help="calibration text; 'demo' has its own")
    return made


def first_tokens(folder: str, prompts: list[list[int]], **options: Any) -> list[Top]:
    """Return Freight's log-probabilities of the five most likely first tokens of each prompt."""
    from freight import LLM, SamplingParams

    llm = LLM(folder, kv_cache_memory="16MiB", **options)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, logprobs=5))
    results = []
    for output in outputs:
        if output.outputs[0].logprobs:
            top = output.outputs[0].logprobs[0]
            results.append({token: item.logprob for token, item in top.items()})
    return results


def differences(mine: list[Top], other: list[Top]) -> list[float]:
    """Return the largest difference of each prompt over the tokens that both name, in ascending
    order.
    """
    results = []
    for a, b in zip(mine, other, strict=True):
        results.append(max(abs(a[token] - b[token]) for token in a.keys() & b.keys()))
    return sorted(results)


def middle_and_worst(result: list[float]) -> str:
    return f"middle prompt {result[len(result) // 2]:.5f}, worst {result[-1]:.5f}"


def hide_extras(folder: Path) -> None:
    """Remove `freight` from config.json: the finer KV scales, which other readers do not see."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("freight", None)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
