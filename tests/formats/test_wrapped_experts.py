"""FP8 files of a text model within a model of text and pictures: names, lists of modules, and
scales of the cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.formats.experts import Made, make, one_of_each_kind
from tests.formats.mixtures import make as make_mixture
from tests.formats.test_experts import logprobs
from tests.refusals import refuses

from freight import quantize
from freight.cli.inspect import describe
from freight.errors import CheckpointError

UNDER = "model.language_model."
_OUTSIDE = ("quantization_config", "dtype")


def wrapped(made: Made, folder: Path, tensors: dict[str, Any] | None = None) -> str:
    """A Qwen3-MoE as the text model of Qwen3-VL-MoE, as Qwen publishes it in FP8."""
    folder.mkdir(exist_ok=True)
    outside = {key: made.config[key] for key in _OUTSIDE if key in made.config}
    if "quantization_config" in outside:
        left_out = ["lm_head", "model.visual.blocks.0.attn.qkv", f"{UNDER}layers.0.mlp.gate"]
        outside["quantization_config"] = made.config["quantization_config"] | {
            "modules_to_not_convert": left_out
        }
    text = {
        key: value for key, value in made.config.items() if key not in (*_OUTSIDE, "architectures")
    }
    text |= {"model_type": "qwen3_vl_moe_text", "rope_theta": 10000.0}
    whole = {"model_type": "qwen3_vl_moe", "architectures": ["Qwen3VLMoeForConditionalGeneration"], **outside,
             "vision_config": {"depth": 1}, "tie_word_embeddings": False, "text_config": text}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(whole))
    stored = {name.replace("model.", UNDER, 1): x for name, x in (tensors or made.tensors).items()}
    stored["model.visual.blocks.0.attn.qkv.weight"] = torch.ones(2, 2, dtype=torch.bfloat16)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def test_every_scale_of_a_wrapped_mixture_is_used(tmp_path: Path) -> None:
    made = make("qwen's own blocks", "qwen3_moe")
    for side in "kv":
        made.tensors[f"model.layers.0.self_attn.{side}_scale"] = torch.tensor(0.05)
    expected = logprobs(made.save(tmp_path / "plain"), kv_cache_dtype="fp8")
    assert torch.equal(logprobs(wrapped(made, tmp_path / "whole"), kv_cache_dtype="fp8"), expected)
    for name in one_of_each_kind(made):
        changed = made.tensors | {name: made.tensors[name] * 1.5}
        assert not torch.equal(
            logprobs(wrapped(made, tmp_path / "whole", changed), kv_cache_dtype="fp8"), expected
        ), name
    facts = describe(str(tmp_path / "whole"))
    assert facts["runs"] == "natively"
    assert facts["skipped"] == {"of the vision model: Freight runs the text model alone": 1}
    assert facts["kv_cache"]["scales"][0]["k"]["names"] == [f"{UNDER}layers.0.self_attn.k_scale"]


def test_a_declaration_within_the_text_model_is_read(tmp_path: Path) -> None:
    """DeepSeek's blocks in the text model of Kimi-K2.5, which declares its weights there."""
    made = make_mixture("deepseek's own blocks", "deepseek_v3")
    expected = logprobs(made.save(tmp_path / "plain"))
    text = {
        key: value for key, value in made.config.items() if key not in ("dtype", "architectures")
    }
    whole = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"],
             "tie_word_embeddings": False, "dtype": made.config["dtype"],
             "vision_config": {"patch_size": 14}, "text_config": text}  # fmt: skip
    folder = tmp_path / "whole"
    folder.mkdir()
    stored = {f"language_model.{name}": tensor for name, tensor in made.tensors.items()}
    stored["vision_tower.encoder.norm.weight"] = stored["mm_projector.proj.0.weight"] = torch.ones(
        2, 2
    )
    save_file(
        {name: tensor.clone() for name, tensor in stored.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(whole))
    assert torch.equal(logprobs(str(folder)), expected)
    with pytest.raises(CheckpointError, match="quantized"):
        quantize(str(folder), tmp_path / "out", weights="fp8", kv_cache="none")
    text["quantization_config"] = {"quant_method": "awq", "bits": 8}
    (folder / "config.json").write_text(json.dumps(whole))
    with refuses(CheckpointError, "awq", "bits 8"):
        logprobs(str(folder))


def test_quantizing_keeps_the_vision_model(tmp_path: Path) -> None:
    made = make("qwen's own blocks", "qwen3_moe")
    for module, matrix in made.dequantized.items():
        made.tensors[f"{module}.weight"] = matrix.to(torch.bfloat16)
        made.tensors.pop(f"{module}.weight_scale_inv")
    made.config.pop("quantization_config")
    without = {
        name: x for name, x in made.tensors.items() if not name.endswith(("k_scale", "v_scale"))
    }
    whole, out = wrapped(made, tmp_path / "whole", without), tmp_path / "out"
    assert quantize(whole, out, weights="fp8", kv_cache="none").beside == {"bfloat16": 1}
    name = "model.visual.blocks.0.attn.qkv"
    assert torch.equal(
        load_file(out / "model.safetensors")[f"{name}.weight"],
        torch.ones(2, 2, dtype=torch.bfloat16),
    )
    assert name in json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert 0 < (logprobs(str(out)) - logprobs(whole)).abs().mean() < 0.2
