"""freight quantize as the authors of other tools type their scripts, with only the name of the
command changed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.refusals import assert_names
from transformers import LlamaConfig, LlamaForCausalLM

Run = Callable[..., Any]
BASE = str(Path(__file__).parents[2] / "fixtures" / "base_bf16")


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(
            json.dumps({"input_ids": [(i * j) % 256 for i in range(100)]}) + "\n"
            for j in range(1, 5)
        )
    )
    return str(path)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_the_script_that_makes_a_model_for_tgi(freight: Run, out: Path):
    """create_fp8_kv_scales_model.py --model_dir … --output_dir …"""
    argv = ["--model_dir", "demo", "--output_dir", str(out), "--calib_size", "4", "--dtype", "bf16"]
    argv += ["--batch_size", "8", "--device", "cpu", "--qformat", "fp8", "--max-seq-len", "64"]
    answer = freight("quantize", *argv, "--format", "tgi", "--json")
    assert answer.code == 0, answer.err
    assert (json.loads(answer.out)["num_samples"], json.loads(answer.out)["weights"]) == (4, "none")
    assert "--batch-size 8 changes no scale" in answer.err
    scales = {
        name: tensor
        for name, tensor in load_file(out / "model.safetensors").items()
        if name.endswith("scale")
    }
    assert sorted(scales) == [f"model.layers.{layer}.self_attn.kv_scale" for layer in range(6)]
    assert {(scale.dtype, scale.shape) for scale in scales.values()} == {(torch.float32, ())}
    assert json.loads((out / "config.json").read_text())["kv_cache_torch_dtype"] == "float8_e4m3fn"


def test_the_script_of_vllms_example(freight: Run, out: Path, data: str):
    """quantize.py --model-dir … --dtype … --qformat fp8 --kv-cache-dtype fp8 --calib-size …
    --output-dir …
    """
    argv = [
        "--model-dir",
        BASE,
        "--dtype",
        "bfloat16",
        "--qformat",
        "fp8",
        "--kv-cache-dtype",
        "fp8",
    ]
    answer = freight(
        "quantize",
        *argv,
        "--calib-size",
        "3",
        "--output-dir",
        str(out),
        "--calibration-data",
        data,
        "--json",
    )
    assert answer.code == 0, answer.err
    said = json.loads(answer.out)
    assert (said["weights"], said["kv_cache"], said["num_samples"]) == ("fp8", "fp8", 3)


@pytest.mark.parametrize(
    "form", [["--model-id", BASE, "OUT"], [BASE, "--save-path", "OUT"], [BASE, "OUT"]]
)
def test_every_way_to_name_model_and_output(freight: Run, out: Path, form: list[str]):
    answer = freight("quantize", *(str(out) if part == "OUT" else part for part in form))
    assert answer.code == 0, answer.err
    assert (out / "config.json").is_file()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([BASE], "OUT is missing: give MODEL OUT"),
        (["--output_dir", "OUT"], "MODEL is missing: give MODEL"),
        (
            [BASE, "OUT", "--model_dir", BASE],
            f"MODEL is '{BASE}' and --model-id '{BASE}': give one of the two",
        ),
        (
            [BASE, "OUT", "--qformat", "int4_awq"],
            "--qformat 'int4_awq' is not implemented: choose fp8 or full_prec",
        ),
        ([BASE, "OUT", "--qformat", "fp8", "--weights", "fp8"], "give one of the two"),
        (
            [BASE, "OUT", "--dtype", "fp16"],
            "is stored in bfloat16, and what is not quantized stays in it",
        ),
        ([BASE, "OUT", "--dtype", "int8"], "--dtype 'int8' is unknown"),
        ([BASE, "OUT", "--device", "cpu"], "--device is given, but nothing is calibrated"),
        (["demo", "OUT", "--kv-cache", "fp8", "--device", "tpu"], "device 'tpu' is unknown"),
    ],
)
def test_what_is_asked_wrongly(freight: Run, out: Path, argv: list[str], says: str):
    answer = freight("quantize", *(str(out) if part == "OUT" else part for part in argv))
    assert (answer.code, answer.out) == (2, "")
    assert says in " ".join(answer.err.split())
    assert not out.exists()


def test_overwrite_replaces_what_freight_wrote(freight: Run, out: Path):
    assert freight("quantize", BASE, str(out)).code == 0
    again = freight("quantize", BASE, str(out), "--weights", "fp8")
    assert (again.code, "or overwrite it (--overwrite" in again.err) == (2, True)
    assert freight("quantize", BASE, str(out), "--weights", "fp8", "--overwrite").code == 0
    declared = json.loads((out / "config.json").read_text())["quantization_config"]
    assert declared["config_groups"]["group_0"]["weights"]["strategy"] == "tensor"


def test_overwrite_never_touches_another_folder(freight: Run, out: Path, data: str):
    shutil.copytree(BASE, out)
    before = sorted(path.name for path in out.iterdir())
    answer = freight(
        "quantize", BASE, str(out), "--kv-cache", "fp8", "--calibration-data", data, "--overwrite"
    )
    assert answer.code == 2
    assert "holds no model that Freight wrote" in " ".join(answer.err.split())
    assert sorted(path.name for path in out.iterdir()) == before


def test_ignoring_every_module_is_refused(freight: Run, out: Path):
    answer = freight("quantize", BASE, str(out), "--ignore", "re:.*")
    assert answer.code == 2
    assert_names(answer.err, "--ignore re:.*", "no module")
    assert not out.exists()


def test_blocks_that_do_not_divide_a_matrix_are_warned_of(freight: Run, out: Path, tmp_path: Path):
    model, config = tmp_path / "model", LlamaConfig.from_pretrained(BASE)
    config.intermediate_size = 320
    LlamaForCausalLM(config).save_pretrained(model)
    answer = freight("quantize", str(model), str(out), "--weights", "fp8-block", "--json")
    (warning,) = json.loads(answer.out)["warnings"]
    assert warning.startswith("model.layers.0.mlp.gate_proj is [320, 256]")
    assert "--weights fp8-channel" in warning


def test_a_model_is_not_written_over_itself(freight: Run, tmp_path: Path):
    file, model = tmp_path / "scales.json", tmp_path / "model"
    kv_cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.5, "1": 0.25}}}
    file.write_text(json.dumps({"model_type": "llama", "kv_cache": kv_cache}))
    assert freight("scales", "import", str(file), BASE, str(model)).code == 0
    answer = freight("quantize", str(model), str(model), "--overwrite")
    assert (answer.code, "is the model itself" in answer.err) == (2, True)
