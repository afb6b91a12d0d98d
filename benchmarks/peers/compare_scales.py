"""Compare Freight's static scales with llm-compressor's (`static_minmax`) on the same token ids.

Needs Freight, llm-compressor 0.14, compressed-tensors 0.19, transformers 5.17 and torch in one
environment: Freight by `pip install --no-deps`, since it asks for a newer transformers than the
tool takes.

    python benchmarks/peers/compare_scales.py [MODEL] [--data FILE] [--num-samples N] [--max-seq-len N]

Quantizes MODEL with both (weights, activations and KV cache per tensor, static). For each kind of
scale it prints how many differ by how many units in the last place of their stored dtype; then the
share of equal weight codes. llm-compressor divides in the model's dtype, Freight in float32, so
some codes are neighbours. Exits with status 1 if a scale differs by more than one unit.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from common import comparison
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import freight
from freight.checkpoint.reader import resolve_model
from freight.quantizer.data import read_samples
from freight.text.tokenizer import Tokenizer

ARGUMENTS: dict[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
    "observer": "static_minmax",
}


def quantize_theirs(folder: Path, out: Path, samples: list[list[int]]) -> None:
    recipe = QuantizationModifier(
        ignore=["lm_head"],
        config_groups={
            "group_0": {"weights": ARGUMENTS, "input_activations": ARGUMENTS, "targets": ["Linear"]}
        },
        kv_cache_scheme=ARGUMENTS,
    )
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in samples]
    oneshot(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype="auto"),
        dataset=Dataset.from_list(rows),
        recipe=recipe,
        max_seq_length=max(map(len, samples)),
        num_calibration_samples=len(samples),
        output_dir=str(out),
    )


def units_apart(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """Return the largest difference in units in the last place, of positive numbers of one dtype."""
    integer = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}[
        ours.dtype
    ]
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    return int((ours.view(integer).long() - theirs.view(integer).long()).abs().max())


def main() -> None:
    parser = comparison(__doc__)
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--max-seq-len", type=int, default=512)
    args = parser.parse_args()
    folder = resolve_model(args.model)
    vocabulary = len(load_file(folder / "model.safetensors")["model.embed_tokens.weight"])
    text = args.data or folder / "calibration.txt"
    samples = read_samples(
        text, args.num_samples, args.max_seq_len, vocabulary, lambda: Tokenizer.load(folder)
    )
    with tempfile.TemporaryDirectory() as temporary:
        mine = Path(temporary) / "mine"
        theirs = Path(temporary) / "theirs"
        freight.quantize(
            folder, mine, weights="fp8", activations="static", kv_cache="fp8", calibration_data=samples,
            max_seq_len=args.max_seq_len,
        )  # fmt: skip
        quantize_theirs(folder, theirs, samples)
        got, expected = [load_file(out / "model.safetensors") for out in (mine, theirs)]
    assert got.keys() == expected.keys()
    kinds: dict[str, Counter[int]] = {}
    for name, scale in got.items():
        if name.endswith("_scale"):
            kinds.setdefault(name.rpartition(".")[2], Counter())[
                units_apart(scale, expected[name])
            ] += 1
    tokens = sum(map(len, samples))
    print(f"{tokens:,} tokens in {len(samples)} samples; scales by units in the last place apart:")
    for kind, counts in kinds.items():
        print(
            f"{kind}: "
            + ", ".join(f"{count} at {units}" for units, count in sorted(counts.items()))
        )
    codes = [name for name in got if got[name].dtype is torch.float8_e4m3fn]
    same = [
        (got[name].view(torch.uint8) == expected[name].view(torch.uint8)).float().mean()
        for name in codes
    ]
    print(f"weight codes that are the same: {float(torch.stack(same).mean()):.1%}")
    sys.exit(any(units > 1 for counts in kinds.values() for units in counts))


if __name__ == "__main__":
    main()
