"""What audit says of vLLM is what vLLM did: `audit_vllm_cpu.json`, written by
benchmarks/peers/audit_vllm.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.unit.audit.conftest import FIXTURES

from freight.lab.audit.effects import view
from freight.lab.audit.facts import read_facts
from freight.lab.audit.rules import Effect, Engine

RECORDED: dict[str, dict[str, Any]] = json.loads((FIXTURES / "audit_vllm_cpu.json").read_text())[
    "checkpoints"
]


def write(folder: Path, row: dict[str, Any]) -> Path:
    """config.json and the scales of a recorded checkpoint; audit reads no weights."""
    (folder / "config.json").write_text(json.dumps(row["config"]))
    scales = {name: torch.tensor(values) for name, values in row["scales"].items()}
    save_file(scales, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_there_are_enough():
    assert len(RECORDED) >= 16
    assert len({row["config"]["model_type"] for row in RECORDED.values()}) >= 6
    assert sum("error" in row for row in RECORDED.values()) >= 5


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_vllm_did_what_audit_says(name: str, version: str, tmp_path: Path):
    row = RECORDED[name]
    said = view(Engine.VLLM, version, read_facts(write(tmp_path, row))[1])
    assert not said.unknown
    if "error" in row:
        assert said.refusal
        if "NotImplementedError" in said.refusal:
            assert row["error"] == "NotImplementedError"
        return
    assert not said.refusal
    assert [[list(layer.k.values), list(layer.v.values)] for layer in said.layers] == row["loaded"]
    assert all(
        side.effect in (Effect.USED, Effect.CONVERTED, Effect.IGNORED, Effect.ONE)
        for side in said.sides
    )
