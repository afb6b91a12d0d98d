"""Models of the demo's size with weights of their own: the demo with other norms."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from freight.checkpoint.reader import resolve_model


def changed_demo(folder: Path, seed: int) -> Path:
    """The demo in `folder`, whose norms are scaled at random, so that it answers otherwise; returns it."""
    shutil.copytree(resolve_model("demo"), folder)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if tensor.ndim == 1:
            factors = torch.rand(tensor.shape, generator=generator) + 0.5
            weights[name] = (tensor.float() * factors).to(tensor.dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
