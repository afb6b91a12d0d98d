"""Run Freight and other engines in alternation on one machine, and print medians and ratios as a Markdown table.

Every figure comes from a process of its own, in the environment of its engine. A round runs every engine once on one
workload, and the next round starts with another engine, because a machine that others use too gets faster and slower:
what is compared stands close together in time. Medians are over rounds; ratios are taken within a round first.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FP8 = ("--quantization", "fp8", "--kv-cache-dtype", "fp8")
FREIGHT = {"Freight FP8": FP8, "Freight BF16": ("--dtype", "bfloat16")}
FIGURES = {"prefill": "prefill_tokens_per_second", "decode": "decode_tokens_per_second"}


@dataclass(frozen=True)
class Peer:
    """A driver in this folder, the model's name in the folder of models, and arguments of its own."""

    environment: str
    driver: str
    model: str
    arguments: tuple[str, ...] = ()


PEERS = {
    "llama.cpp Q8_0": Peer("llama_cpp", "run_llama_cpp.py", "q8_0.gguf"),
    "OpenVINO INT8 (paged)": Peer("openvino", "run_openvino.py", "openvino-int8"),
    "OpenVINO INT8 (sdpa)": Peer("openvino", "run_openvino.py", "openvino-int8", ("--attention", "sdpa")),
    "vLLM BF16": Peer("vllm", "run_vllm.py", "hf"),
    "torch BF16 products alone": Peer("torch", "run_torch.py", "hf"),
}


@dataclass(frozen=True)
class Workload:
    batch_size: int
    input_len: int
    output_len: int

    @staticmethod
    def parse(text: str) -> Workload:
        """From `8x128+33`: sequences, prompt tokens, generated tokens."""
        batch_size, _, lengths = text.partition("x")
        input_len, _, output_len = lengths.partition("+")
        return Workload(int(batch_size), int(input_len), int(output_len))

    def __str__(self) -> str:
        return f"{self.batch_size}x{self.input_len}+{self.output_len}"


def named_path(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    known = sorted({peer.environment for peer in PEERS.values()})
    if name not in known or not path:
        raise argparse.ArgumentTypeError(f"{text}: write NAME=PYTHON with a name of {', '.join(known)}")
    return name, path


def commands(args: argparse.Namespace, workload: Workload) -> dict[str, list[str]]:
    """What to run for each engine asked for, by its name in the table."""
    common = {
        "--batch-size": workload.batch_size,
        "--input-len": workload.input_len,
        "--output-len": workload.output_len,
        "--threads": args.threads,
        "--repeats": args.repeats,
    }
    options = [str(word) for pair in common.items() for word in pair]
    freight = [args.freight, "bench", "latency", str(args.models / "hf")]
    found = {name: [*freight, *words, *options, "--json"] for name, words in FREIGHT.items()}
    interpreters = dict(args.engine)
    for name, peer in PEERS.items():
        if peer.environment in interpreters:
            model = args.models / peer.model
            program = [interpreters[peer.environment], str(HERE / peer.driver), "--model", str(model)]
            found[name] = [*program, *options, *peer.arguments]
    return found


def run(command: list[str], seconds: float) -> dict[str, Any]:
    """The last line of standard output, as JSON; an object with `error` where there is none."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {seconds:.0f} s"}
    try:
        return json.loads(ended.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": f"exit status {ended.returncode}: {ended.stderr.strip()[-500:]}"}


def table(results: list[dict[str, Any]], workload: str) -> list[str]:
    """Markdown lines: per engine the median over rounds, and how many times as fast Freight in FP8 was."""
    rounds: dict[str, dict[int, dict[str, Any]]] = {}
    for one in results:
        if one["workload"] == workload and "error" not in one["found"]:
            rounds.setdefault(one["engine"], {})[one["round"]] = one["found"]
    ours = rounds.get("Freight FP8", {})
    lines = [
        f"### {workload}",
        "",
        "| engine | prefill tok/s | decode tok/s | Freight FP8 ÷ it, prefill | decode | runs |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for engine, found in rounds.items():
        medians, ratios = [], []
        for figure in FIGURES.values():
            medians.append(f"{statistics.median(one[figure] for one in found.values()):.1f}")
            shared = [ours[number][figure] / one[figure] for number, one in found.items() if number in ours]
            ratios.append(f"{statistics.median(shared):.2f}" if shared else "")
        lines.append(f"| {engine} | {' | '.join(medians)} | {' | '.join(ratios)} | {len(found)} |")
    return [*lines, ""]


def main() -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    made.add_argument("--models", type=Path, required=True, help="the folder with hf, q8_0.gguf and openvino-int8")
    made.add_argument("--freight", default="freight", help="Freight's command (default: the one on PATH)")
    made.add_argument("--engine", type=named_path, action="append", default=[], metavar="NAME=PYTHON")
    made.add_argument("--workload", action="append", metavar="BATCHxINPUT+OUTPUT", help="may be repeated")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--repeats", type=int, default=3, help="runs that count in each process")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="for one process")
    made.add_argument("--output", type=Path, required=True, metavar="FILE", help="where every result goes, as JSON")
    args = made.parse_args()
    workloads = [Workload.parse(text) for text in args.workload or ("1x128+33", "8x128+33", "1x1024+9")]
    results: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for workload in workloads:
            todo = list(commands(args, workload).items())
            turn = number % len(todo)
            for engine, command in todo[turn:] + todo[:turn]:
                found = run(command, args.timeout)
                results.append({"round": number, "workload": str(workload), "engine": engine, "found": found})
                short = found.get("error") or ", ".join(f"{name} {found[key]:.1f}" for name, key in FIGURES.items())
                print(f"round {number + 1}, {workload}, {engine}: {short}", file=sys.stderr, flush=True)
                args.output.write_text(json.dumps({"machine": platform.processor(), "results": results}, indent=1))
    for workload in workloads:
        print("\n".join(table(results, str(workload))))


if __name__ == "__main__":
    main()
