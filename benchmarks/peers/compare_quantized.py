"""Compare Freight's quantized checkpoints in Freight and in transformers with compressed-tensors.

Needs Freight, transformers (up to 5.17), compressed-tensors 0.19 and torch in one environment:
Freight by `pip install --no-deps`, since it asks for a newer transformers than the tool takes.

    python benchmarks/peers/compare_quantized.py [MODEL] [--data FILE] [--dtype auto]

Writes MODEL in each scheme of compressed-tensors, loads it in both, and compares the
log-probabilities of the five most likely first tokens of each prompt. It prints a line per scheme:
the largest difference of the middle prompt, and of the worst. In float32 both agree to the last
digits, until a tiny difference in a sum moves a value to the neighbouring FP8 code; from there on
they differ as FP8 differs from 16 bits. So the middle prompt decides: status 1 if it is above
--tolerance. KV scales per channel are removed first, because the other reader does not see them;
the scale per layer is what is compared.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from common import (
    PROMPTS,
    Top,
    comparison,
    differences,
    first_tokens,
    hide_extras,
    middle_and_worst,
)
from transformers import AutoModelForCausalLM

import freight
from freight.checkpoint.reader import resolve_model
from freight.text.tokenizer import Tokenizer

SCHEMES: tuple[dict[str, str], ...] = (
    {"weights": "fp8-channel", "activations": "dynamic"},
    {"weights": "fp8", "activations": "static"},
    {"weights": "fp8", "activations": "none"},
    {"weights": "fp8-block", "activations": "dynamic"},
    {"weights": "none", "kv_cache": "fp8"},
    {"weights": "fp8", "activations": "static", "kv_cache": "fp8"},
    {
        "weights": "fp8-channel",
        "activations": "dynamic",
        "kv_cache": "fp8",
        "kv_granularity": "channel",
    },
    {"weights": "int4", "activations": "none"},
)


def theirs(folder: str, prompts: list[list[int]], dtype: str) -> list[Top]:
    """Return all log-probabilities of the first token of each prompt, from transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.inference_mode():
        results = [
            torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].float(), -1)
            for ids in prompts
        ]
    return [dict(enumerate(values.tolist())) for values in results]


def main() -> None:
    parser = comparison(__doc__)
    parser.add_argument(
        "--dtype", default="float32", help="what both compute in; auto: as the model is stored"
    )
    parser.add_argument("--tolerance", type=float, default=0.05)
    args = parser.parse_args()
    tokenizer = Tokenizer.load(resolve_model(args.model))
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    failed = False
    for scheme in SCHEMES:
        needs = scheme.get("activations") == "static" or "kv_cache" in scheme
        data = (
            {"calibration_data": args.data, "num_samples": 32, "max_seq_len": 512} if needs else {}
        )
        with tempfile.TemporaryDirectory() as temporary:
            out = Path(temporary) / "out"
            freight.quantize(args.model, out, **scheme, **data)
            hide_extras(out)
            ours = first_tokens(str(out), prompts, dtype=args.dtype)
            result = differences(ours, theirs(str(out), prompts, args.dtype))
        failed |= result[len(result) // 2] > args.tolerance
        name = ", ".join(f"{key} {value}" for key, value in scheme.items())
        print(f"{name}: {middle_and_worst(result)}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
