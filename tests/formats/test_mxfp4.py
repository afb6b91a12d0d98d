"""Experts of gpt-oss in MXFP4: their values are transformers', and what is wrong is named."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.formats.mxfp4 import EXPERTS, LEFT_OUT, save_mxfp4
from tests.formats.test_four_bits import opened
from tests.parity.random_models import freight_logits, tokens
from tests.refusals import assert_names, refuses
from tests.unit.models.test_sizes import require_equal
from transformers import AutoModelForCausalLM

from freight.checkpoint.layouts import read_scheme
from freight.cli.inspect import describe
from freight.errors import CheckpointError
from freight.kernels.cpu.experts import CpuExperts
from freight.kernels.reference_experts import ExpertList
from freight.model.decoder import Decoder
from freight.model.open import open_model
from freight.operands.weight import Activations
from freight.settings.engine import EngineArgs

ALL = 3 * 8 * (2 * 96 + 64)  # rows: layers, experts, outputs of gate and up and of down


def experts_of(folder: Path, **options: Any) -> dict[str, ExpertList]:
    model = opened(folder, **options)
    decoder = model.load(model.resolve(model.args))
    assert isinstance(decoder, Decoder)
    return {
        f"{EXPERTS.format(i)}{side}": getattr(layer.mlp.experts, side)
        for i, layer in enumerate(decoder.layers)
        for side in ("gate_up", "down")
    }


@pytest.mark.parametrize(
    ("lowest", "wide"), [(110, ""), (110, "model.layers.1.mlp.experts.down_proj"), (90, "")]
)
def test_the_values_are_those_that_transformers_dequantizes(
    lowest: int, wide: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Scales from `lowest` to 124: in E4M3 where they span 14, in 16 bits where a row of the tensor
    spans more.
    """
    packed = save_mxfp4(tmp_path, lowest=lowest, wide=wide)
    with caplog.at_level(logging.INFO, "freight"):
        found = experts_of(packed)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    line = next(message for message in caplog.messages if message.startswith("experts in MXFP4: "))
    counted, rest = line.removeprefix("experts in MXFP4: ").split(
        f" of {ALL:,} rows exactly in E4M3"
    )
    wider = 6 if lowest == 90 else 1 if wide else 0
    assert (rest != "") is (wider > 0)
    assert_names(rest, *[f"{wider} of 6 tensors", "bfloat16"] * (wider > 0))
    if lowest == 110:
        assert int(counted.replace(",", "")) == ALL - wider
    for name, sides in found.items():
        stored = plain[f"{name}_proj"]
        for expert in range(8):
            matrix = stored[expert].t().float()
            weight, _ = sides.of(expert)
            expected = (
                torch.cat((matrix[::2], matrix[1::2])) if name.endswith("gate_up") else matrix
            )
            assert torch.equal(weight.dequantized(), expected)
            assert weight.activations is Activations.PLAIN
            in_16_bits = lowest == 90 or f"{name}_proj" == wide
            assert weight.data.dtype == (torch.bfloat16 if in_16_bits else torch.float8_e4m3fn)


@pytest.mark.parametrize("wide", [False, True])
def test_cpu_kernels_compute_with_them_as_they_are(
    wide: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A tensor with values that bfloat16 has as subnormals alone is converted, and the others are
    not.
    """
    packed = save_mxfp4(tmp_path, lowest=90)
    file, name = packed / "model.safetensors", f"{EXPERTS.format(1)}down_proj"
    stored = load_file(file)
    if wide:
        stored[f"{name}_blocks"][2, 3, 1], stored[f"{name}_scales"][2, 3, 1] = 0x11, 2
        save_file(stored, file)
    model = open_model(EngineArgs(str(packed), device="cpu", skip_tokenizer_init=True))
    with caplog.at_level(logging.INFO, "freight"):
        decoder = model.load(model.resolve(model.args))
    assert isinstance(decoder, Decoder)
    line = next(message for message in caplog.messages if message.startswith("experts in MXFP4: "))
    expected = f"experts in MXFP4: {6 - wide} of 6 tensors are computed in MXFP4"
    assert line.startswith(
        f"{expected}; scales beyond 3 to 252 in the others: " if wide else expected
    )
    for index, layer in enumerate(decoder.layers):
        for side in ("gate_up", "down"):
            experts = getattr(layer.mlp.experts, side)
            assert isinstance(experts, CpuExperts)
            converted = wide and f"{EXPERTS.format(index)}{side}_proj" == name
            values = 8 * experts.out_features * experts.in_features
            assert experts.data.nbytes * 8 == values * (16 if converted else 4.25)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("lowest", [115, 90])
def test_logits_equal_transformers(lowest: int, kernels: str, tmp_path: Path):
    packed = save_mxfp4(tmp_path, torch.float32, lowest)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", attn_implementation="eager")
    ids = tokens()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    assert (freight_logits(packed, ids, "auto", kernels) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_what_is_loaded_occupies_what_is_counted(kernels: str, tmp_path: Path):
    args = EngineArgs(
        str(save_mxfp4(tmp_path)), kernels=kernels, device="cpu", skip_tokenizer_init=True
    )
    model = open_model(args)
    require_equal(model, kernels, model.scheme.linear)


def test_inspect_counts_two_parameters_in_a_byte(tmp_path: Path):
    packed = save_mxfp4(tmp_path)
    found, plain = describe(str(packed)), describe(str(tmp_path / "plain"))
    assert found["num_parameters"] == plain["num_parameters"]
    assert found["runs"] == "natively"
    said = found["scheme"]["description"]
    assert_names(said, "mxfp4", "experts in MXFP4", "1x32 block", "activations plain")


def test_float16_that_lacks_a_value_is_refused(tmp_path: Path):
    packed = save_mxfp4(tmp_path, lowest=90)
    with refuses(CheckpointError, "MXFP4", "float16", "--dtype bfloat16"):
        experts_of(packed, dtype="float16")


Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]
DOWN = f"{EXPERTS.format(1)}down_proj"


def in_16_bits(tensors: dict[str, torch.Tensor], declared: dict[str, Any]) -> None:
    del tensors[f"{DOWN}_blocks"], tensors[f"{DOWN}_scales"]
    tensors[DOWN] = torch.ones(8, 96, 64, dtype=torch.bfloat16)


WRONG: list[tuple[Change, str]] = [
    (
        lambda tensors, _: tensors[f"{DOWN}_scales"][3].fill_(255),
        f"expert 3 of {DOWN} has values that are not finite",
    ),
    (
        lambda tensors, _: tensors[f"{DOWN}_scales"][7, 2].fill_(254),
        f"expert 7 of {DOWN} has values that are not",
    ),
    (lambda tensors, _: tensors.pop(f"{DOWN}_scales"), f"{DOWN}_scales is missing"),
    (
        lambda tensors, _: tensors.pop(f"{DOWN}_blocks"),
        f"{DOWN} to be in MXFP4, and {DOWN}_blocks is missing",
    ),
    (in_16_bits, f"declares {DOWN} to be in MXFP4, and {DOWN}_blocks is missing"),
    (
        lambda tensors, _: tensors.update(
            {f"{DOWN}_scales": tensors[f"{DOWN}_scales"][:, :, :2].clone()}
        ),
        f"{DOWN}_scales has shape [8, 64, 2], config.json asks for [8, 64, 3]",
    ),
    (
        lambda tensors, _: tensors.update(
            {f"{DOWN}_blocks": tensors[f"{DOWN}_blocks"].to(torch.float32)}
        ),
        f"{DOWN}_blocks is F32 of shape",
    ),
    (
        lambda _, declared: declared.update(
            modules_to_not_convert=[*LEFT_OUT, "model.layers.1.mlp.experts"]
        ),
        f"{EXPERTS.format(1)}gate_up_proj_blocks is there, but config.json does not declare",
    ),
    (
        lambda tensors, _: tensors.update(
            {"model.layers.0.self_attn.q_proj_blocks": torch.ones(2, dtype=torch.uint8)}
        ),
        "model.layers.0.self_attn.q_proj_blocks belongs to no expert; MXFP4 is read for experts only",
    ),
    (
        lambda tensors, _: tensors.update(
            {"model.layers.0.mlp.router.weight": torch.ones(8, 64, dtype=torch.uint8)}
        ),
        "model.layers.0.mlp.router.weight is stored as U8, which is not implemented",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_is_wrong_is_named_before_a_weight_is_read(
    change: Change, message: str, tmp_path: Path
):
    packed = save_mxfp4(tmp_path)
    file, path = packed / "model.safetensors", packed / "config.json"
    stored, config = load_file(file), json.loads(path.read_text())
    change(stored, config["quantization_config"])
    save_file(stored, file)
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        experts_of(packed)
    assert message in str(error.value)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", None])
def test_mxfp4_of_other_models_is_refused(model_type: str | None):
    config = {"model_type": model_type, "quantization_config": {"quant_method": "mxfp4"}}
    with refuses(CheckpointError, f"mxfp4 of model_type {model_type!r}", "gpt_oss"):
        read_scheme(config, None)


def test_mxfp4_of_amd_quark_is_refused_by_name():
    weight = {
        "dtype": "fp4",
        "qscheme": "per_group",
        "group_size": 32,
        "scale_format": "e8m0",
        "is_dynamic": False,
    }
    inputs = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
    declared = {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": inputs},
    }
    with refuses(
        CheckpointError, "quark", "global_quant_config.weight", "dtype 'fp4'", "quant_method mxfp4"
    ):
        read_scheme({"model_type": "gpt_oss", "quantization_config": declared}, None)
