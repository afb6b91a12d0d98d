"""Make the demo model's tables for any model: cost of FP8, gain of the cache, speed. Run by `make real`.

    python tools/real_tables.py MODEL [--data FILE] [--tokens 8192] [--requests 64] [--repeats 3] [--out real]

MODEL is a folder or the name of a model on the Hugging Face hub, which is downloaded, or a GGUF file. Each table is
printed after the `freight` command that makes it, and both go into OUT/tables.md, next to
OUT/report and OUT/cache-gain.svg. A command that fails leaves its error there, the others run, and
the exit status is 1. The sizes of cache memory depend on the model: room for two requests, where
memory is the limit, and for all of them, where it is not.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from freight.errors import FreightError
from freight.lab.evaluate.report import plain_config
from freight.model.open import open_model
from freight.settings.engine import EngineArgs

HELD_OUT = Path(__file__).parent.parent / "src" / "freight" / "demo" / "heldout.txt"
INPUT = 256  # tokens of a request, as in docs/benchmarks.md
OUTPUT = 64
FREIGHT = [sys.executable, "-m", "freight"]


@dataclass(frozen=True)
class Sizes:
    """Amounts that are measured: tokens of text; requests of the throughput, and runs of each
    setting.
    """

    tokens: int
    requests: int
    repeats: int


def cache_memories(bytes_per_token: int, block_size: int, requests: int) -> tuple[int, int]:
    """Return bytes of a 16-bit cache: for two requests but not three, and for all of them."""
    request = (-(-(INPUT + OUTPUT) // block_size) + 1) * block_size * bytes_per_token
    return 2 * request, max(requests, 3) * request


def commands(
    model: str, data: Path, out: Path, sizes: Sizes, memories: Sequence[int], on_cpu: bool
) -> list[tuple[str, list[str]]]:
    """Return (heading, arguments of `freight`) of each table."""
    text = ["--data", str(data), "--max-tokens", str(sizes.tokens)]
    cost = ["evaluate", "caches", model, *text, "--no-speed"]
    gain = [
        "bench",
        "throughput",
        model,
        "--num-requests",
        str(sizes.requests),
        "--repeats",
        str(sizes.repeats),
    ]
    gain += [
        "--input-len",
        str(INPUT),
        "--output-len",
        str(OUTPUT),
        "--compare",
        "auto",
        "--compare",
        "fp8",
    ]
    gain += [part for memory in memories for part in ("--compare-memory", str(memory))]
    speed = ["bench", "latency", model, "--repeats", str(sizes.repeats)]
    return [
        ("What the FP8 cache costs", [*cost, "--report", str(out / "report")]),
        *([("What an INT8 cache costs", [*cost, "--kv-cache-dtype", "int8"])] if on_cpu else []),
        ("What the cache alone gains", [*gain, "--picture", str(out / "cache-gain.svg")]),
        ("Latency, weights as stored, a cache of 16 bits", speed),
        (
            "Latency, FP8 weights and cache",
            [*speed, "--quantization", "fp8", "--kv-cache-dtype", "fp8"],
        ),
    ]


def run(arguments: Sequence[str]) -> tuple[bool, str]:
    """Run `freight ARGUMENTS`; return whether it succeeded, and its output, with the error if it
    failed.
    """
    wide = {**os.environ, "COLUMNS": "120"}  # tables fit themselves to the terminal's width
    done = subprocess.run([*FREIGHT, *arguments], capture_output=True, text=True, env=wide)
    return done.returncode == 0, done.stdout if done.returncode == 0 else done.stdout + done.stderr


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="a folder, a GGUF file, or OWNER/NAME on the hub")
    parser.add_argument(
        "--data", type=Path, default=HELD_OUT, help="text to judge by (default: the demo's)"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of the text (default 8192)")
    parser.add_argument("--requests", type=int, default=64, help="of the throughput (default 64)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each setting (default 3)")
    parser.add_argument(
        "--out", type=Path, default=Path("real"), help="folder of the results (default real)"
    )
    args = parser.parse_args(argv)
    if not args.model:
        parser.error("no model is named: make real MODEL=OWNER/NAME, or a folder")
    if not args.data.is_file():
        parser.error(
            f"--data {args.data} is no file; give a text that the model was not trained on"
        )
    try:
        opened = open_model(EngineArgs(model=args.model))
        config = plain_config(opened)
    except FreightError as error:
        raise SystemExit(f"real_tables.py: {error}") from None
    memories = cache_memories(
        opened.cache_spec(config).bytes_per_token, config.block_size, args.requests
    )
    sizes = Sizes(args.tokens, args.requests, args.repeats)
    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with (args.out / "tables.md").open("w", encoding="utf-8") as tables:
        for heading, arguments in commands(
            args.model, args.data, args.out, sizes, memories, config.device == "cpu"
        ):
            begin = f"## {heading}\n\n    freight {shlex.join(arguments)}\n"
            print(begin, flush=True)
            succeeded, output = run(arguments)
            print(output, flush=True)
            tables.write(f"{begin}\n{output.strip()}\n\n")
            failed += not succeeded
    print(f"{args.out / 'tables.md'}: the tables above")
    if failed:
        raise SystemExit(f"real_tables.py: {failed} of the commands failed; their errors are above")


if __name__ == "__main__":
    main()
