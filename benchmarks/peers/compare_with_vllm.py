"""Check that vLLM on a CPU uses Freight's KV scales: compare first tokens on the same checkpoint.

    python benchmarks/peers/compare_with_vllm.py --vllm-python PATH [MODEL] [--data FILE]

Runs in Freight's environment; PATH is the interpreter of one with vLLM's CPU build (0.32 was
tried). Quantizes the KV cache of MODEL per channel, so that vLLM sees the scale per layer and not
the finer ones, and compares log-probabilities of the five most likely first tokens, in float32: the
largest difference of the middle prompt, and of the worst.

vLLM 0.32's CPU kernel rounds towards zero when it stores FP8; Freight rounds to nearest, as GPU
kernels do. So the comparison is made twice, the second time with Freight's reference kernels
changed to round as vLLM does. Exits with status 1 if the middle prompt of the second one is above
--tolerance.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import (
    PROMPTS,
    Top,
    comparison,
    differences,
    first_tokens,
    hide_extras,
    middle_and_worst,
)


def answer(folder: str, prompts: list[list[int]]) -> list[Top]:
    """Return vLLM's log-probabilities; runs in vLLM's environment."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = os.environ["HF_HUB_OFFLINE"] = os.environ[
        "VLLM_CPU_KVCACHE_SPACE"
    ] = "1"
    from vllm import LLM, SamplingParams

    llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=16)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    results = []
    for output in outputs:
        top = output.outputs[0].logprobs[0]
        results.append({token: item.logprob for token, item in top.items()})
    return results


def ask(python: str, folder: Path, prompts: list[list[int]]) -> list[Top]:
    """Return vLLM's log-probabilities of the five most likely first tokens of each prompt, from its
    own environment.
    """
    with tempfile.NamedTemporaryFile() as file:
        command = [python, __file__, "--answer", str(folder), json.dumps(prompts), file.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        tops = json.loads(Path(file.name).read_text())
    return [{int(token): value for token, value in top.items()} for top in tops]


def round_towards_zero() -> None:
    """Make the reference kernels store as vLLM's CPU kernel does."""
    import torch

    from freight.kernels import reference

    nearest = reference.encode

    def towards_zero(x: torch.Tensor, scale: Any, format: Any) -> torch.Tensor:
        values = (x.float() / torch.as_tensor(scale, dtype=torch.float32)).clamp(
            -format.max, format.max
        )
        step = torch.exp2(torch.floor(torch.log2(values.abs().clamp(min=2.0**-6))) - 3)
        return nearest(torch.trunc(values / step) * step, 1.0, format)

    reference.encode = towards_zero


def main() -> None:
    parser = comparison(__doc__)
    parser.add_argument("--vllm-python", required=True, metavar="PATH")
    parser.add_argument("--tolerance", type=float, default=0.05)
    args = parser.parse_args()
    import freight
    from freight.checkpoint.reader import resolve_model
    from freight.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(resolve_model(args.model))
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "out"
        freight.quantize(
            args.model, out, weights="none", kv_cache="fp8", kv_granularity="channel", calibration_data=args.data,
            num_samples=32, max_seq_len=512,
        )  # fmt: skip
        theirs = ask(args.vllm_python, out, prompts)
        hide_extras(out)
        nearest = differences(first_tokens(str(out), prompts, dtype="float32"), theirs)
        print(f"rounding to nearest: {middle_and_worst(nearest)}")
        round_towards_zero()
        same = differences(
            first_tokens(str(out), prompts, dtype="float32", kernels="reference"), theirs
        )
        print(f"rounding towards zero, as vLLM: {middle_and_worst(same)}")
    sys.exit(same[len(same) // 2] > args.tolerance)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        folder, prompts, answers = sys.argv[2:]
        Path(answers).write_text(json.dumps(answer(folder, json.loads(prompts))))
    else:
        main()
