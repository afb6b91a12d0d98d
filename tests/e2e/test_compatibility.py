"""Forms that users of other engines type, with only the name of the package or the command changed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.environment import is_option
from tests.refusals import assert_names
from tests.scaled_models import with_scales

from freight import LLM, SamplingParams
from freight.__main__ import run as main
from freight.checkpoint.reader import resolve_model

DEMO = resolve_model("demo")
LAYERS = 6
SMALL: dict[str, Any] = {"kv_cache_memory": "8MiB", "max_model_len": 128}
PROMPT = "def main("

Cache = tuple[str, str | None, str | None]  # dtype, granularity, scale_source


def cache_of(info: dict[str, Any]) -> Cache:
    return info["dtype"], info["granularity"], info["scale_source"]


E4M3_DYNAMIC: Cache = ("fp8_e4m3fn", "token", "dynamic")
E5M2: Cache = ("fp8_e5m2", "tensor", "unit")
INT8: Cache = ("int8", "token", "dynamic")
FILE: Cache = ("fp8_e4m3fn", "tensor", "file")
GIVEN: Cache = ("fp8_e4m3fn", "tensor", "given")
CHECKPOINT: Cache = ("fp8_e4m3fn", "tensor", "checkpoint")
PLAIN: Cache = ("bfloat16", None, None)


@pytest.fixture(scope="module")
def scale_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `--quantization-param-path` takes."""
    path = tmp_path_factory.mktemp("scales") / "kv_cache_scales.json"
    factors = {str(layer): 0.03 + 0.001 * layer for layer in range(LAYERS)}
    kv_cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": factors}}
    path.write_text(json.dumps({"model_type": "llama", "kv_cache": kv_cache}))
    return str(path)


def of_demo(folder: Path, scales: dict[str, torch.Tensor], **config: Any) -> str:
    """A copy of the shipped model with these scales in every layer."""
    return str(with_scales(DEMO, folder / "model", lambda layer: scales, LAYERS, **config))


def test_python() -> None:
    llm = LLM(model="demo", kv_cache_dtype="fp8", **SMALL)
    assert cache_of(llm.kv_cache_info()) == E4M3_DYNAMIC
    sampling_params = SamplingParams(temperature=1.3, top_p=0.8)
    text = llm.generate(PROMPT, sampling_params)[0].outputs[0].text
    assert isinstance(text, str)
    assert text
    output = LLM(str(DEMO), **SMALL).generate(PROMPT, SamplingParams(max_tokens=2))[0]
    assert output.prompt == PROMPT


@pytest.mark.parametrize("ranks", [1, 2])
def test_python_with_a_file_of_scales(tmp_path: Path, scale_file: str, ranks: int) -> None:
    content = json.loads(Path(scale_file).read_text())
    factors = content["kv_cache"]["scaling_factor"]["0"]
    content["kv_cache"]["scaling_factor"] = {str(rank): factors for rank in range(ranks)}
    if ranks == 2:
        del content["model_type"]
    path = tmp_path / "scales.json"
    path.write_text(json.dumps(content))
    llm = LLM(model="demo", kv_cache_dtype="fp8", quantization_param_path=str(path), **SMALL)
    assert cache_of(llm.kv_cache_info()) == FILE


@pytest.mark.parametrize(("given", "k", "v"), [(0.03, 0.03, 0.03), ((0.03, 0.02), 0.03, 0.02)])
def test_python_with_scales_as_numbers(given: object, k: float, v: float):
    llm = LLM(model="demo", kv_cache_dtype="fp8", kv_scales=given, **SMALL)
    assert cache_of(llm.kv_cache_info()) == GIVEN
    for layer in llm.engine.runner.pool.layers:
        assert layer.pages.k_scale is not None
        assert layer.pages.v_scale is not None
        assert torch.equal(layer.pages.k_scale, torch.full_like(layer.pages.k_scale, k))
        assert torch.equal(layer.pages.v_scale, torch.full_like(layer.pages.v_scale, v))


def llm_compressor(**scheme: Any) -> dict[str, Any]:
    """The quantization_config of `oneshot` with a recipe that has a kv_cache_scheme and nothing
    else.
    """
    kv_cache_scheme = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
                       "observer": None, "observer_kwargs": {}, "scale_dtype": None, "strategy": "tensor",
                       "symmetric": True, "type": "float", "zp_dtype": None}  # fmt: skip
    return {"config_groups": {}, "format": "dense", "global_compression_ratio": None, "ignore": [],
            "kv_cache_scheme": kv_cache_scheme | scheme, "quant_method": "compressed-tensors",
            "quantization_status": "frozen", "sparsity_config": {}, "transform_config": {},
            "version": "0.19.0"}  # fmt: skip


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_a_checkpoint_of_llm_compressor_decides_by_itself(tmp_path: Path, dtype: str) -> None:
    scales = {f"{side}_scale": torch.tensor([0.03], dtype=torch.bfloat16) for side in "kv"}
    model = of_demo(tmp_path, scales, quantization_config=llm_compressor())
    llm = LLM(model=model, kv_cache_dtype=dtype, **SMALL)
    assert cache_of(llm.kv_cache_info()) == CHECKPOINT
    assert llm.generate(PROMPT, SamplingParams(max_tokens=4))[0].outputs[0].text


def test_its_scales_per_head(tmp_path: Path) -> None:
    scales = {f"{side}_scale": torch.full((2, 1, 1), 0.03, dtype=torch.float32) for side in "kv"}
    model = of_demo(tmp_path, scales, quantization_config=llm_compressor(strategy="attn_head"))
    assert cache_of(LLM(model, **SMALL).kv_cache_info()) == ("fp8_e4m3fn", "head", "checkpoint")


KV_SCALE = {"kv_scale": torch.tensor(0.03, dtype=torch.float32)}


@pytest.mark.parametrize(
    ("key", "made_for", "factor"),
    [
        ("kv_cache_torch_dtype", "float8_e4m3fn", 1.0),
        ("kv_cache_dtype", "float8_e4m3fnuz", 0.5),
        pytest.param("kv_cache_dtype", "float8_e4m3fn", 1.0, marks=pytest.mark.slow),
    ],
)
def test_kv_scale_with_the_format_it_was_made_for(
    tmp_path: Path, key: str, made_for: str, factor: float
) -> None:
    llm = LLM(of_demo(tmp_path, KV_SCALE, **{key: made_for}), **SMALL)
    assert cache_of(llm.kv_cache_info()) == CHECKPOINT
    pages = llm.engine.runner.pool.layers[3].pages
    for scale in (pages.k_scale, pages.v_scale):
        assert scale is not None
        assert torch.equal(scale, torch.full((2, 64), 0.03, dtype=torch.float32) * factor)


def test_scales_that_nothing_declares(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A 16-bit checkpoint to which scales were added: used when an FP8 cache is asked for, else
    left alone.
    """
    folder = of_demo(tmp_path, KV_SCALE)
    with caplog.at_level("INFO", logger="freight"):
        llm = LLM(folder, kv_cache_dtype="fp8_e4m3fn", **SMALL)
    assert cache_of(llm.kv_cache_info()) == CHECKPOINT
    assert_names(caplog.text, "fp8_e4m3fn assumed", "config.json", "kv_cache_torch_dtype")
    assert cache_of(LLM(folder, **SMALL).kv_cache_info()) == PLAIN


COMMANDS: dict[str, tuple[dict[str, str], Cache]] = {
    "nothing": ({}, PLAIN),
    "fp8": ({"kv-cache-dtype": "fp8"}, E4M3_DYNAMIC),
    "fp8_e4m3": ({"kv-cache-dtype": "fp8_e4m3"}, E4M3_DYNAMIC),
    "fp8_e4m3fn": ({"kv-cache-dtype": "fp8_e4m3fn"}, E4M3_DYNAMIC),
    "fp8_e4m3fnuz": ({"kv-cache-dtype": "fp8_e4m3fnuz"}, ("fp8_e4m3fnuz", "token", "dynamic")),
    "fp8_e5m2": ({"kv-cache-dtype": "fp8_e5m2"}, E5M2),
    "int8": ({"kv-cache-dtype": "int8"}, INT8),
    "unit": ({"kv-cache-dtype": "fp8", "kv-scales": "unit"}, ("fp8_e4m3fn", "tensor", "unit")),
    "a value": ({"kv-cache-dtype": "fp8", "kv-scales": "0.03"}, GIVEN),
    "values of K and V": ({"kv-cache-dtype": "fp8", "kv-scales": "0.03,0.02"}, GIVEN),
    "file": ({"kv-cache-dtype": "fp8", "quantization-param-path": "SCALES"}, FILE),
    "file, by the newer name": ({"kv-cache-dtype": "fp8", "kv-scales": "SCALES"}, FILE),
}


# one of every option: a variable has the value that a flag has
BY_VARIABLES = ("fp8_e4m3fn", "values of K and V", "file")


@pytest.mark.parametrize(
    ("form", "by"),
    [*((form, "flags") for form in COMMANDS), *((form, "variables") for form in BY_VARIABLES)],
)
def test_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    scale_file: str,
    form: str,
    by: str,
) -> None:
    given, cache = COMMANDS[form]
    options = {"model-id": "demo", "kv-cache-memory": "8MiB", "max-model-len": "128", **given}
    options = {name: value.replace("SCALES", scale_file) for name, value in options.items()}
    for name in filter(is_option, list(os.environ)):
        monkeypatch.delenv(name)
    argv = ["freight", "generate", "--prompt", PROMPT, "--max-tokens", "2", "--json"]
    for name, value in options.items():
        if by == "flags":
            argv += [f"--{name}", value]
        else:
            monkeypatch.setenv(f"FREIGHT_{name.upper().replace('-', '_')}", value)
    monkeypatch.setattr(sys, "argv", argv)
    with caplog.at_level("INFO", logger="freight"), pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    answer = json.loads(capsys.readouterr().out)
    assert cache_of(answer["kv_cache"]) == cache
    assert answer["outputs"][0]["text"]
    assert f"KV cache: {cache[0]};" in caplog.text
