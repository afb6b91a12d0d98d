"""Opening a model: which settings hold for it alone."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.refusals import refuses
from transformers import AutoConfig, AutoModelForCausalLM

from freight.errors import ConfigError
from freight.model import open as opening
from freight.model.open import open_model, open_random
from freight.settings.device import usable_cores
from freight.settings.engine import EngineArgs


def test_threads_hold_while_weights_are_read_and_not_after(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = []
    read = opening.load_model
    monkeypatch.setattr(
        opening, "load_model", lambda *args: inside.append(torch.get_num_threads()) or read(*args)
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        opened = open_model(EngineArgs("demo", threads=1))
        opened.load(opened.resolve(opened.args))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert inside == [1]


def test_more_threads_than_cores_are_refused_before_weights_are_read() -> None:
    wanted = usable_cores() + 1
    opened = open_model(EngineArgs("demo", threads=wanted))
    with refuses(ConfigError, f"--threads {wanted}", f"1 to {wanted - 1}"):
        opened.resolve(opened.args)


BASE = Path(__file__).parents[2] / "fixtures" / "base_bf16"


def base_with(folder: Path, dtype: torch.dtype, **config: Any) -> str:
    """`base_bf16` in `dtype`, with what `config` says of its dtype."""
    tensors = load_file(BASE / "model.safetensors")
    save_file(
        {name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    said = json.loads((BASE / "config.json").read_text())
    said = {
        key: value for key, value in said.items() if key not in ("dtype", "torch_dtype")
    } | config
    (folder / "config.json").write_text(json.dumps(said))
    return str(folder)


def loaded(args: EngineArgs, caplog: pytest.LogCaptureFixture) -> tuple[str, list[str]]:
    """(what the model computes in, the lines about it)."""
    caplog.clear()
    opened = open_model(args)
    config = opened.resolve(args)
    with caplog.at_level(logging.INFO, "freight"):
        opened.load(config)
    return config.compute_format, [
        one.getMessage() for one in caplog.records if "dtype" in one.getMessage()
    ]


def test_the_dtype_is_that_of_the_tensors_where_config_json_names_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = base_with(tmp_path, torch.float16)
    line = "dtype: float16, as the tensors are stored: no config names one"
    assert loaded(EngineArgs(model), caplog) == ("float16", [line])
    assert loaded(EngineArgs(model, dtype="bfloat16"), caplog) == (
        "bfloat16",
        ["dtype: bfloat16, from --dtype"],
    )


def test_float32_over_tensors_in_16_bits_is_followed_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = base_with(tmp_path, torch.bfloat16, torch_dtype="float32")
    compute, (line, warning) = loaded(EngineArgs(model), caplog)
    assert (compute, line) == ("float32", "dtype: float32, from config.json")
    assert "the tensors are in bfloat16" in warning
    assert "--dtype bfloat16" in warning
    assert caplog.records[-1].levelname == "INFO"
    assert [one.levelname for one in caplog.records if one.getMessage() == warning] == ["WARNING"]
    assert loaded(EngineArgs(model, dtype="float32"), caplog)[1] == ["dtype: float32, from --dtype"]
    base_with(tmp_path, torch.float32, torch_dtype="float32")
    assert loaded(EngineArgs(model), caplog)[1] == ["dtype: float32, from config.json"]
    base_with(tmp_path, torch.float32, torch_dtype="bfloat16")
    assert loaded(EngineArgs(model), caplog) == ("bfloat16", ["dtype: bfloat16, from config.json"])


def test_random_weights_of_a_config_without_a_dtype(tmp_path: Path) -> None:
    said = json.loads((BASE / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in said.items() if "dtype" not in k})
    )
    model = open_random(EngineArgs("demo"), str(tmp_path)).model
    assert (model.checkpoint_format, model.dtype_source) == ("bfloat16", "assumed")


@pytest.mark.parametrize(("key", "source"), [("torch_dtype", "config.json"), (None, "tensors")])
def test_a_model_of_transformers_has_the_dtype_of_its_checkpoint(
    tmp_path: Path, key: str | None, source: str
) -> None:
    config = AutoConfig.for_model(
        "gpt_neox",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float16).save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    said.pop("dtype")
    (tmp_path / "config.json").write_text(
        json.dumps(said | ({} if key is None else {key: "float16"}))
    )
    model = open_model(EngineArgs(str(tmp_path))).model
    assert model.foreign is not None
    assert (model.checkpoint_format, model.dtype_source) == ("float16", source)
