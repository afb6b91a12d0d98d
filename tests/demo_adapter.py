"""An adapter of rank 1 for a matrix of the demo model, as PEFT writes one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.demo_chat import DEMO

from freight.model.adapted import adapted_modules
from freight.model.open import open_model
from freight.settings.engine import EngineArgs


def write_adapter(folder: Path) -> Path:
    """Write the adapter into a new folder, and return the folder."""
    folder.mkdir()
    name = "model.layers.0.self_attn.q_proj"
    outputs, inputs = load_file(DEMO / "model.safetensors")[f"{name}.weight"].shape
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    parts = {
        f"base_model.model.{name}.lora_A.weight": torch.ones(1, inputs),
        f"base_model.model.{name}.lora_B.weight": torch.ones(outputs, 1),
    }
    save_file(parts, folder / "adapter_model.safetensors")
    return folder


def write_random_adapter(
    folder: Path, seed: int, rank: int = 8, scale: float = 0.5, only: str = ""
) -> Path:
    """Write an adapter of random values for every module of the demo model that takes one, or those
    whose names end with `only`; return the new folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = open_model(EngineArgs(model="demo")).model
    generator = torch.Generator().manual_seed(seed)
    parts = {}
    for module, (outputs, inputs) in adapted_modules(model).items():
        if not module.endswith(only):
            continue
        a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        b = torch.randn(outputs, rank, generator=generator) * scale / rank**0.5
        parts[f"base_model.model.{module}.lora_A.weight"] = a
        parts[f"base_model.model.{module}.lora_B.weight"] = b
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(parts, folder / "adapter_model.safetensors")
    return folder
