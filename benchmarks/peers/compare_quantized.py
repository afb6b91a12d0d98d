"""Does another reader get from our quantized checkpoints what Freight gets? transformers with compressed-tensors.

Needs Freight, transformers (up to 5.17), compressed-tensors 0.19 and torch in one environment.

    python benchmarks/peers/compare_quantized.py [MODEL] [--data FILE] [--dtype auto]

Writes MODEL in each scheme that compressed-tensors has, loads it in both, and compares the log-probabilities of the
five most likely first tokens of each prompt. A line per scheme: the largest difference of the middle prompt, and of the
worst. Computed in float32, both agree to the last digits until a sum that ends up a hair away on one side crosses the
border between two FP8 codes; from there on they differ as FP8 differs from 16 bits. So the middle prompt decides:
status 1 if it is above --tolerance. KV scales per channel are taken away first, as the other reader does not
see them: what is compared is that the scale per layer stands on its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import freight
from freight import LLM, SamplingParams

SCHEMES: tuple[dict[str, str], ...] = (
    {"weights": "fp8-channel", "activations": "dynamic"},
    {"weights": "fp8", "activations": "static"},
    {"weights": "fp8", "activations": "none"},
    {"weights": "fp8-block", "activations": "dynamic"},
    {"weights": "none", "kv_cache": "fp8"},
    {"weights": "fp8", "activations": "static", "kv_cache": "fp8"},
    {"weights": "fp8-channel", "activations": "dynamic", "kv_cache": "fp8", "kv_granularity": "channel"},
)
PROMPTS = (
    *("def main(", "class Stack:\n    def __init__(self", "import os\nimport", "for i in range(", "    return self."),
    *("# Copyright", "if not isinstance(", "    raise ValueError(", "with open(path) as", "@property\n    def"),
    *("try:\n    import", "    for name, value in", "x = [", "def __repr__(self):\n        return", "while True:\n"),
)


def ours(folder: str, prompts: list[list[int]], dtype: str) -> list[dict[int, float]]:
    """Log-probabilities of the five most likely first tokens, by token."""
    llm = LLM(folder, kv_cache_memory="16MiB", dtype=dtype)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, logprobs=5))
    tops = [output.outputs[0].logprobs[0] for output in outputs if output.outputs[0].logprobs]
    return [{token: entry.logprob for token, entry in top.items()} for top in tops]


def theirs(folder: str, prompts: list[list[int]], dtype: str) -> list[torch.Tensor]:
    """All log-probabilities of the first token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.inference_mode():
        return [torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].float(), -1) for ids in prompts]


def compare(folder: str, prompts: list[list[int]], dtype: str) -> list[float]:
    """The largest difference of each prompt, in ascending order."""
    pairs = zip(ours(folder, prompts, dtype), theirs(folder, prompts, dtype), strict=True)
    return sorted(max(abs(value - float(other[token])) for token, value in mine.items()) for mine, other in pairs)


def without_extras(folder: Path) -> None:
    """Leave only what other readers see."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("freight", None)
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--data", help="calibration text; 'demo' has its own")
    parser.add_argument("--dtype", default="float32", help="what both compute in; auto: as the model is stored")
    parser.add_argument("--tolerance", type=float, default=0.05)
    args = parser.parse_args()
    llm = LLM(args.model, kv_cache_memory="16MiB")
    assert llm.engine.tokenizer is not None
    prompts = [llm.engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    failed = False
    for scheme in SCHEMES:
        needs = scheme.get("activations") == "static" or "kv_cache" in scheme
        data = {"calibration_data": args.data, "num_samples": 32, "max_seq_len": 512} if needs else {}
        with tempfile.TemporaryDirectory() as temporary:
            out = Path(temporary) / "out"
            freight.quantize(args.model, out, **scheme, **data)
            without_extras(out)
            differences = compare(str(out), prompts, args.dtype)
        middle, worst = differences[len(differences) // 2], differences[-1]
        failed |= middle > args.tolerance
        name = ", ".join(f"{key} {value}" for key, value in scheme.items())
        print(f"{name}: middle prompt {middle:.5f}, worst {worst:.5f}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
