"""A folder of tiny tensors, and a model's shape to read it with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from freight.checkpoint.reader import Checkpoint
from freight.model.config.model import ModelConfig
from freight.model.config.parse import parse_model_config


@pytest.fixture
def shape() -> ModelConfig:
    """Two layers of three KV heads with four channels each."""
    sizes = {
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 4,
    }
    return parse_model_config(
        {
            "model_type": "llama",
            "vocab_size": 16,
            "hidden_size": 12,
            "intermediate_size": 8,
            **sizes,
        }
    )


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """write({file: {tensor name: tensor}}, config) -> folder; config.json is always there."""

    def writer(files: dict[str, dict[str, torch.Tensor]], config: dict | None = None) -> Path:
        for file, tensors in files.items():
            save_file(tensors, tmp_path / file)
        (tmp_path / "config.json").write_text(json.dumps(config or {}))
        return tmp_path

    return writer


@pytest.fixture
def open_tensors(write: Callable[..., Path]) -> Callable[..., Checkpoint]:
    """open_tensors({tensor name: tensor}, config) -> Checkpoint of a single file."""

    def opener(tensors: dict[str, torch.Tensor], config: dict | None = None) -> Checkpoint:
        return Checkpoint(write({"model.safetensors": tensors}, config))

    return opener
