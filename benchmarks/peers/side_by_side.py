"""Run Freight and other engines in alternation on one machine; print medians and ratios as a table.

Every figure comes from a separate process, in the environment of its engine. A round runs every
engine once on one workload, and the next round starts with another engine: the speed of a shared
machine changes within minutes, so results that are compared are measured close together in time.
Medians are over rounds; a ratio is taken within each round first. An engine that fails keeps its
row, which gives the reason, and the others continue.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FIGURES = {"prefill": "prefill_tokens_per_second", "decode": "decode_tokens_per_second"}
BASE = "freight-fp8"  # the row that the others are compared with, unless --base names another
WORKLOADS = {
    "short": ("1x128+33", "8x128+33", "32x128+33", "1x1024+9"),
    # Decoding with keys and values that take more memory than the weights
    "long": ("1x16384+65", "8x4096+65"),
    "many": ("64x128+33", "256x32+33"),
}
LONGEST_REASON = 200  # characters of an error in the table; the JSON file has it all


@dataclass(frozen=True)
class Peer:
    """A row of the table. `environment` is a name for --engine, None for Freight itself; `model` is
    in --models.
    """

    label: str
    environment: str | None
    driver: str
    model: str
    arguments: tuple[str, ...] = ()


PEERS = {
    BASE: Peer("Freight FP8", None, "", "hf", ("--quantization", "fp8", "--kv-cache-dtype", "fp8")),
    "freight-int4": Peer("Freight INT4", None, "", "hf-int4", ("--kv-cache-dtype", "fp8")),
    "freight-int4-32": Peer(
        "Freight INT4, groups of 32", None, "", "hf-int4-32", ("--kv-cache-dtype", "fp8")
    ),
    "freight-int4-inputs16": Peer(
        "Freight INT4, inputs in 16 bits",
        None,
        "",
        "hf-int4",
        ("--kv-cache-dtype", "fp8", "--activations", "bfloat16"),
    ),
    "freight-int8": Peer("Freight INT8", None, "", "hf-int8", ("--kv-cache-dtype", "fp8")),
    "freight-bf16": Peer("Freight BF16", None, "", "hf", ("--dtype", "bfloat16")),
    "freight-q4_0": Peer("Freight, the same Q4_0", None, "", "q4_0.gguf"),
    "freight-q4_k_m": Peer("Freight, the same Q4_K_M", None, "", "q4_k_m.gguf"),
    "freight-q8_0": Peer("Freight, the same Q8_0", None, "", "q8_0.gguf"),
    "llama.cpp-q8_0": Peer("llama.cpp Q8_0", "llama_cpp", "run_llama_cpp.py", "q8_0.gguf"),
    "llama.cpp-q4_k_m": Peer(
        "llama.cpp Q4_K_M (5 bits a weight)", "llama_cpp", "run_llama_cpp.py", "q4_k_m.gguf"
    ),
    "llama.cpp-avx2-q8_0": Peer(
        "llama.cpp Q8_0, built for AVX2", "xllamacpp", "run_xllamacpp.py", "q8_0.gguf"
    ),
    "llama.cpp-avx2-q4_0": Peer(
        "llama.cpp Q4_0, built for AVX2", "xllamacpp", "run_xllamacpp.py", "q4_0.gguf"
    ),
    "llama.cpp-avx2-q4_k_m": Peer(
        "llama.cpp Q4_K_M, built for AVX2", "xllamacpp", "run_xllamacpp.py", "q4_k_m.gguf"
    ),
    "openvino-paged": Peer("OpenVINO INT8 (paged)", "openvino", "run_openvino.py", "openvino-int8"),
    "openvino-sdpa": Peer(
        "OpenVINO INT8 (sdpa)",
        "openvino",
        "run_openvino.py",
        "openvino-int8",
        ("--attention", "sdpa"),
    ),
    "vllm-bf16": Peer("vLLM BF16", "vllm", "run_vllm.py", "hf"),
    "vllm-int8": Peer("vLLM INT8 W8A8", "vllm", "run_vllm.py", "hf-int8"),
    "torch-bf16": Peer("torch BF16 products alone", "torch", "run_torch.py", "hf"),
}
ENVIRONMENTS = sorted({peer.environment for peer in PEERS.values() if peer.environment})


@dataclass(frozen=True)
class Workload:
    batch_size: int
    input_len: int
    output_len: int

    @staticmethod
    def parse(text: str) -> list[Workload]:
        """Parse `8x128+33`, sequences, prompt tokens and generated tokens, or a name of WORKLOADS."""
        if text in WORKLOADS:
            return [item for known in WORKLOADS[text] for item in Workload.parse(known)]
        match = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", text)
        if not match:
            raise argparse.ArgumentTypeError(
                f"{text!r}: write {', '.join(WORKLOADS)}, or SEQUENCESxPROMPT+GENERATED, for example 8x128+33"
            )
        return [Workload(*map(int, match.groups()))]

    def __str__(self) -> str:
        return f"{self.batch_size}x{self.input_len}+{self.output_len}"


def named_path(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if name not in ENVIRONMENTS or not path:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write NAME=PYTHON with a name of {', '.join(ENVIRONMENTS)}"
        )
    return name, path


def chosen(args: argparse.Namespace) -> list[str]:
    """Return the rows to measure: those asked for, or all whose environment is given."""
    given = {None, *dict(args.engine)}
    return [
        name
        for name, peer in PEERS.items()
        if peer.environment in given and name in (args.peers or PEERS)
    ]


def commands(args: argparse.Namespace, workload: Workload) -> dict[str, list[str]]:
    """Return the command line of each row."""
    common = {**asdict(workload), "threads": args.threads, "repeats": args.repeats}
    options = [
        word
        for name, value in common.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    interpreters = dict(args.engine)
    results = {}
    for name in chosen(args):
        peer = PEERS[name]
        model = str(args.models / peer.model)
        if peer.environment is None:
            program = [args.freight, "bench", "latency", model, "--json"]
        else:
            program = [interpreters[peer.environment], str(HERE / peer.driver), "--model", model]
        results[name] = [*program, *options, *peer.arguments]
        if peer.environment is None and args.kv_cache_dtype:
            results[name] += ["--kv-cache-dtype", args.kv_cache_dtype]  # the last one counts
    return results


def run(command: list[str], seconds: float) -> dict[str, Any]:
    return run_json(command, seconds, FIGURES.values())


def run_json(command: list[str], seconds: float, figures: Iterable[str]) -> dict[str, Any]:
    """Run a command; return its last line of output as JSON, or an object with `error`.

    It is an error if one of `figures` is missing or not above 0.
    """
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {seconds:.0f} s"}
    except OSError as error:
        return {"error": str(error)}
    try:
        result = json.loads(ended.stdout.strip().splitlines()[-1])
        if ended.returncode == 0 and all(result[figure] > 0 for figure in figures):
            return result
    except (IndexError, KeyError, TypeError, ValueError):
        pass
    status = f"exit status {ended.returncode}"
    if ended.returncode < 0:
        status = f"killed by {signal.Signals(-ended.returncode).name}"
    return {"error": f"{status}: {ended.stderr.strip()[-2000:]}".rstrip(": ")}


def reason(error: str) -> str:
    """Shorten an error to one cell of a table: its status and the last line."""
    lines = error.splitlines()
    short = lines[0] if len(lines) == 1 else f"{lines[0].partition(':')[0]}: {lines[-1].strip()}"
    return short.replace("|", "/")[:LONGEST_REASON]


def table(results: list[dict[str, Any]], workload: str, base: str) -> list[str]:
    """Return Markdown lines: per engine the median over rounds, and the factor by which the row
    `base` was faster.
    """
    rounds: dict[str, dict[int, dict[str, Any]]] = {}
    errors: dict[str, str] = {}
    for item in results:
        if item["workload"] == workload:
            succeeded = rounds.setdefault(item["engine"], {})
            if "error" in item["found"]:
                errors[item["engine"]] = item["found"]["error"]
            else:
                succeeded[item["round"]] = item["found"]
    ours = rounds.get(base, {})
    lines = [
        f"### {workload}",
        "",
        f"| engine | prefill tok/s | decode tok/s | {PEERS[base].label} ÷ it, prefill | decode | runs |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, result in rounds.items():
        label = PEERS[name].label
        if not result:
            lines.append(f"| {label} | failed | {reason(errors[name])} | | | 0 |")
            continue
        medians = []
        ratios = []
        for figure in FIGURES.values():
            medians.append(f"{statistics.median(item[figure] for item in result.values()):.1f}")
            shared = [
                ours[number][figure] / item[figure]
                for number, item in result.items()
                if number in ours
            ]
            ratios.append(f"{statistics.median(shared):.2f}" if shared else "")
        failed = f", then {reason(errors[name])}" if name in errors else ""
        lines.append(
            f"| {label} | {' | '.join(medians)} | {' | '.join(ratios)} | {len(result)}{failed} |"
        )
    return [*lines, ""]


def machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Return the processor's name, the cores that this process may use, and the vector and matrix
    units that matter here.
    """
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    fields = dict(re.findall(r"^(model name|flags)\s*: (.*)$", text, re.MULTILINE))
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "amx_fp16")
    units = [unit for unit in wanted if unit in fields.get("flags", "").split()]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"processor": fields.get("model name", "unknown"), "cores": cores, "units": units}


def versions(results: list[dict[str, Any]], freight: str) -> list[str]:
    """Return Freight's version with the kernels that ran, and those that the drivers reported, each
    once.
    """
    outcome = [item["found"] for item in results]
    kernels = sorted({str(item["kernels"]) for item in outcome if "kernels" in item})
    ours = []
    if kernels:
        asked = subprocess.run([freight, "--version"], capture_output=True, text=True, check=False)
        ours.append(f"Freight {asked.stdout.strip()}, kernels {', '.join(kernels)}")
    return [*ours, *sorted({str(item["version"]) for item in outcome if "version" in item})]


def measure(
    args: argparse.Namespace, record: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Run every round of every workload; `record` gets all results after each run, so that an
    interruption loses none.
    """
    results: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for workload in args.workload:
            todo = list(commands(args, workload).items())
            turn = number % len(todo)
            for name, command in todo[turn:] + todo[:turn]:
                result = run(command, args.timeout)
                results.append(
                    {"round": number, "workload": str(workload), "engine": name, "found": result}
                )
                short = reason(result["error"]) if "error" in result else ""
                short = short or ", ".join(
                    f"{figure} {result[key]:.1f}" for figure, key in FIGURES.items()
                )
                print(
                    f"round {number + 1}, {workload}, {PEERS[name].label}: {short}",
                    file=sys.stderr,
                    flush=True,
                )
                record(results)
    return results


def arguments() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    made.add_argument(
        "--models", type=Path, required=True, help="the folder with the models of README.md"
    )
    made.add_argument(
        "--freight", default="freight", help="Freight's command (default: the one on PATH)"
    )
    made.add_argument(
        "--engine", type=named_path, action="append", default=[], metavar="NAME=PYTHON",
        help=f"an engine and the interpreter of its environment; may be repeated: {', '.join(ENVIRONMENTS)}",
    )  # fmt: skip
    made.add_argument(
        "--peers", nargs="+", choices=PEERS, metavar="ROW",
        help=f"rows to measure, default all of the engines given: {', '.join(PEERS)}",
    )  # fmt: skip
    made.add_argument(
        "--base", choices=PEERS, default=BASE, metavar="ROW",
        help=f"the row that the others are compared with (default {BASE})",
    )  # fmt: skip
    made.add_argument(
        "--workload", type=Workload.parse, nargs="+", default=[Workload.parse("short")],
        metavar="SEQUENCESxPROMPT+GENERATED",
        help="batch sizes and lengths in tokens, or a name: "
        + "; ".join(f"{name} (= {' '.join(known)})" for name, known in WORKLOADS.items()) + "; default short",
    )  # fmt: skip
    made.add_argument(
        "--kv-cache-dtype", metavar="DTYPE",
        help="the cache of all of Freight's rows, such as bfloat16, instead of each row's own",
    )  # fmt: skip
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--repeats", type=int, default=3, help="runs that count in each process")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument(
        "--timeout", type=float, default=600, metavar="SECONDS", help="for one process"
    )
    made.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="where every result goes, as JSON",
    )
    return made


def main() -> None:
    parser = arguments()
    args = parser.parse_args()
    args.workload = [item for named in args.workload for item in named]
    missing = sorted(
        {PEERS[name].environment for name in args.peers or ()} - {None, *dict(args.engine)}
    )
    if missing:
        parser.error(
            f"--peers needs the environment of {', '.join(missing)}: add --engine {missing[0]}=PYTHON"
        )
    here = machine()

    def record(results: list[dict[str, Any]]) -> None:
        args.output.write_text(
            json.dumps({"machine": here, "results": results}, indent=1), encoding="utf-8"
        )

    results = measure(args, record)
    print(
        f"{here['processor']}, {here['cores']} cores with {' '.join(here['units'])}; {args.threads} threads\n"
    )
    print("\n".join(f"- {version}" for version in versions(results, args.freight)) + "\n")
    for workload in args.workload:
        print("\n".join(table(results, str(workload), args.base)))


if __name__ == "__main__":
    main()
