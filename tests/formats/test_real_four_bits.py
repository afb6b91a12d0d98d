"""Weights in 4 bits that llm-compressor and GPTQModel wrote, or that AutoGPTQ's and AutoAWQ's own
modules packed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.formats.four_bits import AUTO_ROUND
from tests.parity.random_models import freight_logits

from freight.cli.inspect import describe

FIXTURES = Path(__file__).parents[1] / "fixtures/four_bits"
SAID = {
    "awq": "awq: weights in INT4, scales and zero points per 32 inputs",
    "gptq": "gptq: weights in INT4, scales per 32 inputs",
    "gptq_order": "gptq: weights in INT4, scales and zero points per 32 inputs, groups in an order of their own",
    "gptqmodel": "gptq: weights in INT4, scales per 32 inputs",
    "gptqmodel_awq": "awq: weights in INT4, scales and zero points per 32 inputs",
    "gptqmodel_order": "gptq: weights in INT4, scales and zero points per 32 inputs, groups in an order of their own",
    "int4": "compressed-tensors: weights in INT4, scales per 32 inputs",
    "int4_experts": "compressed-tensors: weights in INT4, scales per 32 inputs",
    "int4_zeros": "compressed-tensors: weights in INT4, scales and zero points per 64 inputs",
    "mxfp4": "compressed-tensors: weights in MXFP4, scales per 32 inputs",
    "nvfp4": "compressed-tensors: weights in NVFP4, scales per 16 inputs",
}


def test_every_one_is_tried():
    assert sorted(folder.name for folder in FIXTURES.iterdir()) == sorted(SAID)


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("name", SAID)
def test_logits_are_those_of_the_values_that_the_tool_makes(name: str, kernels: str):
    expected = load_file(FIXTURES / name / "expected.safetensors")
    ids = expected["input_ids"].tolist()
    found = freight_logits(FIXTURES / name, ids, "float32", kernels)
    assert (found - expected["logits"]).abs().max() <= 1e-4
    assert torch.isfinite(expected["logits"]).all()
    assert (
        describe(str(FIXTURES / name))["scheme"]["description"]
        == f"{SAID[name]}, activations plain"
    )


@pytest.mark.parametrize(
    ("name", "packing"), [("gptqmodel", "auto_round:auto_gptq"), ("gptqmodel_awq", "auto_awq")]
)
def test_auto_round_declares_the_tensors_of_gptq_and_awq(tmp_path: Path, name: str, packing: str):
    folder = shutil.copytree(FIXTURES / name, tmp_path / name)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = AUTO_ROUND | {"packing_format": packing}
    (folder / "config.json").write_text(json.dumps(config))
    expected = load_file(folder / "expected.safetensors")
    found = freight_logits(folder, expected["input_ids"].tolist(), "float32", "reference")
    assert (found - expected["logits"]).abs().max() <= 1e-4
    assert describe(str(folder))["scheme"]["description"].startswith("auto-round: weights in INT4")
