"""Compare the speed of two checkouts of Freight in alternation: prefill and decode of one model.

    python benchmarks/two_checkouts.py --old ENV/bin/python=OLD/src --new .venv/bin/python=src --pairs 24 \
        --workload 1x128+33 --workload 8x128+33 [--options '{"quantization": "fp8", "kv_cache_dtype": "fp8"}']

--old-options override --options for the old one alone: with the same checkout twice, two settings
are compared.

With `--kernel attention` instead of workloads it compares the rows of `freight bench kernels --only
attention --seconds 0.05`, with a new process for each run.

Each checkout is an interpreter and the folder of its sources, with its kernels compiled. The
interpreter of an editable install finds that install's sources first, so another checkout needs its
own environment. Both hold their model in their own process, restarted every `--restart` pairs: the
address of a process's memory changes speed by a percent or two. A workload is
BATCHxPROMPT+GENERATED tokens. Ratios are of speed, taken within a pair; their interval is that of
order statistics, of at least 95 %.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

from line_process import LineProcess

Workload = tuple[int, int, int]
Run = dict[str, float]  # "prefill" and "decode step": seconds


def from_checkout(name: str, *modules: str) -> Any:
    """Return what a checkout has under `name`, in the first of `modules` that it has."""
    for module in modules:
        with suppress(ImportError, AttributeError):
            return getattr(import_module(f"freight.{module}"), name)
    raise ImportError(f"{name} is in none of {', '.join(modules)}")


def work(shape: str, options: dict[str, Any], largest: Workload) -> None:
    """Run workloads in a checkout's own process: one run for each line, which is a workload."""
    start_engine = from_checkout("start_engine", "engine.build")
    open_random = from_checkout("open_random", "model.open", "models.open", "engine.build")
    drive = from_checkout("drive", "lab.bench.drive", "bench.drive")
    greedy = from_checkout("greedy", "lab.bench.drive", "bench.drive")
    random_prompt = from_checkout("random_prompt", "lab.bench.drive", "bench.drive")
    split = from_checkout("split", "lab.bench.latency", "bench.latency")
    EngineArgs = from_checkout("EngineArgs", "settings.engine", "config.engine")  # noqa: N806
    batch, prompt, generated = largest
    args = EngineArgs(
        max_num_seqs=batch, max_model_len=prompt + generated, skip_tokenizer_init=True, **options
    )
    engine, _ = start_engine(open_random(args, shape))
    numbers = random.Random(0)
    vocabulary = engine.runner.model.config.vocab_size
    print("ready", flush=True)
    for line in sys.stdin:
        batch, prompt, generated = json.loads(line)
        prompts = [random_prompt(prompt, vocabulary, numbers) for _ in range(batch)]
        first, steps = split(drive(engine, prompts, [greedy(generated)] * batch), batch)
        print(
            json.dumps(
                {"prefill": first, "decode step": statistics.median(step.seconds for step in steps)}
            ),
            flush=True,
        )


def interpreter(where: str) -> tuple[str, dict[str, str]]:
    """Parse PYTHON=SOURCES: the interpreter, and the environment in which it finds the sources."""
    python, _, source = where.partition("=")
    return python, dict(os.environ, PYTHONPATH=os.path.abspath(source))


def kernel_rows(where: str, kernel: str, threads: int) -> dict[str, float]:
    """Return microseconds by row.

    A row's name has the last four of its sizes, the only ones that all checkouts print.
    """
    python, env = interpreter(where)
    command = f"-m freight bench kernels --only {kernel} --threads {threads} --seconds 0.05 --json"
    printed = subprocess.run(
        [python, *command.split()], env=env, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    rows = [json.loads(line) for line in printed.splitlines()]
    return {f"{row['format']} {row['shape'][-4:]}": row["median_us"] for row in rows}


def compare_kernels(args: argparse.Namespace) -> None:
    results: list[dict[str, dict[str, float]]] = []
    for pair in range(args.pairs):
        order = ("old", "new") if pair % 2 else ("new", "old")
        threads = json.loads(args.options)["threads"]
        results.append(
            {name: kernel_rows(getattr(args, name), args.kernel, threads) for name in order}
        )
        print(f"pair {pair + 1} of {args.pairs}", file=sys.stderr)
    print(
        f"| {args.kernel} | old, us | new, us | speed, old = 1 | interval |\n|---|---:|---:|---:|---|"
    )
    for row in results[0]["old"]:
        if row in results[0]["new"]:
            old = [run["old"][row] for run in results]
            new = [run["new"][row] for run in results]
            print(f"| {row} | {comparison(old, new)} |")


def comparison(old: list[float], new: list[float]) -> str:
    """Return cells: both medians, the median ratio and its interval."""
    from freight.lab.bench.serving_figures import interval

    ratios = [item / other for item, other in zip(old, new, strict=True)]
    low, high, _ = interval(ratios)
    medians = f"{statistics.median(old):.1f} | {statistics.median(new):.1f}"
    return f"{medians} | {statistics.median(ratios):.2f} | {low:.2f} to {high:.2f}"


class Checkout(LineProcess):
    """One checkout's process."""

    def __init__(
        self, where: str, args: argparse.Namespace, options: dict[str, Any], largest: Workload
    ) -> None:
        python, env = interpreter(where)
        command = [python, __file__, "--worker", json.dumps([args.shape, options, largest])]
        super().__init__(where, command, env)

    def run(self, workload: Workload) -> Run:
        self.tell(workload)
        run: Run = json.loads(self.answer())
        return run


def pairs(
    args: argparse.Namespace, workloads: list[Workload]
) -> dict[Workload, list[dict[str, Run]]]:
    """Return runs of both checkouts by workload."""
    largest = (
        max(item[0] for item in workloads),
        max(item[1] for item in workloads),
        max(item[2] for item in workloads),
    )
    shared = json.loads(args.options)
    options = {"old": shared | json.loads(args.old_options), "new": shared}
    results: dict[Workload, list[dict[str, Run]]] = {item: [] for item in workloads}
    running: dict[str, Checkout] = {}
    for pair in range(args.pairs):
        if pair % args.restart == 0:
            for item in running.values():
                item.end()
            # Alternate: the process that is started second is a little slower
            started = ("old", "new") if pair // args.restart % 2 else ("new", "old")
            running = {
                name: Checkout(getattr(args, name), args, options[name], largest)
                for name in started
            }
            for item in running.values():
                for workload in workloads:
                    item.run(workload)  # warms up
        order = ("old", "new") if pair % 2 else ("new", "old")
        for workload in workloads:
            results[workload].append({name: running[name].run(workload) for name in order})
        print(f"pair {pair + 1} of {args.pairs}", file=sys.stderr)
    for item in running.values():
        item.end()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", help="PYTHON=SOURCES")
    parser.add_argument("--new", help="PYTHON=SOURCES")
    parser.add_argument("--workload", action="append", default=[])
    parser.add_argument("--kernel", help="as `freight bench kernels --only` takes it")
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--restart", type=int, default=6)
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument(
        "--options", default='{"quantization": "fp8", "kv_cache_dtype": "fp8", "threads": 2}'
    )
    parser.add_argument("--old-options", default="{}")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(*json.loads(args.worker))
        return
    if not (args.old and args.new and (args.workload or args.kernel)):
        parser.error("--old, --new and at least one --workload, or --kernel, are needed")
    if args.kernel:
        compare_kernels(args)
        return
    workloads: list[Workload] = []
    for item in args.workload:
        batch, prompt, generated = map(int, item.replace("+", "x").split("x"))
        workloads.append((batch, prompt, generated))
    print(
        "| workload | | old, ms | new, ms | speed, old = 1 | interval |\n|---|---|---:|---:|---:|---|"
    )
    for (batch, prompt, generated), runs in pairs(args, workloads).items():
        for figure in ("prefill", "decode step"):
            old = [run["old"][figure] * 1e3 for run in runs]
            new = [run["new"][figure] * 1e3 for run in runs]
            print(f"| {batch}x{prompt}+{generated} | {figure} | {comparison(old, new)} |")


if __name__ == "__main__":
    main()
