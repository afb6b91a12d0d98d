"""Versions of the demo model's weights, as a trainer's steps write them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.demo_chat import DEMO
from torch import Tensor


def demo_tensors() -> dict[str, Tensor]:
    """Return the tensors of the demo model's file."""
    return dict(load_file(DEMO / "model.safetensors"))


def changed_tensors(seed: int) -> dict[str, Tensor]:
    """Return tensors that give other answers than the demo model's, different ones for each seed."""
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for name, tensor in demo_tensors().items():
        noise = torch.randn(tensor.shape, generator=generator)
        changed[name] = (tensor + 0.03 * tensor.float().std() * noise).to(tensor.dtype)
    return changed


def write_version(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Write a model folder with these weights, and return it."""
    shutil.copytree(DEMO, folder)
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
