"""Fill the GPU table of docs/benchmarks.md: run the benchmarks it stands on, and print aims beside what was found.

From the root of the repository, on a machine with a GPU; the package may run from source:

    PYTHONPATH=src python benchmarks/gpu_table.py --output gpu.json

Every command runs in a process of its own. Its JSON goes into the output file at once, and a command whose result is
there already does not run again, so that an interrupted run resumes. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FREIGHT = [sys.executable, "-m", "freight", "bench"]
FP8 = ("--quantization", "fp8", "--kv-cache-dtype", "fp8")
STATIC = ("--quantization", "fp8", "--kv-cache-dtype", "fp8", "--kv-scales", "unit")
BF16 = ("--dtype", "bfloat16")
BIG = ("--device", "cuda", "--batch-size", "64", "--input-len", "2048", "--output-len", "256", "--repeats", "1")
ALONE = ("--device", "cuda", "--batch-size", "1", "--input-len", "128", "--output-len", "65")
SHORT = ("--device", "cuda", "--batch-size", "1", "--input-len", "512", "--output-len", "17", "--repeats", "1")

COMMANDS: dict[str, tuple[str, ...]] = {
    "kernels": ("kernels", "--device", "cuda"),
    "8b batch 64, FP8": ("latency", "--random-weights", "llama-8b", *FP8, *BIG),
    "8b batch 64, BF16": ("latency", "--random-weights", "llama-8b", *BF16, *BIG),
    "8b batch 1, FP8": ("latency", "--random-weights", "llama-8b", *FP8, *ALONE),
    "8b batch 1, BF16": ("latency", "--random-weights", "llama-8b", *BF16, *ALONE),
    "8b, one scale": ("latency", "--random-weights", "llama-8b", *STATIC, *SHORT),
    "70b, FP8 cache": ("latency", "--random-weights", "llama-70b", *FP8, *SHORT),
    "70b, BF16 cache": ("latency", "--random-weights", "llama-70b", "--quantization", "fp8", *SHORT),
}

Results = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Line:
    """A line of the table: what was aimed at, and how it is found in the results."""

    what: str
    aim: str
    find: Callable[[Results], float | str]


def kernel(results: Results, name: str, form: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """The row of `freight bench kernels` whose format begins with `form` and whose shape begins with `shape`."""
    for row in results["kernels"]:
        if row["kernel"] == name and row["format"].startswith(form) and row["shape"][: len(shape)] == list(shape):
            return row
    raise KeyError(f"no row of {name}, {form}, {shape}")


def share(name: str, form: str, shape: tuple[int, ...]) -> Callable[[Results], float]:
    return lambda results: float(kernel(results, name, form, shape)["bandwidth_fraction"])


def faster(name: str, form: str, other: str, other_form: str, shape: tuple[int, ...]) -> Callable[[Results], float]:
    """How many times as fast the first kernel is as the second, at one shape."""

    def find(results: Results) -> float:
        slow, fast = kernel(results, other, other_form, shape), kernel(results, name, form, shape)
        return float(slow["median_us"] / fast["median_us"])

    return find


def of_run(command: str, figure: str) -> Callable[[Results], float]:
    return lambda results: float(results[command][0][figure])


def ratio(one: str, other: str, figure: str) -> Callable[[Results], float]:
    return lambda results: float(results[one][0][figure] / results[other][0][figure])


def tokens_for_the_same_bytes(command: str) -> Callable[[Results], float]:
    def find(results: Results) -> float:
        sixteen = results["8b batch 1, BF16"][0]["kv_cache"]["bytes_per_token"]
        return float(sixteen / results[command][0]["kv_cache"]["bytes_per_token"])

    return find


def of_70b(results: Results) -> str:
    fits = [results[f"70b, {cache} cache"][0]["tokens_that_fit"] for cache in ("FP8", "BF16")]
    speed = results["70b, FP8 cache"][0]["decode_tokens_per_second"]
    return f"{fits[0]:,} tokens fit, {fits[1]:,} in BF16; {speed:.1f} tokens/s"


BATCH, LONG, PREFILL, STORE, PRODUCT = (64, 1, 8192), (1, 1, 131072), (1, 8192, 8192), (8192,), (8192, 8192, 8192)
STATIC_FP8, TOKEN_FP8 = "fp8_e4m3fn, tensor", "fp8_e4m3fn, token"
FP8_PRODUCTS = "fp8_e4m3fn, tensor, FP8 products"
DYNAMIC = "fp8_e4m3fn, activations dynamic"
TABLE = (
    Line(
        "decode attention, 64 x 8 k, static scales: of the copy bandwidth",
        "0.85",
        share("attention", STATIC_FP8, BATCH),
    ),
    Line("… with a scale per token", "0.85", share("attention", TOKEN_FP8, BATCH)),
    Line("… against BF16 pages", "1.8 x", faster("attention", STATIC_FP8, "attention", "bfloat16", BATCH)),
    Line("… against FlashAttention on BF16", "1.5 x", faster("attention", STATIC_FP8, "torch.sdpa", "bfloat16", BATCH)),
    Line("decode attention, 1 x 128 k: of the copy bandwidth", "0.75", share("attention", STATIC_FP8, LONG)),
    Line(
        "prefill attention, 8 k, against FlashAttention",
        "0.8 x",
        faster("attention", STATIC_FP8, "torch.sdpa", "bfloat16", PREFILL),
    ),
    Line(
        "… computed in FP8",
        "1.2 x",
        faster("attention", "fp8_e4m3fn, tensor, FP8 products", "torch.sdpa", "bfloat16", PREFILL),
    ),
    Line(
        "rotate, quantize and store, 8 k tokens: of the copy bandwidth",
        "0.7",
        share("rotate_store", STATIC_FP8, STORE),
    ),
    Line(
        "FP8 product, 8192³, activations quantized, against BF16",
        "1.6 x",
        faster("linear", DYNAMIC, "torch.linear", "bfloat16", PRODUCT),
    ),
    Line(
        "torch._scaled_mm alone, full sums",
        "",
        faster("torch._scaled_mm", "fp8_e4m3fn", "torch.linear", "bfloat16", PRODUCT),
    ),
    Line(
        "torch._scaled_mm alone, fast sums",
        "",
        faster("torch._scaled_mm", "fp8_e4m3fn, fast", "torch.linear", "bfloat16", PRODUCT),
    ),
    Line(
        "llama-8b, batch 64, decode, FP8 against BF16",
        "1.6 x",
        ratio("8b batch 64, FP8", "8b batch 64, BF16", "decode_tokens_per_second"),
    ),
    Line(
        "llama-8b, batch 64, prefill, FP8 against BF16",
        "1.3 x",
        ratio("8b batch 64, FP8", "8b batch 64, BF16", "prefill_tokens_per_second"),
    ),
    Line("tokens for the same bytes, static scales", "2 x", tokens_for_the_same_bytes("8b, one scale")),
    Line("tokens for the same bytes, a scale per token", "1.96 x", tokens_for_the_same_bytes("8b batch 1, FP8")),
    Line("llama-8b, batch 1, decode: of the bandwidth", "0.7", of_run("8b batch 1, FP8", "decode_bandwidth_fraction")),
    Line("llama-70b on one card", "runs", of_70b),
)


def run(words: tuple[str, ...], seconds: float) -> list[dict[str, Any]]:
    """The JSON lines that a command prints; a line with `error` where it fails."""
    try:
        ended = subprocess.run(
            [*FREIGHT, *words, "--json"], capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return [{"error": f"took more than {seconds:.0f} s"}]
    if ended.returncode:
        return [{"error": f"exit status {ended.returncode}: {ended.stderr.strip()[-1000:]}"}]
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


def table(results: Results) -> list[str]:
    lines = ["| | aim | found |", "|---|---:|---:|"]
    for line in TABLE:
        try:
            found = line.find(results)
        except (KeyError, IndexError):  # not measured, or failed
            found = "not measured"
        text = f"{found:.2f}" + (" x" if line.aim.endswith("x") else "") if isinstance(found, float) else found
        lines.append(f"| {line.what} | {line.aim} | {text} |")
    return lines


def main() -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    made.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="results as JSON; read first if it exists"
    )
    made.add_argument("--only", action="append", choices=sorted(COMMANDS), metavar="NAME", help="may be repeated")
    made.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="for one command")
    args = made.parse_args()
    results: Results = json.loads(args.output.read_text()) if args.output.exists() else {}
    for name, words in COMMANDS.items():
        if (args.only and name not in args.only) or (name in results and "error" not in results[name][0]):
            continue
        print(f"{name}: freight bench {' '.join(words)}", file=sys.stderr, flush=True)
        results[name] = run(words, args.timeout)
        if "error" in results[name][0]:
            print(f"  {results[name][0]['error']}", file=sys.stderr, flush=True)
        args.output.write_text(json.dumps(results, indent=1))
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
