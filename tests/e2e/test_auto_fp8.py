"""The two forms that users of AutoFP8 type, with only the import changed, and what its config says
afterwards.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.refusals import refuses
from transformers import AutoTokenizer, BatchEncoding

from freight import LLM, CheckpointError, ConfigError, SamplingParams
from freight.auto_fp8 import AutoFP8ForCausalLM, BaseQuantizeConfig
from freight.checkpoint.reader import resolve_model
from freight.quantizer.quantize import Unquantized

FIXTURES = Path(__file__).parents[1] / "fixtures"
BASE, AUTOFP8 = FIXTURES / "base_bf16", FIXTURES / "autofp8_static_kv"
DEMO = str(resolve_model("demo"))


def rows(num_rows: int = 8, length: int = 64) -> torch.Tensor:
    return torch.randint(0, 256, (num_rows, length), generator=torch.Generator().manual_seed(3))


def test_kv_targets_give_the_tensors_that_autofp8_writes(tmp_path: Path):
    quantize_config = BaseQuantizeConfig(kv_cache_quant_targets=("k_proj", "v_proj"))
    model = AutoFP8ForCausalLM.from_pretrained(
        BASE, quantize_config, torch_dtype="auto", device_map="auto"
    )
    model.quantize(rows())
    model.save_quantized(tmp_path / "out")
    got, theirs = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "out", AUTOFP8)
    )
    assert {name: (t.dtype, t.shape) for name, t in got.items()} == {
        n: (t.dtype, t.shape) for n, t in theirs.items()
    }
    assert quantize_config.ignored_layers == ["lm_head"]
    assert quantize_config.kv_cache_quant_layers == [
        f"model.layers.{index}.self_attn.{side}_proj" for index in range(2) for side in "kv"
    ]
    assert model.model_type == "llama"


def test_padding_is_not_observed(tmp_path: Path):
    def scales(tokens: Any, name: str) -> dict[str, float]:
        model = AutoFP8ForCausalLM.from_pretrained(BASE, BaseQuantizeConfig())
        model.quantize(tokens)
        model.save_quantized(tmp_path / name)
        stored = load_file(tmp_path / name / "model.safetensors")
        return {name: float(t) for name, t in stored.items() if name.endswith("input_scale")}

    ids = rows() % 8
    padded = torch.cat([ids, rows() | 128], 1)
    mask = torch.cat([torch.ones_like(ids), torch.zeros_like(ids)], 1)
    plain = scales(ids, "plain")
    assert scales(BatchEncoding({"input_ids": padded, "attention_mask": mask}), "masked") == plain
    assert scales(padded, "unmasked") != plain


def test_patterns_are_searched_and_expanded(tmp_path: Path):
    quantize_config = BaseQuantizeConfig(
        activation_scheme="dynamic", ignore_patterns=["re:.*lm_head", "re:1.*down"]
    )
    AutoFP8ForCausalLM.from_pretrained(BASE, quantize_config)
    assert quantize_config.ignored_layers == ["model.layers.1.mlp.down_proj", "lm_head"]


def test_what_its_config_refuses():
    targets = {"kv_cache_quant_targets": ("k_proj", "v_proj")}
    wrong = "Invalid activation_scheme. Choose either 'static' or 'dynamic'."
    cases: list[tuple[dict[str, Any], str]] = [
        ({"quant_method": "gptq"}, r"Only FP8 quantization is supported\."),
        ({"activation_scheme": "none"}, wrong),
        ({"activation_scheme": "dynamic", **targets}, "needs calibration"),
    ]
    for options, says in cases:
        with pytest.raises(ValueError, match=says):
            BaseQuantizeConfig(**options)


def test_what_the_model_refuses(tmp_path: Path):
    def model(**options: Any) -> AutoFP8ForCausalLM:
        return AutoFP8ForCausalLM.from_pretrained(BASE, BaseQuantizeConfig(**options))

    with refuses(ValueError, "kv_cache_quant_targets", "('k_proj',)", "'v_proj'"):
        model(kv_cache_quant_targets=("k_proj",))
    says = ("activation_scheme='static'", "calibration tokens", "quantize(tokenizer", '.to("cuda")')
    with refuses(ConfigError, *says):
        model().quantize()
    with pytest.raises(ConfigError, match="has no token"):
        model().quantize([])
    with pytest.raises(ConfigError, match=r"must be \[rows, length\]"):
        model().quantize(torch.arange(300))
    with pytest.raises(ConfigError, match="call quantize"):
        model().save_quantized(tmp_path / "out")
    with refuses(ConfigError, "--ignore re:.*"):
        model(activation_scheme="dynamic", ignore_patterns=["re:.*"])
    with refuses(ConfigError, "'load_in_8bit'"):
        AutoFP8ForCausalLM.from_pretrained(BASE, BaseQuantizeConfig(), load_in_8bit=True)
    with pytest.raises(CheckpointError, match="is quantized already"):
        AutoFP8ForCausalLM.from_pretrained(AUTOFP8, BaseQuantizeConfig())


def test_the_script_runs_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """example_dataset.py for a base model, without `.to("cuda")`; the second run replaces what the
    first one wrote.
    """
    out = tmp_path / "base-FP8"
    quantized_model_dir = str(out)
    for scheme in ("static", "dynamic"):
        tokenizer = AutoTokenizer.from_pretrained(DEMO, use_fast=True)
        tokenizer.pad_token = tokenizer.eos_token
        ds = [f"def f{i}(x):\n    return x * {i}\n" * 4 for i in range(3)]
        examples = tokenizer(ds, padding=True, truncation=True, return_tensors="pt")
        quantize_config = BaseQuantizeConfig(quant_method="fp8", activation_scheme=scheme)
        model = AutoFP8ForCausalLM.from_pretrained(DEMO, quantize_config=quantize_config)
        model.quantize(examples if scheme == "static" else [])
        model.save_quantized(quantized_model_dir)
        printed = capsys.readouterr().out
        assert printed.startswith("LlamaForCausalLM(\n")
        assert f"fp8_e4m3fn, inputs {scheme}\n" in printed
        assert f")\nSaving the model to {quantized_model_dir}\nSaved: " in printed
        assert printed.endswith(" MiB after\n")
        stored = load_file(out / "model.safetensors")
        scales = [tensor for name, tensor in stored.items() if name.endswith("input_scale")]
        assert len(scales) == (42 if scheme == "static" else 0)
        for scale in scales:
            assert (scale.shape, scale.dtype) == ((), torch.float32)
            assert scale > 0
        llm = LLM(quantized_model_dir, kv_cache_memory="8MiB", max_model_len=128)
        params = SamplingParams(max_tokens=8, temperature=0.0)
        assert llm.generate("def main(", params)[0].outputs[0].text
    declared = json.loads((out / "config.json").read_text())["quantization_config"]
    assert declared == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "ignored_layers": ["lm_head"],
    }
    assert (out / "tokenizer.json").is_file()


def static_model() -> AutoFP8ForCausalLM:
    model = AutoFP8ForCausalLM.from_pretrained(BASE, BaseQuantizeConfig())
    model.quantize(rows())
    return model


def test_what_may_not_be_overwritten_is_refused_before_calibrating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out, foreign = tmp_path / "out", tmp_path / "foreign"
    static_model().save_quantized(out)
    shutil.copytree(AUTOFP8, foreign)
    before = (out / "model.safetensors").read_bytes()

    def too_late(*args: Any, **options: Any) -> None:
        raise AssertionError("calibrated before the output was looked at")

    monkeypatch.setattr("freight.quantizer.quantize.Unquantized.calibrate", too_late)
    with refuses(ConfigError, str(out), "exists", "--overwrite", "overwrite=True"):
        static_model().save_quantized(out, overwrite=False)
    with refuses(ConfigError, str(foreign), "no model"):
        static_model().save_quantized(foreign)
    assert (out / "model.safetensors").read_bytes() == before


def test_two_outputs_take_one_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runs, calibrate = [], Unquantized.calibrate

    def counted(self: Unquantized, *args: Any) -> Any:
        runs.append(1)
        return calibrate(self, *args)

    monkeypatch.setattr(Unquantized, "calibrate", counted)
    model = static_model()
    for name in ("one", "two"):
        model.save_quantized(tmp_path / name)
    assert len(runs) == 1
    assert (tmp_path / "one/model.safetensors").read_bytes() == (
        tmp_path / "two/model.safetensors"
    ).read_bytes()


def test_texts_a_file_and_a_name_of_the_hub_are_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    texts = [f"def f{i}(x):\n    return x * {i}\n" * 4 for i in range(2)]
    (tmp_path / "ds.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    hub = SimpleNamespace(
        load_dataset=lambda name: {"train_sft": [{"text": text} for text in texts]}
    )
    monkeypatch.setitem(sys.modules, "datasets", hub)  # type: ignore[arg-type]
    written = []
    for number, data in enumerate((texts, tmp_path / "ds.jsonl", "mgoin/ultrachat_2k")):
        model = AutoFP8ForCausalLM.from_pretrained(DEMO, BaseQuantizeConfig())
        model.quantize(data)
        model.save_quantized(tmp_path / str(number))
        written.append((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert written[0] == written[1] == written[2]


def test_printing_shows_layers_and_formats():
    config = BaseQuantizeConfig(
        kv_cache_quant_targets=("k_proj", "v_proj"), ignore_patterns=["re:1.*down_proj"]
    )
    model = AutoFP8ForCausalLM.from_pretrained(BASE, config)
    plain = str(model).splitlines()
    assert plain[:4] == [
        "LlamaForCausalLM(",
        "  (model.embed_tokens): [256, 256], bfloat16",
        "  (model.layers): (",
        "    (0-1): 2 x (",
    ]
    assert "      (self_attn.k_proj): Linear(256 -> 128), bfloat16" in plain
    assert plain[-2:] == ["  (lm_head): Linear(256 -> 256), bfloat16", ")"]
    model.quantize(rows())
    lines = str(model).splitlines()
    assert [line for line in lines if "down_proj" in line] == [
        "      (mlp.down_proj): Linear(384 -> 256), fp8_e4m3fn, inputs static",
        "      (mlp.down_proj): Linear(384 -> 256), bfloat16",
    ]
    assert lines.count("      (KV cache): fp8_e4m3fn, a scale per tensor") == 2
