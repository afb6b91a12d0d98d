"""freight quantize from end to end: what it writes is what other tools write, runs here, and is
whole or not there.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.refusals import refuses

import freight
from freight import LLM, CapacityError, CheckpointError, ConfigError, SamplingParams
from freight.checkpoint.reader import resolve_model
from freight.fp8.cast import decode, encode
from freight.fp8.formats import Format
from freight.lab.evaluate.report import compare_caches
from freight.quantizer.plan import QuantizeArgs, plan
from freight.quantizer.quantize import load_samples, open_unquantized
from freight.settings.engine import EngineArgs

FIXTURES = Path(__file__).parents[1] / "fixtures"
BASE = FIXTURES / "base_bf16"
LLM_COMPRESSOR = json.loads((FIXTURES / "llmcompressor_scales.json").read_text())
IDS = LLM_COMPRESSOR["input_ids"]
STATIC: dict[str, Any] = {
    "weights": "fp8",
    "activations": "static",
    "kv_cache": "fp8",
    "calibration_data": IDS,
}
SMALL: dict[str, Any] = {
    "kv_cache_memory": "4MiB",
    "max_model_len": 128,
    "skip_tokenizer_init": True,
}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def headers(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors(folder).items()}


def config(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def generate(folder: Path, **options: Any) -> list[int]:
    llm = LLM(str(folder), **SMALL | options)
    params = SamplingParams(max_tokens=8, temperature=0.0, detokenize=False, ignore_eos=True)
    return list(llm.generate([1, 2, 3, 4], params)[0].outputs[0].token_ids)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_tensors_are_those_that_llm_compressor_writes(out: Path):
    freight.quantize(BASE, out, **STATIC)
    assert headers(out) == headers(FIXTURES / "ct_docs")
    got, theirs = tensors(out), tensors(FIXTURES / "ct_docs")
    for name in got:
        if name.endswith("weight_scale") or (
            got[name].dtype is torch.bfloat16 and not name.endswith("_scale")
        ):
            assert torch.equal(got[name], theirs[name]), name
    ours, docs = (config(folder)["quantization_config"] for folder in (out, FIXTURES / "ct_docs"))
    assert ours.pop("kv_cache_format") == "fp8_e4m3fn"
    assert ours.keys() <= docs.keys()
    assert (ours["format"], ours["ignore"]) == (docs["format"], docs["ignore"])
    (group,), (other,) = ours["config_groups"].values(), docs["config_groups"].values()
    assert group.keys() <= other.keys()
    for part in ("weights", "input_activations"):
        assert (group[part] | {"observer": 0}).items() <= (other[part] | {"observer": 0}).items()


def test_tensors_are_those_that_autofp8_writes(out: Path):
    freight.quantize(BASE, out, **STATIC, format="fp8")
    assert headers(out) == headers(FIXTURES / "autofp8_static_kv")
    said = config(out)["quantization_config"]
    assert said == config(FIXTURES / "autofp8_static_kv")["quantization_config"] | {
        "kv_cache_format": "fp8_e4m3fn"
    }


def test_blocks_in_the_other_format_are_deepseeks(out: Path):
    freight.quantize(BASE, out, weights="fp8-block", format="fp8")
    got, said = headers(out), config(out)["quantization_config"]
    keys = ("weight_block_size", "quant_method", "fmt", "activation_scheme")
    assert [said[key] for key in keys] == [[128, 128], "fp8", "e4m3", "dynamic"]
    assert got["model.layers.0.mlp.down_proj.weight_scale_inv"] == (torch.float32, (2, 3))
    assert not [name for name in got if name.endswith("weight_scale")]
    assert len(generate(out)) == 8


def test_scales_in_float32_are_amax_over_448(out: Path):
    freight.quantize(BASE, out, weights="fp8", format="fp8")
    got, base = tensors(out), tensors(BASE)
    for name in base:
        if f"{name}_scale" in got:
            assert got[f"{name}_scale"] == base[name].float().abs().amax() / 448
            codes = got[name].view(torch.uint8).bitwise_and(0x7F)
            assert codes.amax() == 0x7E, "the largest becomes 448"


@pytest.mark.parametrize("weights", ["fp8", "fp8-channel", "fp8-block"])
def test_weights_are_within_half_a_step_and_run(out: Path, weights: str):
    """The scale is rounded to bfloat16 first: a reader, who sees that one, finds the nearest codes."""
    result = freight.quantize(BASE, out, weights=weights)
    got, base = tensors(out), tensors(BASE)
    assert result.bytes_after < 0.7 * result.bytes_before
    quantized = [name for name in got if got[name].dtype is torch.float8_e4m3fn]
    assert len(quantized) == 14
    differ = 0
    for name in quantized:
        scale, true = got[f"{name}_scale"].float(), base[name].float()
        if weights == "fp8-block":
            scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            scale = scale[: len(true), : true.shape[1]]
        step = torch.maximum(true.abs() / 16, scale * 2**-10)  # half the distance of E4M3 values
        assert torch.all((decode(got[name], scale) - true).abs() <= step * 1.1), name
        nearest = encode(base[name], scale, Format.E4M3FN).float()
        assert torch.equal(got[name].float(), nearest), name
        if weights == "fp8":
            unrounded = encode(base[name], true.abs().amax() / 448, Format.E4M3FN)
            differ += int((unrounded.float() != nearest).sum())
    assert (differ > 0) is (weights == "fp8")
    assert len(generate(out)) == 8
    plain = out.with_name("plain")
    freight.quantize(BASE, plain, weights=weights, activations="none")
    same = tensors(plain)
    assert same.keys() == got.keys()
    assert all(torch.equal(same[name].float(), got[name].float()) for name in got)
    assert len(generate(plain)) == 8


def test_the_output_head_is_rounded_if_asked(out: Path):
    result = freight.quantize(BASE, out, lm_head=True)
    got, head = tensors(out), tensors(BASE)["lm_head.weight"].float()
    assert got["lm_head.weight"].dtype is torch.float8_e4m3fn
    assert got["model.embed_tokens.weight"].dtype is torch.bfloat16
    values = decode(got["lm_head.weight"], got["lm_head.weight_scale"].float())
    assert (values - head).abs().max() <= head.abs().max() / 16
    assert config(out)["quantization_config"]["ignore"] == []
    assert len(generate(out)) == 8
    assert result.bytes_after < 0.7 * result.bytes_before


def test_ignored_modules_stay_as_they_are(out: Path):
    left = ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"]
    freight.quantize(BASE, out, **STATIC, ignore=["re:1.*down_proj", left[0]])
    assert config(out)["quantization_config"]["ignore"] == [*left, "lm_head"]
    got, base = tensors(out), tensors(BASE)
    for module in left:
        assert torch.equal(got[f"{module}.weight"], base[f"{module}.weight"])
        assert not [name for name in got if name.startswith(module) and "scale" in name]
    assert len(generate(out)) == 8


def test_a_pattern_that_tears_q_k_v_apart_is_told(out: Path):
    result = freight.quantize(BASE, out, ignore=["re:q_proj"])
    assert [warning for warning in result.warnings if "model.layers.0.self_attn.k_proj" in warning]
    assert len(generate(out)) == 8


def info_of(folder: Path) -> list[Any]:
    info = LLM(str(folder), **SMALL).kv_cache_info()
    return [info[key] for key in ("dtype", "granularity", "scale_source")]


@pytest.mark.parametrize("granularity", ["tensor", "head", "channel"])
def test_kv_scales_alone(out: Path, granularity: str):
    options = {"kv_cache": "fp8", "kv_granularity": granularity, "calibration_data": IDS}
    freight.quantize(BASE, out, weights="none", **options)
    scales = {
        f"model.layers.{i}.self_attn.{side}_scale": (torch.bfloat16, (1,))
        for i in range(2)
        for side in "kv"
    }
    assert headers(out) == headers(BASE) | scales
    said = config(out)["quantization_config"]
    assert (said["format"], said["config_groups"], said["ignore"]) == ("dense", {}, [])
    assert ("kv_scales" in config(out)["freight"]) is (granularity != "tensor")
    assert info_of(out) == ["fp8_e4m3fn", granularity, "checkpoint"]


def test_tgi_gets_one_scale_and_its_format(out: Path):
    freight.quantize(BASE, out, format="tgi", calibration_data=IDS)
    names = [f"model.layers.{index}.self_attn." for index in range(2)]
    scales = {f"{name}kv_scale": (torch.float32, ()) for name in names}
    assert headers(out) == headers(BASE) | scales
    assert config(out)["kv_cache_torch_dtype"] == "float8_e4m3fn"
    assert "quantization_config" not in config(out)
    for name in names:
        larger = max(LLM_COMPRESSOR["scales"][f"{name}{side}_scale"] for side in "kv")
        assert float(tensors(out)[f"{name}kv_scale"]) == pytest.approx(larger, rel=2**-8)
    assert info_of(out) == ["fp8_e4m3fn", "tensor", "checkpoint"]


def test_scales_reach_the_kernels(out: Path):
    freight.quantize(BASE, out, **STATIC, kv_granularity="channel")
    before, stored = generate(out), tensors(out)
    assert generate(out) == before
    small = {name: tensor / 64 for name, tensor in stored.items() if name.endswith("input_scale")}
    save_file(stored | small, out / "model.safetensors")
    assert generate(out) != before


def test_the_demo_is_never_calibrated_on_the_text_that_judges_it():
    opened, source = open_unquantized("demo"), resolve_model("demo")
    decided = plan(QuantizeArgs(kv_cache="fp8", num_samples=4))
    samples = load_samples(opened, decided, source / "calibration.txt")
    assert load_samples(opened, decided, None) == samples
    calibrated, judged = (
        (source / f"{name}.txt").read_text(encoding="utf-8") for name in ("calibration", "heldout")
    )
    lines = {line for line in judged.splitlines() if len(line) > 60}
    assert len(lines) > 100
    assert len(lines & set(calibrated.splitlines())) < 0.01 * len(lines)


def test_the_demo_needs_no_data_and_loses_little(out: Path):
    options = {"activations": "static", "kv_cache": "fp8", "num_samples": 2}
    freight.quantize("demo", out, weights="fp8", max_seq_len=512, **options)
    tokenizer = ["tokenizer.json", "tokenizer_config.json"]
    assert sorted(file.name for file in out.iterdir()) == [
        "LICENSE.txt", "config.json", "freight_quantization.json", "freight_quantization.md",
        "generation_config.json", "model.safetensors", *tokenizer,
    ]  # fmt: skip
    text = (resolve_model("demo") / "heldout.txt").read_text(encoding="utf-8")
    (plain,) = compare_caches(EngineArgs("demo"), [], text, 256, max_tokens=768)
    caches = [("auto", "auto")]
    _, quantized = compare_caches(EngineArgs(str(out)), caches, text, 256, max_tokens=768)
    found = (quantized.dtype, quantized.granularity, quantized.scale_source)
    assert found == ("fp8_e4m3fn", "tensor", "checkpoint")
    assert quantized.perplexity == pytest.approx(plain.perplexity, rel=0.01)


@pytest.mark.slow
def test_weights_quantized_at_load_lose_little():
    text = (resolve_model("demo") / "heldout.txt").read_text(encoding="utf-8")
    plain, quantized = (
        compare_caches(EngineArgs("demo", quantization=method), [], text, max_tokens=8192)[0]
        for method in (None, "fp8")
    )
    assert quantized.perplexity == pytest.approx(plain.perplexity, rel=0.005)
    assert quantized.perplexity != plain.perplexity


def test_interruption_leaves_nothing(out: Path):
    def interrupt(what: str, done: int, total: int) -> None:
        if what == "writing" and done == total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        freight.quantize(BASE, out, on_progress=interrupt)
    assert list(out.parent.iterdir()) == []


def with_tensors(folder: Path, **changed: torch.Tensor) -> Path:
    """A copy of the model with other tensors; returns the folder."""
    shutil.copytree(BASE, folder)
    save_file(tensors(folder) | changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_damaged_weight_is_named(out: Path, tmp_path: Path):
    name = "model.layers.1.mlp.up_proj.weight"
    weight = tensors(BASE)[name]
    weight[1, 1] = float("nan")
    folder = with_tensors(tmp_path / "damaged", **{name: weight})
    with refuses(CheckpointError, name, "NaN"):
        freight.quantize(folder, out)
    with refuses(CheckpointError, "model.layers.1.mlp.down_proj: input", "NaN"):
        freight.quantize(folder, out, **STATIC)
    assert not out.exists()


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"kv_cache": "fp8"}, ConfigError, "--kv-cache fp8.*--calibration-data"),
    ({"activations": "static"}, ConfigError, "--activations static.*--calibration-data"),
    ({"kv_cache": "fp8", "calibration_data": [[]]}, ConfigError, "has no token"),
    ({"kv_cache": "fp8", "calibration_data": "/nowhere.txt"}, ConfigError, "/nowhere.txt"),
    ({"ignore": ["re:experts"]}, ConfigError, "matches no Linear module"),
    ({"weight": "fp8"}, ConfigError, r"did you mean weights\?"),
    ({"out": BASE}, ConfigError, "exists"),
    ({"out": BASE, "model": FIXTURES}, ConfigError, "exists"),  # before a model is looked at
    ({"out": ""}, ConfigError, "needs a folder to write"),
    ({"model": FIXTURES / "ct_docs"}, CheckpointError, "is quantized already"),
    ({"model": FIXTURES / "autofp8_static_kv"}, CheckpointError, "is quantized already"),
    ({"model": FIXTURES}, CheckpointError, "no config.json"),
    ({"lm_head": True, "activations": "static"}, ConfigError, "head.*not calibrated"),
    ({"lm_head": True, "weights": "none", "kv_cache": "fp8"}, ConfigError, "--lm-head.*--weights"),
    ({"lm_head": True, "model": "demo"}, ConfigError, "lm_head.*embedding"),
]


def test_bad_input_leaves_nothing(out: Path):
    for options, error, says in REFUSED:
        with pytest.raises(error, match=says):
            freight.quantize(**{"model": BASE, "out": out} | options)
        assert list(out.parent.iterdir()) == []


def test_a_model_with_scales_is_not_calibrated_again(tmp_path: Path, out: Path):
    scale = {"model.layers.0.self_attn.kv_scale": torch.tensor(0.1, dtype=torch.float32)}
    folder = with_tensors(tmp_path / "scaled", **scale)
    data = [list(range(100))]
    with pytest.raises(CheckpointError, match="has KV scales already"):
        freight.quantize(folder, out, weights="none", kv_cache="fp8", calibration_data=data)
    with refuses(CheckpointError, "no KV scales", "layers 1"):  # nor are some of them kept
        freight.quantize(folder, out)


def test_a_full_disk_is_seen_before_the_work(out: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000)
    )  # type: ignore[attr-defined]
    with pytest.raises(CapacityError, match=re.escape("has 1,000 free")):
        freight.quantize(BASE, out, **STATIC)
    assert not out.exists()


CENTERED: dict[str, Any] = {
    "weights": "none",
    "kv_cache": "fp8",
    "center": True,
    "num_samples": 8,
    "max_seq_len": 512,
}


@pytest.mark.slow
def test_centers_lie_beside_scales_that_hold_without_them(tmp_path: Path):
    plain, centered = tmp_path / "plain", tmp_path / "centered"
    options = CENTERED | {"kv_granularity": "channel"}
    result = freight.quantize("demo", centered, **options)
    freight.quantize("demo", plain, **options | {"center": False})
    assert [one.k is not None for one in result.centers] == [True] * 6
    ours, others = tensors(centered), tensors(plain)
    assert ours.keys() == others.keys()
    assert all(torch.equal(ours[name], others[name]) for name in ours)

    text = (resolve_model("demo") / "heldout.txt").read_text()
    scores = [
        compare_caches(EngineArgs(str(folder)), [("auto", "auto")], text, 512, max_tokens=2048)[1]
        for folder in (plain, centered)
    ]
    assert scores[1].mean_kl < 0.85 * scores[0].mean_kl
    assert scores[1].bytes_per_token == scores[0].bytes_per_token


@pytest.mark.slow
def test_centers_change_with_chunks_and_batches_no_more_than_anything_else(tmp_path: Path):
    freight.quantize("demo", tmp_path / "out", **CENTERED)
    prompts = [list(range(10 + i, 60 + 7 * i)) for i in range(4)]
    params = SamplingParams(
        max_tokens=12, temperature=0.0, detokenize=False, ignore_eos=True, logprobs=1
    )

    def run(**options: Any) -> list[Any]:
        llm = LLM(str(tmp_path / "out"), **{**SMALL, **options})
        return [
            (o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(prompts, params)
        ]

    together = run()
    assert together == run(max_num_seqs=1, max_num_batched_tokens=16, enable_prefix_caching=False)


def test_centers_that_gain_nothing_are_refused(tmp_path: Path, out: Path):
    """A model whose keys and values are zero."""
    zeros = {
        name: torch.zeros_like(tensor)
        for name, tensor in tensors(BASE).items()
        if "k_proj" in name or "v_proj" in name
    }
    folder = with_tensors(tmp_path / "model", **zeros)
    with refuses(ConfigError, "--center", "omit it"):
        freight.quantize(folder, out, **CENTERED, calibration_data=IDS)
    assert not out.exists()


@pytest.mark.slow
def test_scales_that_move_take_centers_along_or_hold_without(tmp_path: Path):
    from freight.quantizer.transfer import export_scales, extract_scales

    quantized = tmp_path / "quantized"
    freight.quantize("demo", quantized, **CENTERED)
    extract_scales(str(quantized), "demo", tmp_path / "moved")
    moved, made = (
        json.loads((tmp_path / name / "freight_kv_scales.json").read_text())
        for name in ("moved", "quantized")
    )
    assert moved == made
    exported = export_scales(str(quantized), tmp_path / "scales.json")
    stored = tensors(quantized)
    for index, layer in enumerate(exported.layers):
        assert layer is not None
        assert layer.k[0] == float(stored[f"model.layers.{index}.self_attn.k_scale"])
