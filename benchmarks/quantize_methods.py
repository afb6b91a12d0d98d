"""What 4 bits cost by each method of `freight quantize --method`: KL over a text, time, memory.

    python benchmarks/quantize_methods.py MODEL FOLDER --judge FILE --calibration FILE [--json FILE]

MODEL is a folder in 16 bits. Each method quantizes it into FOLDER/NAME, unless that is there already,
by the command of a user; then `freight evaluate caches --weights` judges all of them in one run, with
a 16-bit cache and with E4M3 per token. FOLDER/seconds.json keeps the time and the peak memory of each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from freight.base.fields import JsonDict
from freight.base.files import read_object, write_whole

FREIGHT = [sys.executable, "-m", "freight"]
METHODS = ("nearest", "gptq", "awq", "awq,gptq", "rotation", "rotation,gptq")
NEAREST = "nearest"


@dataclass(frozen=True)
class Cost:
    """What making a checkpoint took. `peak_bytes` is the largest resident memory."""

    seconds: float
    peak_bytes: int
    bytes_after: int


def named(method: str) -> str:
    return method.replace(",", "-")


def run(command: Sequence[str]) -> tuple[str, float, int]:
    """Return (what the command printed, seconds, peak memory in bytes). Raises CalledProcessError."""
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return output, time.perf_counter() - begin, usage.ru_maxrss * 1024


def quantize(args: argparse.Namespace, method: str) -> Cost:
    """Write FOLDER/NAME."""
    out = args.folder / named(method)
    command = [*FREIGHT, "quantize", args.model, str(out), "--weights", args.weights, "--json"]
    if args.group_size:
        command += ["--group-size", str(args.group_size)]
    if method != NEAREST:
        command += ["--method", method]
    if method not in (NEAREST, "rotation"):
        command += ["--calibration-data", args.calibration, "--num-samples", str(args.num_samples)]
        command += ["--max-seq-len", str(args.max_seq_len)]
    output, seconds, peak = run(command)
    return Cost(seconds, peak, json.loads(output)["bytes_after"])


def costs(args: argparse.Namespace) -> dict[str, JsonDict]:
    """Quantize what is not there yet; return what each took."""
    costs_file = args.folder / "seconds.json"
    known: dict[str, Any] = read_object(costs_file) if costs_file.exists() else {}
    for method in args.methods:
        if (args.folder / named(method)).exists() and method in known:
            continue
        shutil.rmtree(args.folder / named(method), ignore_errors=True)
        print(f"{method} …", file=sys.stderr, flush=True)
        known[method] = asdict(quantize(args, method))
        write_whole(costs_file, json.dumps(known, indent=1))
    return known


def judge(args: argparse.Namespace) -> JsonDict:
    """Judge all checkpoints in one run."""
    folders = [str((args.folder / named(method)).resolve()) for method in args.methods]
    command = [*FREIGHT, "evaluate", "caches", args.model, "--caches", "token", "--no-speed"]
    command += ["--weights", ",".join(folders), "--data", args.judge, "--json"]
    command += ["--max-tokens", str(args.tokens), "--window", str(args.window)]
    output, _, _ = run(command)
    facts: JsonDict = json.loads(output)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--judge", required=True, help="text that is judged")
    parser.add_argument("--calibration", required=True, help="text that methods look at")
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--max-seq-len", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=341)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    took = costs(args)
    facts = judge(args)
    rows = []
    for method in args.methods:
        of_method = [row for row in facts["runs"] if row["weights"] == named(method)]
        rows.append({"method": method, "cost": took[method], "runs": of_method})
    result = {
        "weights": args.weights,
        "group_size": args.group_size,
        "num_samples": args.num_samples,
        "max_seq_len": args.max_seq_len,
        "rows": rows,
        "evaluation": facts,
    }
    if args.json is not None:
        write_whole(args.json, json.dumps(result, indent=1))
    for row in rows:
        for figures in row["runs"]:
            print(
                row["method"],
                figures["name"],
                f"KL {figures['kl_mean']:.4f}",
                row["cost"]["seconds"],
            )


if __name__ == "__main__":
    main()
