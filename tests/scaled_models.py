"""Copies of a checkpoint with KV scales beside the attention of its layers, and with other keys in
config.json.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


def with_scales(
    source: Path,
    folder: Path,
    scales: Callable[[int], Mapping[str, Tensor]],
    num_layers: int,
    **config: Any,
) -> Path:
    """`scales` makes those of a layer, by name behind `self_attn.`."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    for layer in range(num_layers):
        for name, scale in scales(layer).items():
            weights[f"model.layers.{layer}.self_attn.{name}"] = scale.clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    before = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(before | config))
    return folder
