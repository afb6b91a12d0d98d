"""Multiply each weight of a model folder by 1 plus normal noise: `python tools/changed_weights.py
FOLDER`.

Only model.safetensors of FOLDER is rewritten, in place; names, shapes, dtypes and metadata stay.
Use it on the demo model of a copy of the repository, to see which tests rest on what the shipped
weights draw (CONTRIBUTING.md). The same seed gives the same file.
"""

import argparse
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def change(file: Path, scale: float, seed: int) -> None:
    """Rewrite `file` with every floating-point weight times 1 + `scale` · normal noise."""
    generator = torch.Generator().manual_seed(seed)
    with safe_open(file, "pt") as stored:
        metadata = stored.metadata()
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118, no dict
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            factors = 1 + scale * torch.randn(tensor.shape, generator=generator)
            tensors[name] = (tensor.float() * factors).to(tensor.dtype)
    save_file(tensors, file, metadata)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a model folder with one model.safetensors")
    parser.add_argument("--scale", type=float, default=0.01, help="the noise's standard deviation")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    change(given.folder / "model.safetensors", given.scale, given.seed)
