"""freight quantize of models of text and pictures: what is not of the text model is copied, and
named as left out.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parity.random_models import save_random, tokens
from tests.parity.variants import SHAPE, VARIANTS
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, Gemma3Config, PretrainedConfig

import freight
from freight.auto_fp8 import AutoFP8ForCausalLM, BaseQuantizeConfig
from freight.cli.quantize import facts, sentences
from freight.errors import CheckpointError, ConfigError
from freight.llm_compressor import QuantizationModifier, oneshot

IDS = tokens(60)
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip
WHOLE: dict[str, PretrainedConfig] = {
    "qwen2_5_vl": VARIANTS["qwen2-5-vl"],
    "gemma3": Gemma3Config(
        text_config={**SHAPE, "head_dim": 16}, vision_config=VISION, mm_tokens_per_image=4
    ),
}
PARTS = {"qwen2_5_vl": ("*visual.*",), "gemma3": ("*vision_tower.*", "*multi_modal_projector.*")}
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
KV: dict[str, Any] = {"kv_cache": "fp8", "calibration_data": [IDS]}


def beside(kind: str, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {
        name: x
        for name, x in stored.items()
        if any(fnmatch.fnmatchcase(name, at) for at in PARTS[kind])
    }
    assert 0 < len(found) < len(stored)
    return found


def save(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(
        {name: x.contiguous() for name, x in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )


def make(kind: str, folder: Path) -> dict[str, Tensor]:
    """The tensors of a model that is saved as transformers does, with one of integers among them."""
    save_random(WHOLE[kind], folder, torch.bfloat16)
    stored = load_file(folder / "model.safetensors")
    first = min(beside(kind, stored))
    stored[f"{first.rpartition('.')[0]}.position_ids"] = torch.arange(7)
    save(folder, stored)
    for name in PROCESSORS:
        (folder / name).write_text(json.dumps({"name": name}))
    return stored


def said(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def greedy(folder: Path) -> list[int]:
    llm = freight.LLM(str(folder), device="cpu", skip_tokenizer_init=True)
    params = freight.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    return list(llm.generate([IDS], params)[0].outputs[0].token_ids)


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("compressed-tensors", {"weights": "fp8", "activations": "static", **KV}),
        ("fp8", {"weights": "fp8-block"}),
    ],
)
@pytest.mark.parametrize("kind", WHOLE)
def test_other_parts_are_copied_and_named(
    kind: str, form: str, options: dict[str, Any], tmp_path: Path
) -> None:
    before = make(kind, tmp_path / "plain")
    others = beside(kind, before)
    result = freight.quantize(tmp_path / "plain", tmp_path / "out", format=form, **options)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert all(
        stored[name].dtype is x.dtype and torch.equal(stored[name], x) for name, x in others.items()
    )
    assert set(before) <= set(stored)
    assert not [
        name for name in stored if "scale" in name.rpartition(".")[2] and beside_name(kind, name)
    ]

    config = said(tmp_path / "out")
    declared = config.pop("quantization_config")
    config.pop("freight")
    assert config == said(tmp_path / "plain")
    left_out = declared["ignore" if form == "compressed-tensors" else "ignored_layers"]
    matrices = {
        name.removesuffix(".weight")
        for name, x in others.items()
        if x.ndim == 2 and name.endswith(".weight")
    }
    assert matrices
    expected = {*matrices, *in_class(matrices)}
    assert {name for name in left_out if beside_name(kind, name)} == expected
    assert all(
        (tmp_path / "out" / name).read_text() == (tmp_path / "plain" / name).read_text()
        for name in PROCESSORS
    )
    assert result.beside == {"bfloat16": len(others) - 1, "i64": 1}
    line = f"other parts than the text model, carried over as they are: {len(others) - 1} in bfloat16 and 1 in i64"
    assert line in list(sentences(result))
    assert facts(result)["other_parts"] == result.beside

    text = {name: x for name, x in before.items() if name not in others}
    save(tmp_path / "plain", text)
    alone = freight.quantize(tmp_path / "plain", tmp_path / "alone", format=form, **options)
    assert alone.beside == {}
    assert "other_parts" not in facts(alone)
    same = load_file(tmp_path / "alone" / "model.safetensors")
    assert all(
        torch.equal(stored[name].view(torch.uint8), x.view(torch.uint8)) for name, x in same.items()
    )
    assert greedy(tmp_path / "out") == greedy(tmp_path / "alone")


def beside_name(kind: str, name: str) -> bool:
    return any(fnmatch.fnmatchcase(f"{name}.", at) for at in PARTS[kind])


def in_class(names: Iterable[str]) -> set[str]:
    """Names as files have them, as they are in transformers' classes."""
    found = (
        re.sub(
            r"^language_model\.(model\.|(?=lm_head))|^model\.(?=layers|embed|norm)", "text.", name
        )
        for name in names
    )
    found = (re.sub(r"^text\.", "model.language_model.", name) for name in found)
    found = (re.sub(r"^(?:.*\.)?lm_head", "lm_head", name) for name in found)
    return {name if name.startswith(("model.", "lm_head")) else f"model.{name}" for name in found}


@pytest.mark.parametrize("newer", [False, True], ids=["as the hub has them", "as in the class"])
@pytest.mark.parametrize("kind", WHOLE)
def test_names_are_those_of_transformers_class(kind: str, newer: bool, tmp_path: Path) -> None:
    """Every Linear of the class but those in FP8 is named, as it is called there and as it is
    stored.
    """
    renamed = make(kind, tmp_path / "plain")
    assert all(not name.startswith("model.language_model.") for name in renamed)
    if newer:
        renamed = {in_class([name]).pop(): x for name, x in renamed.items()}
        save(tmp_path / "plain", renamed)
    freight.quantize(
        tmp_path / "plain", tmp_path / "out", weights="fp8", ignore=["re:layers.0.mlp.down_proj"]
    )
    left_out = set(said(tmp_path / "out")["quantization_config"]["ignore"])
    quantized = {
        name.removesuffix(".weight_scale")
        for name in load_file(tmp_path / "out" / "model.safetensors")
        if name.endswith(".weight_scale")
    }
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(
            AutoConfig.from_pretrained(tmp_path / "plain")
        )
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    in_fp8 = {name for name in linear if re.search(r"language_model\.layers\.\d", name)}
    in_fp8.remove("model.language_model.layers.0.mlp.down_proj")
    assert len(in_fp8) == len(quantized)
    assert linear - left_out == in_fp8
    matrices = {
        name.removesuffix(".weight")
        for name, x in renamed.items()
        if x.ndim == 2 and name.endswith(".weight")
    }
    embeddings = {name for name in matrices if name.endswith("embed_tokens")}
    assert matrices - quantized - embeddings <= left_out


@pytest.mark.parametrize(
    "name", ["visual.blocks.0.attn.qkv.weight", "visual.blocks.0.attn.qkv.weight_scale"]
)
def test_other_parts_that_are_quantized_are_refused(name: str, tmp_path: Path) -> None:
    stored = make("qwen2_5_vl", tmp_path / "plain")
    scale = name.endswith("scale")
    stored[name] = torch.ones(1) if scale else stored[name].to(torch.float8_e4m3fn)
    save(tmp_path / "plain", stored)
    what = "has the name of a scale" if scale else "is stored as F8_E4M3"
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}, .*{what};.*16-bit model"):
        freight.quantize(tmp_path / "plain", tmp_path / "out", weights="fp8")
    assert not (tmp_path / "out").exists()


def test_what_is_ignored_may_be_of_other_parts_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As recipes for these models name them; what matches nothing is still refused."""
    make("qwen2_5_vl", tmp_path / "plain")
    folder = str(tmp_path / "plain")
    freight.quantize(
        folder, tmp_path / "out", weights="fp8-channel", ignore=["re:.*visual.*", "lm_head"]
    )
    with pytest.raises(ConfigError, match="re:vision_tower"):
        freight.quantize(
            folder, tmp_path / "none", weights="fp8-channel", ignore=["re:vision_tower.*"]
        )
    wanted = (tmp_path / "out" / "model.safetensors").read_bytes()
    for ignore in (["re:.*lm_head", "re:.*visual.*"], ["lm_head"]):
        caplog.clear()
        recipe = QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=ignore)
        out = tmp_path / f"oneshot-{len(ignore)}"
        oneshot(model=folder, recipe=recipe, output_dir=str(out))
        assert (out / "model.safetensors").read_bytes() == wanted
        assert ("outside the text model" in caplog.text) == (len(ignore) == 1)
        assert "matches no" not in caplog.text
    config = BaseQuantizeConfig("fp8", "dynamic", ignore_patterns=["re:.*lm_head", "re:visual.*"])
    model = AutoFP8ForCausalLM.from_pretrained(folder, config)
    model.quantize()
    model.save_quantized(str(tmp_path / "auto"))
    assert (
        "visual.blocks.0.attn.qkv"
        in said(tmp_path / "auto")["quantization_config"]["ignored_layers"]
    )


@pytest.mark.parametrize("ignore", [[], ["re:layers.4.self_attn"]])
def test_keys_that_no_layer_uses_are_quantized_as_their_query_is(
    ignore: list[str], tmp_path: Path
) -> None:
    """Engines merge q, k and v of every layer, and need one scheme for the three."""
    plain, out = tmp_path / "plain", tmp_path / "out"
    save_random(VARIANTS["gemma4-shared"], plain, torch.bfloat16)
    stored = load_file(plain / "model.safetensors")
    under = "model.layers.4.self_attn."
    assert f"{under}k_proj.weight" not in stored
    further = {f"{under}{name}_proj.weight": torch.randn(64, 64).bfloat16() for name in "kv"}
    further[f"{under}k_norm.weight"] = torch.randn(32).bfloat16()
    save(plain, stored | further)
    result = freight.quantize(plain, out, weights="fp8", activations="static", ignore=ignore, **KV)
    assert result.beside == {"bfloat16": 1}
    written = load_file(out / "model.safetensors")
    left_out = said(out)["quantization_config"]["ignore"]
    assert torch.equal(written[f"{under}k_norm.weight"], further[f"{under}k_norm.weight"])
    for side in "kv":
        module = f"{under}{side}_proj"
        weight, exact = written[f"{module}.weight"], further[f"{module}.weight"]
        assert (module in left_out) == bool(ignore)
        if ignore:
            assert torch.equal(weight, exact)
            continue
        decoded = weight.float() * written[f"{module}.weight_scale"].float()
        assert (decoded - exact.float()).norm() < 0.05 * exact.float().norm()
        assert torch.equal(written[f"{module}.input_scale"], written[f"{under}q_proj.input_scale"])
    assert greedy(out)
