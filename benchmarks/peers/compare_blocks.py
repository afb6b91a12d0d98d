"""Check that transformers dequantizes Freight's checkpoints in DeepSeek's form to the bit.

    freight quantize demo OUT --weights fp8-block --format fp8
    python benchmarks/peers/compare_blocks.py OUT

Needs torch, safetensors, transformers 5.23 and accelerate; not Freight. transformers' products for
this form need a GPU, so it dequantizes at load. Prints how many matrices equal bytes times scales
to the bit, in bfloat16; status 1 if one does not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

BLOCK = 128


def dequantized(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Convert codes [rows, columns] with scale [ceil(rows / 128), ceil(columns / 128)] to bfloat16
    [rows, columns].
    """
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (codes.float() * wide[: codes.shape[0], : codes.shape[1]]).bfloat16()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    config = FineGrainedFP8Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16
    )
    theirs = dict(model.named_parameters())
    stored = load_file(folder / "model.safetensors")
    names = [name.removesuffix("_scale_inv") for name in stored if name.endswith("_scale_inv")]
    equal = [
        torch.equal(theirs[name], dequantized(stored[name], stored[f"{name}_scale_inv"]))
        for name in names
    ]
    print(f"{sum(equal)} of {len(names)} matrices are equal to the bit")
    sys.exit(not all(equal))


if __name__ == "__main__":
    main()
