"""Compare what `freight quantize --method` writes in Freight and in transformers with
compressed-tensors, or in vLLM on a CPU.

Needs Freight, transformers (up to 5.17), compressed-tensors 0.19 and torch in one environment:
Freight by `pip install --no-deps`, since it asks for a newer transformers than the tool takes.
With --vllm-python, the interpreter of an environment with vLLM's CPU build (0.32 was tried), Freight's
environment is enough.

    python benchmarks/peers/compare_methods.py [MODEL] [--data FILE] [--folder OUT ...]
    python benchmarks/peers/compare_methods.py --vllm-python PATH --dtype bfloat16 --folder OUT ...

Writes MODEL in each of `METHODS`, or takes the folders of --folder as they are, and compares the
log-probabilities of the five most likely tokens behind each of the first 64 tokens of each prompt.
A line per checkpoint has the middle and the largest difference of all positions. Both compute in
--dtype; with weights in 4 bits, or in FP8 without scales of inputs, both take inputs as they are.
Where inputs are rounded as well, a tiny difference in a sum moves a value to the neighbouring code,
so the middle position decides there, as in compare_quantized.py. It does too in 16 bits, which is
all that vLLM's CPU products with 4 bits compute in. compressed-tensors 0.19 has no groups in an order
of their own (`--act-order group`), so these are left out. Status 1 if a difference is above
--tolerance.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import PROMPTS, Top, comparison, differences

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
MOST_LIKELY = 5
# the other engine's, so that all of ours are among them
COMPARED = 20
ANSWER = "--answer"


def rounds_inputs(folder: Path) -> bool:
    """Return whether the checkpoint declares that inputs are rounded."""
    return '"input_activations": {' in (folder / "config.json").read_text(encoding="utf-8")


def ours(folder: Path, prompts: list[list[int]], dtype: str) -> list[Top]:
    """Return the log-probabilities of the most likely tokens at each position, from Freight."""
    from freight import LLM, SamplingParams

    options: dict[str, Any] = {} if rounds_inputs(folder) else {"activations": "bfloat16"}
    llm = LLM(str(folder), kv_cache_memory="64MiB", dtype=dtype, **options)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=MOST_LIKELY)
    return by_position(llm.generate(prompts, params))


def by_position(outputs: Sequence[Any]) -> list[Top]:
    """Return what outputs of Freight or vLLM say of the tokens of their prompts."""
    tops: list[Top] = []
    for output in outputs:
        for position in output.prompt_logprobs[1:]:
            tops.append({token: item.logprob for token, item in position.items()})
    return tops


def by_transformers(folder: Path, prompts: list[list[int]], dtype: str) -> list[Top]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype).eval()
    tops: list[Top] = []
    with torch.inference_mode():
        for ids in prompts:
            logits = model(torch.tensor([ids])).logits[0, :-1].float()
            for row in torch.log_softmax(logits, -1):
                values, tokens = row.topk(COMPARED)
                tops.append(dict(zip(tokens.tolist(), values.tolist(), strict=True)))
    return tops


def by_vllm(folder: str, prompts: list[list[int]], dtype: str) -> list[Top]:
    """Return vLLM's log-probabilities; runs in vLLM's environment."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=16,
        max_logprobs=COMPARED,
    )
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=COMPARED)
    return by_position(llm.generate([{"prompt_token_ids": ids} for ids in prompts], params))


def ask_vllm(python: str, folder: Path, prompts: list[list[int]], dtype: str) -> list[Top]:
    with tempfile.NamedTemporaryFile() as file:
        command = [python, __file__, ANSWER, str(folder), json.dumps(prompts), dtype, file.name]
        process = subprocess.run(
            command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if process.returncode:
            raise ValueError(process.stderr.strip().splitlines()[-1])
        tops = json.loads(Path(file.name).read_text())
    return [{int(token): value for token, value in top.items()} for top in tops]


def main() -> None:
    parser = comparison(__doc__)
    parser.add_argument("--folder", type=Path, action="append", help="a checkpoint that is there")
    parser.add_argument("--dtype", default="float32", help="what both compute in")
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--vllm-python", metavar="PATH")
    args = parser.parse_args()
    import freight
    from freight.checkpoint.reader import resolve_model
    from freight.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(resolve_model(args.model))
    prompts = [tokenizer.encode("\n".join(PROMPTS[start::3]))[:POSITIONS] for start in range(3)]
    failed = False

    def asked(folder: Path) -> list[Top]:
        if args.vllm_python:
            return ask_vllm(args.vllm_python, folder, prompts, args.dtype)
        return by_transformers(folder, prompts, args.dtype)

    def judge(folder: Path, name: str) -> None:
        nonlocal failed
        try:
            theirs = asked(folder)
        except (ValueError, NotImplementedError) as error:
            print(f"{name}: the other engine does not load it: {error}", flush=True)
            failed = True
            return
        result = differences(ours(folder, prompts, args.dtype), theirs)
        middle = result[len(result) // 2]
        by_middle = rounds_inputs(folder) or args.dtype != "float32"
        failed |= (middle if by_middle else result[-1]) > args.tolerance
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
    if sys.argv[1:2] == [ANSWER]:
        folder, prompts, dtype, answers = sys.argv[2:]
        Path(answers).write_text(json.dumps(by_vllm(folder, json.loads(prompts), dtype)))
    else:
        main()
