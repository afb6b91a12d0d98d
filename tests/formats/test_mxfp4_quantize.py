"""gpt-oss with experts in MXFP4 gets KV scales and is else as it was; FP8 weights beside them are
refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.formats.mxfp4 import LEFT_OUT, save_mxfp4
from tests.parity.random_models import freight_logits, tokens
from tests.refusals import refuses
from transformers import AutoModelForCausalLM, Mxfp4Config
from typer.testing import CliRunner

import freight
from freight.cli.main import app
from freight.errors import ConfigError
from freight.model.open import open_checkpoint
from freight.quantizer.transfer import extract_scales

IDS = tokens(80)
WIDE = "model.layers.1.mlp.experts.down_proj"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def declared(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("wide", ["", WIDE])
def test_a_cache_is_calibrated_and_experts_stay_as_they_are(wide: str, tmp_path: Path) -> None:
    """The scales are those of the same values in 16 bits; with `wide` some experts are calibrated
    in 16 bits.
    """
    packed, out = save_mxfp4(tmp_path, wide=wide), tmp_path / "out"
    options: dict[str, Any] = {"weights": "none", "kv_cache": "fp8", "calibration_data": [IDS]}
    result = freight.quantize(packed, out, **options)
    assert result.form == "mxfp4"
    before, after = tensors(packed), tensors(out)
    added = {f"model.layers.{index}.self_attn.{side}_scale" for index in range(3) for side in "kv"}
    assert after.keys() - before.keys() == added
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert (
        result.bytes_before
        == result.bytes_after
        == sum(tensor.nbytes for tensor in before.values())
    )
    assert declared(out) == {
        "modules_to_not_convert": LEFT_OUT,
        "quant_method": "mxfp4",
        "kv_cache_format": "fp8_e4m3fn",
    }
    freight.quantize(tmp_path / "plain", tmp_path / "other", **options)
    other = tensors(tmp_path / "other")
    for name in added:
        assert after[name].item() == pytest.approx(other[name].item(), rel=0.02)
    quantized = freight_logits(out, IDS, "bfloat16")  # the declared cache
    assert not torch.equal(quantized, freight_logits(packed, IDS, "bfloat16"))
    for name in sorted(added):
        save_file(
            after | {name: after[name] * 3}, out / "model.safetensors", metadata={"format": "pt"}
        )
        assert not torch.equal(freight_logits(out, IDS, "bfloat16"), quantized), name


def test_scales_by_head_and_a_cache_chosen_by_layer_are_kept_beside_it(tmp_path: Path) -> None:
    packed = save_mxfp4(tmp_path)
    by_head: dict[str, Any] = {"kv_cache": "fp8", "kv_granularity": "head"}
    for name, options in {"head": by_head, "chosen": {"kv_budget": "bits=12"}}.items():
        out = tmp_path / name
        freight.quantize(
            packed, out, weights="none", calibration_data=[IDS[:40], IDS[40:]], **options
        )
        assert (out / "freight_kv_scales.json").exists()
        assert declared(out)["quant_method"] == "mxfp4"
        assert freight_logits(out, IDS, "bfloat16").isfinite().all()
    assert declared(tmp_path / "head")["kv_cache_format"] == "fp8_e4m3fn"
    assert "kv_cache_format" not in declared(
        tmp_path / "chosen"
    )  # which the scales of all layers would have to be in


def test_transformers_reads_what_is_written(tmp_path: Path) -> None:
    packed, out = save_mxfp4(tmp_path), tmp_path / "out"
    freight.quantize(packed, out, weights="none", kv_cache="fp8", calibration_data=[IDS])
    found = []
    for folder in (packed, out):
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=Mxfp4Config(dequantize=True)
        )
        with torch.inference_mode():
            found.append(model(torch.tensor([IDS])).logits)
    assert torch.equal(*found)


def test_fp8_weights_beside_mxfp4_are_refused_and_the_named_way_out_works(tmp_path: Path) -> None:
    packed, out = save_mxfp4(tmp_path), tmp_path / "out"
    said = r"--weights fp8: the experts of .* are in MXFP4.*--weights none --kv-cache fp8.*save_original_format=False"
    with pytest.raises(ConfigError, match=said):
        freight.quantize(packed, out, weights="fp8")
    run = CliRunner().invoke(app, ["quantize", str(packed), str(out)])
    assert run.exit_code != 0
    assert not out.exists()
    model = AutoModelForCausalLM.from_pretrained(
        packed, quantization_config=Mxfp4Config(dequantize=True)
    )
    model.save_pretrained(tmp_path / "copy", save_original_format=False)
    freight.quantize(tmp_path / "copy", out, weights="fp8")
    assert tensors(out)["model.layers.0.mlp.experts.0.up_proj.weight"].dtype is torch.float8_e4m3fn


def test_other_forms_are_refused(tmp_path: Path) -> None:
    packed, tgi = save_mxfp4(tmp_path), {"calibration_data": [IDS], "format": "tgi"}
    with refuses(ConfigError, "--format tgi", "MXFP4"):
        freight.quantize(packed, tmp_path / "out", weights="none", kv_cache="fp8", **tgi)
    freight.quantize(
        tmp_path / "plain",
        tmp_path / "scaled",
        weights="none",
        kv_cache="fp8",
        calibration_data=[IDS],
    )
    for form in ("fp8", "tgi"):
        with pytest.raises(ConfigError, match=rf"--format {form}: .* keeps the form"):
            extract_scales(str(tmp_path / "scaled"), str(packed), tmp_path / "out", format=form)
    assert not (tmp_path / "out").exists()


def test_scales_of_another_checkpoint_are_put_into_it(tmp_path: Path) -> None:
    packed = save_mxfp4(tmp_path)
    freight.quantize(
        tmp_path / "plain",
        tmp_path / "scaled",
        weights="none",
        kv_cache="fp8",
        calibration_data=[IDS],
    )
    written = extract_scales(str(tmp_path / "scaled"), str(packed), tmp_path / "out")
    assert open_checkpoint(str(tmp_path / "out")).kv_scales.layers == written.layers
    assert declared(tmp_path / "out")["quant_method"] == "mxfp4"
    assert torch.equal(
        tensors(tmp_path / "out")[f"{WIDE}_blocks"], tensors(packed)[f"{WIDE}_blocks"]
    )
