"""An adapter of rank 1 for a matrix of the demo model, as PEFT writes one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.demo_chat import DEMO


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
