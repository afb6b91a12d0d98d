"""Writes a folder as AMMO 0.7 and ModelOpt export it for TensorRT-LLM, from the description of its
layout.

Of the weights there is one matrix a layer: nothing reads them, and they show that their bytes are
counted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SCALES = (0.03125, 0.0244140625)


def ammo_json(ranks: int = 1, layers: int = 2, **attention: Any) -> dict[str, Any]:
    """The content of llama_tp1.json."""
    layer = {
        "decoder_type": "llama",
        "num_attention_heads": 4,
        "attention_head_size": 64,
        "num_kv_heads": 2,
        "max_position_embeddings": 256,
        "attention": {"qkv": {"linear_type": "column"}, "kv_cache_dtype": "FP8", **attention},
        "quantization": "fp8",
    }
    return {
        "version": 1.0,
        "quantization": "fp8",
        "dtype": "float16",
        "vocab_size": 256,
        "rank": 0,
        "tensor_parallel": ranks,
        "pipeline_parallel": 1,
        "layers": [layer] * layers,
    }


def tensorrt_llm_json(ranks: int = 1, layers: int = 2, **more: Any) -> dict[str, Any]:
    """The content of config.json in the other layout."""
    return {
        "producer": {"name": "modelopt", "version": "0.13.0"},
        "architecture": "LlamaForCausalLM",
        "dtype": "float16",
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 256,
        "head_size": 64,
        "max_position_embeddings": 256,
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        "mapping": {"world_size": ranks, "tp_size": ranks, "pp_size": 1},
        **more,
    }


def write_export(
    folder: Path,
    *,
    ranks: int = 1,
    config: dict[str, Any] | None = None,
    name: str = "llama_tp1.json",
) -> Path:
    """The export with `SCALES` in every rank; returns the folder."""
    folder.mkdir()
    (folder / name).write_text(json.dumps(config or ammo_json(ranks)))
    for rank in range(ranks):
        write_rank(folder, rank, dict(enumerate(SCALES)))
    return folder


def write_rank(folder: Path, rank: int, scales: dict[int, float]) -> None:
    tensors = {
        f"transformer.layers.{i}.attention.dense.weight": torch.zeros(4, 4, dtype=torch.int8)
        for i in range(2)
    }
    for layer, scale in scales.items():
        name = f"transformer.layers.{layer}.attention.kv_cache_scaling_factor"
        tensors[name] = torch.tensor([scale], dtype=torch.float32)
    save_file(tensors, folder / f"rank{rank}.safetensors")
