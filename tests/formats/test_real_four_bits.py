"""Weights with scales of groups that compressed-tensors, llm-compressor, GPTQModel and AutoRound wrote,
or that AutoGPTQ's and AutoAWQ's own modules packed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.formats.four_bits import AUTO_ROUND
from tests.parity.random_models import freight_logits

from freight import LLM
from freight.cli.inspect import describe
from freight.fp8.formats import Format
from freight.model.open import open_model
from freight.model.sources import CheckpointSource
from freight.model.stored import find_stored
from freight.settings.engine import EngineArgs

FIXTURES = Path(__file__).parents[1] / "fixtures/four_bits"
SAID = {
    "auto_round_mxfp4": "auto-round: weights in MXFP4, scales per 32 inputs",
    "auto_round_mxfp8": "auto-round: weights in MXFP8, scales per 32 inputs",
    "auto_round_nvfp4": "auto-round: weights in NVFP4, scales per 16 inputs",
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
    "mxfp8": "compressed-tensors: weights in MXFP8, scales per 32 inputs",
    "mxfp8_weights": "compressed-tensors: weights in MXFP8, scales per 32 inputs",
    "nvfp4": "compressed-tensors: weights in NVFP4, scales per 16 inputs",
    "w4a8": "compressed-tensors: weights in INT4, scales per 32 inputs",
    "w4a8_fp8": "compressed-tensors: weights in INT4, scales per 32 inputs",
    "w4a8_packed": "compressed-tensors: weights in INT4, scales per 32 inputs",
    "w4a8_zeros": "compressed-tensors: weights in INT4, scales and zero points per 32 inputs",
}
# How inputs are declared to be rounded, which is not done so
ROUNDED = {
    "auto_round_mxfp4": "FP4 per 32 inputs",
    "auto_round_mxfp8": "FP8 per 32 inputs",
    "auto_round_nvfp4": "FP4 per 16 inputs",
    "mxfp8": "FP8 per 32 inputs",
    "w4a8": "INT8 per token",
    "w4a8_fp8": "FP8 per token",
    "w4a8_packed": "INT8 per token",
    "w4a8_zeros": "INT8 per tensor, static",
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
    inputs = f" (declared: {ROUNDED[name]})" if name in ROUNDED else ""
    assert (
        describe(str(FIXTURES / name))["scheme"]["description"]
        == f"{SAID[name]}, activations plain{inputs}"
    )


def test_inspect_counts_codes_in_bytes_as_4_bits():
    scheme = describe(str(FIXTURES / "w4a8"))["scheme"]
    assert sum(scheme["four_bit_weights"].values()) == 7
    assert scheme["fp8_weights"] == {}
    assert sum(describe(str(FIXTURES / "mxfp8"))["scheme"]["fp8_weights"].values()) == 7


@pytest.mark.parametrize("name", [name for name in SAID if name.startswith(("mxfp8", "w4a8"))])
def test_values_are_those_of_the_library_to_the_bit(name: str):
    with safe_open(FIXTURES / name / "expected.safetensors", "pt") as expected:
        digests = expected.metadata()
    args = EngineArgs(str(FIXTURES / name), device="cpu", kernels="reference", dtype="float32")
    args = replace(args, skip_tokenizer_init=True)
    opened = open_model(args)
    found = find_stored(opened.checkpoint, opened.model, opened.scheme)
    source = CheckpointSource(
        opened.checkpoint,
        Format.FLOAT32,
        Format.E4M3FN,
        "cpu",
        {**found.linears, **found.four},
    )
    assert digests.keys() == found.linears.keys() | found.four.keys()
    for key, digest in digests.items():
        values = source.weight(key, ()).dequantized()
        assert hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest() == digest, key


@pytest.mark.parametrize(
    ("name", "activations", "computed"),
    [
        ("w4a8", "auto", "here they are rounded to INT8 with a scale per group of inputs"),
        ("w4a8_fp8", "bfloat16", "here they stay in bfloat16"),
        ("mxfp8", "auto", "here they stay in bfloat16"),
    ],
)
def test_a_line_says_what_becomes_of_inputs(
    name: str, activations: str, computed: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "freight")
    LLM(model=str(FIXTURES / name), device="cpu", skip_tokenizer_init=True, activations=activations)
    lines = [record.getMessage() for record in caplog.records]
    assert f"inputs declared {ROUNDED[name]} (compressed-tensors): {computed}" in lines


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
