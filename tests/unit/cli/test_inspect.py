"""freight inspect: what a checkpoint is, also for one that would be refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from freight.cli.inspect import inspect

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture
def as_json(capsys):
    def inspector(model):
        inspect(str(model), True)
        return json.loads(capsys.readouterr().out)

    return inspector


def test_the_shipped_model(as_json):
    facts = as_json("demo")
    assert facts["architecture"] == "LlamaForCausalLM"
    assert list(facts["bytes"]) == ["bfloat16"]
    assert facts["bytes"]["bfloat16"] == 2 * facts["num_parameters"]
    assert facts["scheme"]["method"] is None
    assert facts["scheme"]["fp8_weights"] == {}
    assert facts["kv_cache"]["scales"] == []


@pytest.mark.parametrize(("name", "method"), [("autofp8_static_kv", "fp8"), ("ct_docs", "compressed-tensors")])
def test_fp8_checkpoints_of_real_tools(as_json, name, method):
    facts, base = as_json(FIXTURES / name), as_json(FIXTURES / "base_bf16")
    assert facts["num_parameters"] == base["num_parameters"] == 1115392
    assert facts["bytes"]["fp8_e4m3fn"] == 983040
    assert facts["scheme"]["method"] == method
    assert facts["scheme"]["fp8_weights"] == {"scales per tensor, activations static": 14}
    assert facts["scheme"]["weight_format"] == facts["kv_cache"]["scales_format"] == "fp8_e4m3fn"
    for index, layer in enumerate(facts["kv_cache"]["scales"]):
        assert layer["layer"] == index
        for side in "kv":
            scale = layer[side]
            assert scale.get("centered") == (False if side == "k" else None)
            assert scale["names"] == [f"model.layers.{index}.self_attn.{side}_scale"]
            assert scale["granularity"] == "tensor"
            assert scale["min"] == scale["max"] == scale["value"] > 0


@pytest.fixture
def partial(tmp_path):
    """base_bf16 with scales per head in layer 1 only."""
    tensors = load_file(FIXTURES / "base_bf16" / "model.safetensors")
    tensors["model.layers.1.self_attn.kv_scale"] = torch.tensor([0.5, 0.25])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((FIXTURES / "base_bf16" / "config.json").read_text())
    return tmp_path


def test_layers_without_scales_and_scales_per_head(as_json, partial):
    empty, layer = as_json(partial)["kv_cache"]["scales"]
    assert (empty["k"], empty["v"]) == (None, None)
    assert layer["k"] == layer["v"] | {"centered": False}
    assert layer["v"] == {
        "granularity": "head",
        "min": 0.25,
        "max": 0.5,
        "names": ["model.layers.1.self_attn.kv_scale"],
    }


def test_table(capsys, partial, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    inspect(str(partial), False)
    out = capsys.readouterr().out
    for word in ("LlamaForCausalLM", "1.1 M", "bfloat16", "missing", "0.25 … 0.5", "│ self_attn.kv_scale"):
        assert word in out
    inspect("demo", False)
    assert "none" in capsys.readouterr().out


def test_an_assumed_format_of_scales_is_said(as_json, partial, capsys):
    assert as_json(partial)["kv_cache"]["scales_format_assumed"]
    assert not as_json(FIXTURES / "ct_docs")["kv_cache"]["scales_format_assumed"]
    inspect(str(partial), False)
    said = " ".join(capsys.readouterr().out.split())
    assert "made for fp8_e4m3fn, assumed: config.json has no kv_cache_torch_dtype" in said
    inspect(str(FIXTURES / "ct_docs"), False)
    assert "assumed" not in capsys.readouterr().out
