"""Measure OpenVINO GenAI on an exported folder, see README.md; one JSON line.

There are two modes. `paged` is the default of `LLMPipeline` on a CPU: paged attention with
continuous batching. That class takes only one prompt of token ids there, so the driver steps the
underlying `ContinuousBatchingPipeline`, with full prompts in one step as in `LLMPipeline`. `sdpa`
is `LLMPipeline` with one batch as a matrix; it reports the time until the first tokens and the time
of the rest, but not of each step.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import openvino
import openvino_genai
from common import Steps, measure, parser, random_prompts, report

WHOLE_PROMPTS = 2**31  # tokens in one step


def vocab_size(args: argparse.Namespace) -> int:
    """Return the width of the logits."""
    return (
        openvino.Core()
        .read_model(args.model / "openvino_model.xml")
        .output("logits")
        .partial_shape[2]
        .get_length()
    )


def generation(args: argparse.Namespace) -> openvino_genai.GenerationConfig:
    return openvino_genai.GenerationConfig(
        max_new_tokens=args.output_len, ignore_eos=True, do_sample=False
    )


def paged(
    args: argparse.Namespace, properties: dict[str, Any]
) -> Callable[[list[list[int]]], Steps]:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = WHOLE_PROMPTS
    pipe = openvino_genai.ContinuousBatchingPipeline(str(args.model), scheduler, "CPU", properties)
    config = generation(args)
    serial = iter(range(10**9))

    def run(prompts: list[list[int]]) -> Steps:
        handles = [
            pipe.add_request(next(serial), openvino.Tensor(np.array([prompt])), config)
            for prompt in prompts
        ]
        steps = []
        while pipe.has_non_finished_requests():
            begin = time.perf_counter()
            pipe.step()
            seconds = time.perf_counter() - begin
            sampled = 0
            for handle in handles:
                if handle.can_read():
                    handle.read()
                    sampled += 1
            steps.append((seconds, sampled))
        return steps

    return run


def sdpa(
    args: argparse.Namespace, properties: dict[str, Any]
) -> Callable[[list[list[int]]], Steps]:
    pipe = openvino_genai.LLMPipeline(
        str(args.model), "CPU", ATTENTION_BACKEND="SDPA", **properties
    )
    config = generation(args)

    def run(prompts: list[list[int]]) -> Steps:
        tokens = openvino.Tensor(np.array(prompts))
        begin = time.perf_counter()
        result = pipe.generate(tokens, config)
        seconds = time.perf_counter() - begin
        first = result.perf_metrics.get_ttft().mean / 1e3
        rest = (seconds - first) / (args.output_len - 1)
        return [(first, len(prompts))] + [(rest, len(prompts))] * (args.output_len - 1)

    return run


def main() -> None:
    made = parser(__doc__)
    made.add_argument(
        "--attention",
        choices=("paged", "sdpa"),
        default="paged",
        help="which way to run; see above",
    )
    args = made.parse_args()
    begin = time.perf_counter()
    generate = {"paged": paged, "sdpa": sdpa}[args.attention](
        args, {"INFERENCE_NUM_THREADS": args.threads}
    )
    loading = time.perf_counter() - begin
    vocabulary = vocab_size(args)
    numbers = random.Random(0)
    result = measure(args, lambda: generate(random_prompts(args, vocabulary, numbers)))
    hints = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
    core = openvino.Core()
    ran = {"weights": args.model.name, "attention": args.attention, "load_seconds": loading}
    ran |= {hint.lower(): str(core.get_property("CPU", hint)) for hint in hints}
    report(args, "openvino", f"openvino-genai {openvino_genai.__version__}", ran, result)


if __name__ == "__main__":
    main()
