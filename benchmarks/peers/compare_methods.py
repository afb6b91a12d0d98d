"""Compare what `freight quantize --method` writes in Freight and in transformers with
compressed-tensors.

Needs Freight, transformers (up to 5.17), compressed-tensors 0.19 and torch in one environment:
Freight by `pip install --no-deps`, since it asks for a newer transformers than the tool takes.

    python benchmarks/peers/compare_methods.py [MODEL] [--data FILE] [--folder OUT ...]

Writes MODEL in each of `METHODS`, or takes the folders of --folder as they are, and compares the
log-probabilities of the five most likely tokens behind each of the first 64 tokens of each prompt.
A line per checkpoint has the middle and the largest difference of all positions. Both compute in
--dtype; with weights in 4 bits, or in FP8 without scales of inputs, both take inputs as they are.
Where inputs are rounded as well, a tiny difference in a sum moves a value to the neighbouring code,
so the middle position decides there, as in compare_quantized.py. compressed-tensors 0.19 has no
groups in an order of their own (`--act-order group`), so these are left out. Status 1 if a
difference is above --tolerance.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import PROMPTS, Top, comparison
from transformers import AutoModelForCausalLM

import freight
from freight import LLM, SamplingParams
from freight.checkpoint.reader import resolve_model
from freight.text.tokenizer import Tokenizer

INT4 = {"weights": "int4", "group_size": 32}
METHODS: tuple[dict[str, Any], ...] = (
    {**INT4, "method": "gptq"},
    {**INT4, "method": "gptq", "act_order": "none"},
    {**INT4, "method": "gptq", "asymmetric": True},
    {**INT4, "method": "awq"},
    {**INT4, "method": "awq,gptq", "asymmetric": True},
    {**INT4, "method": "rotation"},
    {**INT4, "method": "rotation,gptq"},
    {"weights": "nvfp4", "method": "gptq"},
    {"weights": "fp8-channel", "activations": "none", "method": "gptq"},
    {"weights": "fp8-channel", "activations": "dynamic", "method": "gptq"},
    {"weights": "fp8", "activations": "static", "method": "smoothquant,gptq"},
    {"weights": "int8", "method": "smoothquant,gptq"},
)
POSITIONS = 64


def rounds_inputs(folder: Path) -> bool:
    """Return whether the checkpoint declares that inputs are rounded."""
    return '"input_activations": {' in (folder / "config.json").read_text(encoding="utf-8")


def ours(folder: Path, prompts: list[list[int]], dtype: str) -> list[Top]:
    """Return the log-probabilities of the likeliest tokens at every position of all prompts."""
    options: dict[str, Any] = {} if rounds_inputs(folder) else {"activations": "bfloat16"}
    llm = LLM(str(folder), kv_cache_memory="64MiB", dtype=dtype, **options)
    outputs = llm.generate(
        prompts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=5)
    )
    tops: list[Top] = []
    for output in outputs:
        assert output.prompt_logprobs is not None
        for position in output.prompt_logprobs[1:]:
            assert position is not None
            tops.append({token: item.logprob for token, item in position.items()})
    return tops


def theirs(folder: Path, prompts: list[list[int]], dtype: str) -> list[torch.Tensor]:
    """Return all log-probabilities at the same positions, from transformers."""
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype).eval()
    positions: list[torch.Tensor] = []
    with torch.inference_mode():
        for ids in prompts:
            logits = model(torch.tensor([ids])).logits[0, :-1].float()
            positions += torch.log_softmax(logits, -1).unbind()
    return positions


def compare(folder: Path, prompts: list[list[int]], dtype: str) -> list[float]:
    """Return the largest difference at each position, in ascending order."""
    result = []
    for mine, other in zip(
        ours(folder, prompts, dtype), theirs(folder, prompts, dtype), strict=True
    ):
        result.append(max(abs(value - float(other[token])) for token, value in mine.items()))
    return sorted(result)


def main() -> None:
    parser = comparison(__doc__)
    parser.add_argument("--folder", type=Path, action="append", help="a checkpoint that is there")
    parser.add_argument("--dtype", default="float32", help="what both compute in")
    parser.add_argument("--tolerance", type=float, default=0.01)
    args = parser.parse_args()
    tokenizer = Tokenizer.load(resolve_model(args.model))
    prompts = [tokenizer.encode("\n".join(PROMPTS[start::3]))[:POSITIONS] for start in range(3)]
    failed = False

    def judge(folder: Path, name: str) -> None:
        nonlocal failed
        result = compare(folder, prompts, args.dtype)
        middle = result[len(result) // 2]
        failed |= (middle if rounds_inputs(folder) else result[-1]) > args.tolerance
        line = f"{name}: {len(result)} positions, middle {middle:.5f}, largest {result[-1]:.5f}"
        print(line, flush=True)

    if args.folder:
        for folder in args.folder:
            judge(folder, str(folder))
        sys.exit(failed)
    for method in METHODS:
        data: dict[str, Any] = {}
        if method["method"] != "rotation":
            data = {"calibration_data": args.data, "num_samples": 8, "max_seq_len": 256}
        with tempfile.TemporaryDirectory() as temporary:
            out = Path(temporary) / "out"
            freight.quantize(args.model, out, **method, **data)
            judge(out, ", ".join(f"{key} {value}" for key, value in method.items()))
    sys.exit(failed)


if __name__ == "__main__":
    main()
