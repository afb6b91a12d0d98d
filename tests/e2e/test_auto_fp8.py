"""The two forms that users of AutoFP8 type, with only the import changed, and what its config says afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, BatchEncoding

from freight import LLM, CheckpointError, ConfigError, SamplingParams
from freight.auto_fp8 import AutoFP8ForCausalLM, BaseQuantizeConfig
from freight.checkpoint.reader import resolve_model

FIXTURES = Path(__file__).parents[1] / "fixtures"
BASE, AUTOFP8 = FIXTURES / "base_bf16", FIXTURES / "autofp8_static_kv"
DEMO = str(resolve_model("demo"))


def rows(num_rows: int = 8, length: int = 64) -> torch.Tensor:
    return torch.randint(0, 256, (num_rows, length), generator=torch.Generator().manual_seed(3))


def text_of(folder: Path) -> str:
    llm = LLM(str(folder), kv_cache_memory="8MiB", max_model_len=128)
    return llm.generate("def main(", SamplingParams(max_tokens=8, temperature=0.0))[0].outputs[0].text


def test_the_dynamic_form(tmp_path: Path):
    out = tmp_path / "out"
    quantize_config = BaseQuantizeConfig(quant_method="fp8", activation_scheme="dynamic")
    model = AutoFP8ForCausalLM.from_pretrained(DEMO, quantize_config)
    model.quantize([])
    model.save_quantized(str(out))
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    assert said == {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}
    assert (out / "tokenizer.json").is_file()
    assert text_of(out)


def test_the_static_form(tmp_path: Path):
    out = tmp_path / "out"
    tokenizer = AutoTokenizer.from_pretrained(DEMO, use_fast=True)
    tokenizer.pad_token = tokenizer.eos_token
    examples = [f"def f{i}(x):\n    return x * {i}\n" * 8 for i in range(8)]
    encodings = tokenizer(examples, padding=True, truncation=True, return_tensors="pt")
    quantize_config = BaseQuantizeConfig(quant_method="fp8", activation_scheme="static")
    model = AutoFP8ForCausalLM.from_pretrained(DEMO, quantize_config)
    model.quantize(encodings)
    model.save_quantized(out)
    stored = load_file(out / "model.safetensors")
    scales = [tensor for name, tensor in stored.items() if name.endswith("input_scale")]
    assert len(scales) == 42
    assert all(scale.shape == () and scale.dtype is torch.float32 and scale > 0 for scale in scales)
    assert text_of(out)


def test_kv_targets_give_the_tensors_that_autofp8_writes(tmp_path: Path):
    quantize_config = BaseQuantizeConfig(kv_cache_quant_targets=("k_proj", "v_proj"))
    model = AutoFP8ForCausalLM.from_pretrained(BASE, quantize_config, torch_dtype="auto", device_map="auto")
    model.quantize(rows())
    model.save_quantized(tmp_path / "out")
    got, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", AUTOFP8))
    assert {name: (t.dtype, t.shape) for name, t in got.items()} == {n: (t.dtype, t.shape) for n, t in theirs.items()}
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
    quantize_config = BaseQuantizeConfig(activation_scheme="dynamic", ignore_patterns=["re:.*lm_head", "re:1.*down"])
    AutoFP8ForCausalLM.from_pretrained(BASE, quantize_config)
    assert quantize_config.ignored_layers == ["model.layers.1.mlp.down_proj", "lm_head"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quant_method": "gptq"}, r"Only FP8 quantization is supported\."),
        ({"activation_scheme": "none"}, "Invalid activation_scheme. Choose either 'static' or 'dynamic'."),
        ({"activation_scheme": "dynamic", "kv_cache_quant_targets": ("k_proj", "v_proj")}, "needs calibration"),
    ],
)
def test_what_its_config_refuses(options: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        BaseQuantizeConfig(**options)


def test_what_the_model_refuses(tmp_path: Path):
    def model(**options: Any) -> AutoFP8ForCausalLM:
        return AutoFP8ForCausalLM.from_pretrained(BASE, BaseQuantizeConfig(**options))

    with pytest.raises(ValueError, match="do not name the key and value projections"):
        model(kv_cache_quant_targets=("k_proj",))
    with pytest.raises(ConfigError, match="needs calibration tokens"):
        model().quantize()
    with pytest.raises(ConfigError, match="has no token"):
        model().quantize([])
    with pytest.raises(ConfigError, match=r"are \[rows, length\]"):
        model().quantize(torch.arange(300))
    with pytest.raises(ConfigError, match="call quantize"):
        model().save_quantized(tmp_path / "out")
    with pytest.raises(ConfigError, match="no option 'load_in_8bit'"):
        AutoFP8ForCausalLM.from_pretrained(BASE, BaseQuantizeConfig(), load_in_8bit=True)
    with pytest.raises(CheckpointError, match="is quantized already"):
        AutoFP8ForCausalLM.from_pretrained(AUTOFP8, BaseQuantizeConfig())
