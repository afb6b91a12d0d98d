"""Checkpoints of the demo model with KV scales under different names and declarations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.cli.conftest import freight

from freight.checkpoint.reader import resolve_model

__all__ = ["freight"]  # the fixture is used by tests here

FIXTURES = Path(__file__).parents[2] / "fixtures"
DEMO = resolve_model("demo")
CT_KV = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
CT = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "config_groups": {},
    "ignore": [],
    "kv_cache_scheme": CT_KV,
}
MODULES = [
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
]
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "kv_cache_scheme": "static",
    "ignored_layers": [
        *(f"model.layers.{i}.{name}" for i in range(6) for name in MODULES),
        "lm_head",
    ],
}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "ignore": ["model.layers.*.mlp*", "model.layers.*.self_attn.*_proj", "lm_head"],
}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "modules_to_not_convert": ["self_attn"],
}
PLAIN = "self_attn.{side}_scale"
MODELOPT_NAMES = "self_attn.{side}_proj.{side}_scale"

# The checkpoints of fixtures/vllm_kv_scales.json: declaration, names, layers without scales.
RECORDED: dict[str, tuple[dict[str, Any] | None, str, tuple[int, ...]]] = {
    "kv_scale_pairs": (CT, PLAIN, ()),
    "modelopt_names": (CT, MODELOPT_NAMES, ()),
    "kv_scale_alone": (CT, "self_attn.kv_scale", (1, 5)),
    "fp8_method": (FP8, PLAIN, ()),
    "modelopt_method": (MODELOPT, MODELOPT_NAMES, ()),
    "awq_method": (AWQ, PLAIN, ()),
    "nothing_declared": (None, PLAIN, ()),
    "output_scale": (CT, "self_attn.{side}_proj.output_scale", ()),
}


@pytest.fixture(scope="session")
def recorded() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FIXTURES / "vllm_kv_scales.json").read_text())
    return content


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, recorded: dict[str, Any]) -> Write:
    """(declaration, names, layers without scales) -> a folder; `keys` multiplies the keys of layer
    3, and q divides.
    """

    def written(
        declared: dict[str, Any] | None,
        names: str,
        missing: tuple[int, ...] = (),
        keys: float = 1.0,
    ) -> Path:
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        tensors = load_file(DEMO / "model.safetensors")
        for side, factor in (("k", keys), ("q", 1 / keys)):
            tensors[f"model.layers.3.self_attn.{side}_proj.weight"] *= factor
        pairs = recorded["checkpoints"]["kv_scale_pairs"]["scales"]
        for layer, (k, v) in enumerate(pairs):
            if layer in missing or not names:
                continue
            k *= keys if layer == 3 else 1.0
            both = {"kv": max(k, v)} if "{side}" not in names else {"k": k, "v": v}
            for side, value in both.items():
                tensors[f"model.layers.{layer}.{names.format(side=side)}"] = torch.tensor([value])
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((DEMO / "config.json").read_text())
        if declared is not None:
            config["quantization_config"] = declared
        (folder / "config.json").write_text(json.dumps(config))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((DEMO / name).read_bytes())
        return folder

    return written
