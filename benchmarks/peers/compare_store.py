"""Time to the first token of a prompt whose KV cache was lost: Freight with --kv-store, and what vLLM
on a CPU has for it.

    python benchmarks/peers/compare_store.py --model MODEL --vllm PYTHON --output FILE

Runs in Freight's environment; PYTHON is the interpreter of one with vLLM's CPU build (0.32 was
tried). Each engine computes the same prompts (*cold*), forgets its prefix cache and gets them again
(*evicted*), and gets them a third time in a new process (*restarted*), before which the system is
told to forget the files (posix_fadvise). At last it forgets its prefix cache again and gets prompts
that begin with these and have 64 tokens more (*continued*). Seconds last from the request at a ready engine to the
first token. Answers are greedy. Those of an engine are compared with its own cold ones: the weights
are random, so an answer changes with little.

vLLM 0.32 has three ways to keep a KV cache outside of the prefix cache: OffloadingConnector, which
is what --kv-offloading-size starts, with memory or several tiers; SimpleCPUOffloadConnector, with
memory or a file; and ExampleConnector, an example that its authors call a debug implementation, with
a folder. Where one does not start, its message is printed. ExampleConnector writes what the first
step of a prompt computed, so it is tried with steps as long as the longest prompt and with vLLM's
own, and `vllm` is without any. It takes about 7 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from run_vllm import GIBIBYTE, prepare

Job = dict[str, Any]  # the JSON that a process of `drive` gets
TOKENS = 16  # of an answer
MORE = 64  # tokens that a prompt is continued by
ROOM = MORE + TOKENS
CONNECTOR = {"kv_role": "kv_both"}


class Answer(NamedTuple):
    """Seconds to the first token, the tokens, and how many of the prompt were found."""

    seconds: float
    tokens: list[int]
    cached: int


class Driver(Protocol):
    """An engine that is ready."""

    def answer(self, prompt: list[int]) -> Answer: ...

    def keep(self) -> None:
        """Wait until what was computed is stored."""

    def evict(self) -> None:
        """Forget the prefix cache."""

    def close(self) -> None: ...


class Freight:
    def __init__(self, job: Job) -> None:
        from freight import LLM, SamplingParams

        # what answers the first token is measured
        options = job["options"] | {"threads": job["threads"], "speculate": 0}
        self.llm = LLM(job["model"], max_model_len=max(job["lengths"]) + ROOM, **options)
        self.engine = self.llm.engine
        self.count = 0
        self.params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        store = self.engine.store
        assert store is not None
        self.mover = store.mover
        while not self.mover.tiers.is_open:  # at the first start it reads all weights
            time.sleep(0.01)

    def answer(self, prompt: list[int]) -> Answer:
        from freight.engine.intake import AcceptedPrompt

        engine = self.engine
        name = str(self.count)
        self.count += 1
        began = time.perf_counter()
        first = 0.0
        engine.add(name, AcceptedPrompt(None, tuple(prompt)), self.params)
        while not engine.is_finished(name):
            engine.step()
            if not first and engine.output(name).outputs[0].token_ids:
                first = time.perf_counter() - began
        output = engine.output(name)
        engine.release(name)
        return Answer(first, list(output.outputs[0].token_ids), output.num_cached_tokens)

    def keep(self) -> None:
        self.mover.flush(120)

    def evict(self) -> None:
        self.engine.scheduler.rebuild(())

    def close(self) -> None:
        self.engine.close()


class Vllm:
    def __init__(self, job: Job) -> None:
        import vllm

        self.llm = vllm.LLM(
            job["model"],
            dtype="bfloat16",
            max_model_len=max(job["lengths"]) + ROOM,
            max_num_seqs=8,
            kv_cache_memory_bytes=2 * GIBIBYTE,
            disable_log_stats=True,
            skip_tokenizer_init=True,
            seed=0,
            **job["options"],
        )
        self.engine = self.llm.llm_engine
        self.count = 0
        self.params = vllm.SamplingParams(
            temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False
        )

    def answer(self, prompt: list[int]) -> Answer:
        name = str(self.count)
        self.count += 1
        began = time.perf_counter()
        first = 0.0
        tokens: list[int] = []
        cached = 0
        self.engine.add_request(name, {"prompt_token_ids": prompt}, self.params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                tokens = list(output.outputs[0].token_ids)
                cached = output.num_cached_tokens or 0
            if tokens and not first:
                first = time.perf_counter() - began
        return Answer(first, tokens, cached)

    def keep(self) -> None:
        """ExampleConnector stores within the step."""

    def evict(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not forget its prefix cache")

    def close(self) -> None:
        pass


def prompts_of(job: Job) -> list[list[int]]:
    config = json.loads(Path(job["model"], "config.json").read_text(encoding="utf-8"))
    numbers = random.Random(0)
    return [
        [numbers.randrange(config["vocab_size"]) for _ in range(length)]
        for length in (300, MORE, *job["lengths"])
    ]


def forget_files(folder: Path) -> None:
    """Drop the folder's files from the system's memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def said(error: BaseException) -> str:
    """Return the message of an error, and of the one that led to it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def drive(job: Job) -> Job:
    """Run one engine; return its answers by phase, or why there are none."""
    engines: dict[str, Callable[[Job], Driver]] = {"freight": Freight, "vllm": Vllm}
    results: Job = {}
    began = time.perf_counter()
    at = "start"
    try:
        engine = engines[job["engine"]](job)
        results["start"] = time.perf_counter() - began
        warm, more, *prompts = prompts_of(job)
        engine.answer(warm)  # the first passes are slower
        engine.keep()
        for phase in job["phases"]:
            if phase in ("evicted", "continued"):
                engine.evict()
            if phase == "continued":
                prompts = [prompt + more for prompt in prompts]
            elif phase == "restarted":
                forget_files(Path(job["folder"]))
            for prompt in prompts:
                at = f"{phase}, {len(prompt)} tokens"
                results.setdefault(phase, []).append(engine.answer(prompt))
                engine.keep()
        engine.close()
    except Exception as error:
        results["message"] = said(error)
        results["failed"] = at
    return results


def ways(folder: Path, longest: int) -> dict[str, Job]:
    """Return the engines: their options and what of each is measured."""
    path = str(folder)
    again = [["cold", "evicted"], ["restarted", "continued"]]

    def connected(name: str, extra: Job, **options: Any) -> Job:
        config = CONNECTOR | {"kv_connector": name, "kv_connector_extra_config": extra}
        return {"options": {"kv_transfer_config": config} | options}

    # those that did not start so far: to compile takes half a minute each
    eager = {"enforce_eager": True}
    memory = {"cpu_bytes_to_use": GIBIBYTE}
    files = {"shared_storage_path": path}
    tiers = {"secondary_tiers": [{"type": "fs", "root_dir": path}]}
    disk = {"kv_offload_backend": "disk", "disk_path": f"{path}/blocks"}
    results: dict[str, Job] = {
        "freight, 16-bit cache": {
            "engine": "freight",
            "phases": again,
            "options": {"kv_store": path, "kv_cache_dtype": "auto"},
        },
        "freight, FP8 cache": {
            "engine": "freight",
            "phases": again,
            "options": {"kv_store": path, "kv_cache_dtype": "fp8"},
        },
        "vllm, ExampleConnector, one step a prompt": {
            "phases": again,
            **connected("ExampleConnector", files, max_num_batched_tokens=longest + ROOM),
        },
        "vllm, ExampleConnector": {
            "phases": again[:1],
            **connected("ExampleConnector", files),
        },
        "vllm": {"phases": [["cold"]], "options": {}},
        "vllm, --kv-offloading-size 1": {"options": {"kv_offloading_size": 1} | eager},
        "vllm, OffloadingConnector with tiers": connected(
            "OffloadingConnector", memory | tiers | {"spec_name": "TieringOffloadingSpec"}, **eager
        ),
        "vllm, SimpleCPUOffloadConnector": connected("SimpleCPUOffloadConnector", memory, **eager),
        "vllm, SimpleCPUOffloadConnector with a file": connected(
            "SimpleCPUOffloadConnector", memory | disk, **eager
        ),
    }
    return {name: {"engine": "vllm", "phases": again} | way for name, way in results.items()}


def run(name: str, args: argparse.Namespace) -> Job:
    """Run all processes of one engine, with a folder of its own."""
    from side_by_side import run_json

    results: Job = {}
    with tempfile.TemporaryDirectory(dir=args.store) as folder:
        way = ways(Path(folder), max(args.lengths))[name]
        for phases in way["phases"]:
            job = way | {
                "model": str(args.model),
                "lengths": args.lengths,
                "threads": args.threads,
                "phases": phases,
                "folder": folder,
            }
            python = sys.executable if way["engine"] == "freight" else args.vllm
            ran = run_json([python, __file__, "--drive", json.dumps(job)], args.timeout, ())
            results |= {"failed": "process", "message": ran["error"]} if "error" in ran else ran
            if "failed" in results:
                break
        results["bytes"] = sum(
            file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()
        )
    return results


def table(result: Job, lengths: list[int]) -> list[str]:
    """Return Markdown lines: the times of each engine, with the tokens of the prompt that it found,
    and below them what failed.
    """
    phases = ("cold", "evicted", "restarted", "continued")
    lines = [
        f"| engine | tokens | {' | '.join(phases)} | answers |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for name, one in result.items():
        for index, length in enumerate(lengths):
            rows = {}
            for phase in phases:
                if index < len(one.get(phase, [])):
                    rows[phase] = Answer(*one[phase][index])
            if not rows:
                continue
            times = []
            for phase in phases:
                row = rows.get(phase)
                times.append(f"{row.seconds:.2f} s, {row.cached:,}" if row else "")
            again = [rows[phase].tokens for phase in ("evicted", "restarted") if phase in rows]
            equal = "equal" if all(one == rows["cold"].tokens for one in again) else "DIFFER"
            cells = [name, f"{length:,}", *times, equal if again else ""]
            lines.append(f"| {' | '.join(cells)} |")
    failed = [(name, one) for name, one in result.items() if "failed" in one]
    return lines + [f"\n{name}, at {one['failed']}: `{one['message']}`" for name, one in failed]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--vllm", required=True, metavar="PYTHON")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192], metavar="TOKENS")
    parser.add_argument("--only", nargs="+", metavar="ENGINE", help="of those in the table")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="a process")
    parser.add_argument("--store", metavar="FOLDER", help="on the disk to measure")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON")
    args = parser.parse_args()
    results: Job = {}
    for name in args.only or ways(Path(), 0):
        results[name] = run(name, args)
        print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
        args.output.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print("\n".join(table(results, args.lengths)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--drive"]:
        job = json.loads(sys.argv[2])
        if job["engine"] == "vllm":
            prepare(argparse.Namespace(threads=job["threads"]))
        print(json.dumps(drive(job)))
    else:
        main()
