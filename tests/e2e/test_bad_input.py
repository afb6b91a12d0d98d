"""Bad input through the front doors, `LLM(...)`, `generate` and the command line: refused before a
weight is read.

One representative of each kind; what each reader refuses in detail is tested beside it. A message
names the thing, the value and the way out, and nothing here may touch a weight: the fixture fails
the test where one is taken.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.environment import is_option
from tests.refusals import refuses
from tests.scaled_models import with_scales

from freight import LLM, SamplingParams
from freight.checkpoint.kv_scales import parse_scale_name
from freight.checkpoint.reader import Checkpoint
from freight.cli.main import main
from freight.errors import CheckpointError, ConfigError, FreightError, RequestError

BASE = Path(__file__).parents[1] / "fixtures" / "base_bf16"
LAYERS = 2
STATIC = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense",
          "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}}  # fmt: skip


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV scales may be read, and nothing else."""
    take = Checkpoint.take

    def guarded(self: Checkpoint, name: str, *args: Any) -> Any:
        assert parse_scale_name(name) is not None, f"the weight {name} was read"
        return take(self, name, *args)

    monkeypatch.setattr(Checkpoint, "take", guarded)


def refused(options: dict[str, Any], error: type[FreightError], says: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        LLM(
            **{
                "model": str(BASE),
                "skip_tokenizer_init": True,
                "kv_cache_memory": "1MiB",
                **options,
            }
        )
    for text in says:
        assert text in str(caught.value), options


def write_model(folder: Path, scales: dict[str, float], config: dict[str, Any]) -> str:
    """BASE with scales by layer and name, and more keys in config.json."""

    def of_layer(layer: int) -> dict[str, torch.Tensor]:
        return {
            name.removeprefix(f"{layer}."): torch.tensor(value, dtype=torch.float32)
            for name, value in scales.items()
            if name.startswith(f"{layer}.")
        }

    return str(with_scales(BASE, folder, of_layer, LAYERS, **config))


FP8 = {"kv_cache_dtype": "fp8"}
E5M2 = {"kv_cache_dtype": "fp8_e5m2"}
NOWHERE = "/nowhere/scales.json"
SWITCHES = ("enable_prefix_caching", "skip_tokenizer_init")
Refusal = tuple[dict[str, Any], type[FreightError], tuple[str, ...]]
REFUSED: list[Refusal] = [
    ({"kv_cache_dtype": "fp9"}, ConfigError, ("fp9", "fp8_e4m3", "fp8_e5m2", "bfloat16")),
    ({"dtype": "float17"}, ConfigError, ("float17", "bfloat16, float16 or float32")),
    ({"gpu_memory_utilization": 0.9}, ConfigError, ("gpu_memory_utilization", "kv_cache_memory")),
    *(
        (
            {"kv_cache_dtype": "bfloat16", "kv_scales": scales},
            ConfigError,
            (f"--kv-scales {scales}", "bfloat16", "--kv-cache-dtype fp8"),
        )
        for scales in ("unit", "dynamic", "checkpoint")
    ),
    *(
        ({name: value}, ConfigError, (f"{name} is {value!r}", "True or False"))
        for name in SWITCHES
        for value in ("false", 0, None)
    ),
    ({"block_size": 16.0}, ConfigError, ("--block-size 16.0",)),
    # settings are checked before the model is looked for
    ({"model": "/nowhere", "kv_cache_dtype": "fp9"}, ConfigError, ("fp9",)),
    ({"model": "/nowhere"}, CheckpointError, ("/nowhere",)),
    (
        {**FP8, "kv_scales": "checkpoint"},
        ConfigError,
        ("--kv-scales checkpoint", "no KV scales", "--kv-scales dynamic"),
    ),
    (
        {**FP8, "quantization_param_path": NOWHERE},
        ConfigError,
        ("--quantization-param-path", NOWHERE),
    ),
    ({"skip_tokenizer_init": False}, CheckpointError, ("tokenizer", "skip_tokenizer_init")),
]


@pytest.mark.usefixtures("no_weights")
def test_options() -> None:
    for case in REFUSED:
        refused(*case)


SCALES = {f"{layer}.kv_scale": 0.1 for layer in range(LAYERS)}
MODELS: list[tuple[dict[str, float], dict[str, Any], Refusal]] = [
    (
        {},
        {"quantization_config": STATIC},
        ({}, CheckpointError, ("declares static KV scales", "layers 0, 1", "--kv-scales dynamic")),
    ),
    (
        {"1.k_scale": 0.1, "1.v_scale": 0.1},
        {},
        (FP8, CheckpointError, ("layer 0 of 2", "--kv-scales dynamic")),
    ),
    *(
        (
            SCALES | {"1.kv_scale": value},
            {},
            (
                FP8,
                CheckpointError,
                ("model.layers.1.self_attn.kv_scale", f"is {value};", "finite and above 0"),
            ),
        )
        for value in (0.0, -0.5, math.nan, math.inf)
    ),
    (SCALES, {}, (E5M2, ConfigError, ("fp8_e5m2", "fp8_e4m3fn", "--kv-scales unit"))),
    *(
        ({}, {key: value}, ({}, CheckpointError, says))
        for key, value, says in (
            (
                "intermediate_size",
                512,
                ("model.layers.0.mlp.gate_proj.weight", "[384, 256]", "[512, 256]"),
            ),
            ("num_hidden_layers", 3, ("model.layers.2.self_attn.q_proj.weight", "missing")),
            ("vocab_size", 300, ("model.embed_tokens.weight", "[256, 256]", "[300, 256]")),
            ("num_key_value_heads", 3, ("num_attention_heads = 4", "num_key_value_heads = 3")),
        )
    ),
]


@pytest.mark.usefixtures("no_weights")
def test_models_that_contradict_themselves(tmp_path: Path) -> None:
    for index, (scales, config, (options, error, says)) in enumerate(MODELS):
        model = write_model(tmp_path / str(index), scales, config)
        refused({"model": model, **options}, error, says)


def scale_file(folder: Path, factors: dict[str, Any], model_type: str = "llama") -> str:
    path = folder / "kv_cache_scales.json"
    kv_cache = {"dtype": "float8_e4m3fn", "scaling_factor": factors}
    path.write_text(json.dumps({"model_type": model_type, "kv_cache": kv_cache}))
    return str(path)


BOTH = {"0": 0.1, "1": 0.1}
UNLIKE = {str(rank): {"0": 0.1, "1": 0.1 * (1 + rank % 2)} for rank in range(4)}
FILES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"rank0": BOTH}, ("'rank0' is not a rank number", "'0'")),
    (UNLIKE, ("layer 1", "0: 0.1", "1: 0.2")),
    ({"1": BOTH}, ("ranks '0', '1'", "1 ranks, '1'")),
    ({"0": {"0": 0.1}}, ("1 layers", "the model has 2", "lacking '1'")),
    ({"0": BOTH | {"2": 0.1}}, ("3 layers", "the model has 2", "unknown '2'")),
    ({"0": {"0": 0.1, "1": 0.0}}, ("scaling_factor[0][1]", "0.0", "above 0")),
    ({"0": {"0": 0.1, "1": math.nan}}, ("scaling_factor[0][1]", "nan", "finite")),
]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("option", ["kv_scales", "quantization_param_path"])
def test_a_scale_file(tmp_path: Path, option: str) -> None:
    for factors, says in FILES:
        file = scale_file(tmp_path, factors)
        refused({**FP8, option: file}, CheckpointError, (file, *says))
    file = scale_file(tmp_path, {"0": BOTH}, "mixtral")
    refused({**FP8, option: file}, CheckpointError, (file, "'mixtral'", "'llama'"))
    file = scale_file(tmp_path, {"0": BOTH})
    says = ("fp8_e5m2", file, "--kv-scales dynamic or unit")
    refused({**E5M2, option: file}, ConfigError, says)


@pytest.mark.usefixtures("no_weights")
def test_files_that_lack_something(tmp_path: Path) -> None:
    short, folder = (Path(write_model(tmp_path / name, {}, {})) for name in ("short", "shards"))
    file = short / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused({"model": str(short)}, CheckpointError, (str(file), "truncated"))

    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    shards["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    says = ("model-00002-of-00002.safetensors", "missing")
    refused({"model": str(folder)}, CheckpointError, says)


def test_tensors_that_the_config_has_no_place_for(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", {}, {"num_hidden_layers": 1})
    refused({"model": model}, CheckpointError, ("model.layers.1.", "belong to no part"))


BAD_PARAMS = [
    ({"max_tokens": 0}, ("max_tokens", "0", "1 or more")),
    ({"max_tokens": -5}, ("max_tokens", "-5", "0 or more")),
    ({"temperature": -1.0}, ("temperature", "-1", "0 is greedy")),
    ({"temperature": math.nan}, ("temperature", "nan", "0 is greedy")),
    ({"top_p": 1.5}, ("top_p", "1.5", "at most 1")),
    ({"max_new_tokens": 5}, ("max_new_tokens", "max_tokens")),
]


def test_sampling_params() -> None:
    for params, says in BAD_PARAMS:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**params)
        for text in says:
            assert text in str(caught.value)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(BASE), skip_tokenizer_init=True, kv_cache_memory="1MiB", max_model_len=64)


BAD_PROMPTS: list[tuple[Any, tuple[str, ...]]] = [
    ([], ("empty", "at least one")),
    ([1] * 64, ("64 tokens", "max_model_len 64", "63", "shorten")),
    ([1, 256], ("256", "0 to 255")),
    ([1, -1], ("-1", "0 to 255")),
    ([1, True], ("True", "0 to 255")),
    ("text", ("tokenizer", "token ids")),
]


def test_a_bad_prompt_refuses_the_whole_call_before_a_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(llm.engine), "step", lambda self: pytest.fail("a prompt was computed"))
    for prompt, says in BAD_PROMPTS:
        last = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        with pytest.raises(RequestError) as caught:
            llm.generate([[1, 2, 3], last])
        for text in says:
            assert text in str(caught.value)
        assert not llm.engine.has_unfinished
        assert llm.engine.cache.num_held == 0


def test_parameters_are_checked_too(llm: LLM) -> None:
    for params in (SamplingParams(stop_token_ids=[256]), SamplingParams(logit_bias={256: 1.0})):
        with pytest.raises(RequestError, match=r"256; the vocabulary has 0 to 255"):
            llm.generate([[1]], params)
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        llm.generate([[1]], SamplingParams(stop="x"))
    with pytest.raises(RequestError, match="2 SamplingParams for 3 prompts"):
        llm.generate([[1], [2], [3]], [SamplingParams(), SamplingParams()])
    others: list[Any] = [{"max_tokens": 2}, 5, "greedy", [None], [{}], iter([])]
    for other in others:
        with refuses(RequestError, "sampling_params", "SamplingParams"):
            llm.generate([[1]], other)


GENERATE: list[tuple[list[str], tuple[str, ...]]] = [
    (["--prompt", "x", "--kv-cache-dtype", "fp9"], ("--kv-cache-dtype 'fp9'", "fp8_e5m2")),
    (
        ["--prompt", "x", "--kv-scales", "unit"],
        ("--kv-scales unit", "bfloat16", "--kv-cache-dtype fp8"),
    ),
    (
        ["--prompt", "x", "--kv-scales", "unit", "--kv-cache-dtype", "float16"],
        ("--kv-scales unit", "float16"),
    ),
    (
        ["--prompt", "x", "--kv-cache-dtype", "fp8", "--kv-scales", "checkpoint"],
        ("no KV scales", "dynamic"),
    ),
    (["--prompt", "x", "--kv-scales", "/nowhere/s.json"], ("/nowhere/s.json", "no such file")),
    (["--prompt", "x " * 2000], ("tokens", "max_model_len 1024", "1023", "shorten")),
    (["--prompt-token-ids", "1,4096"], ("4096", "0 to 4095")),
    (["--prompt-token-ids", "1,-1"], ("-1", "0 to 4095")),
    (["--prompt", "x", "--max-tokens", "0"], ("max_tokens is 0", "1 or more")),
    (["--prompt", "x", "--max-tokens", "-1"], ("max_tokens is -1", "0 or more")),
    (["--prompt", "x", "--temperature", "-1"], ("temperature is -1.0", "0 is greedy")),
    (["--prompt", "x", "--temperature", "nan"], ("temperature is nan", "0 is greedy")),
    (["--prompt", "x", "--stop-token-ids", "4096"], ("stop_token_ids", "4096", "0 to 4095")),
    (["--prompt", "x", "--stop", "y", "--skip-tokenizer-init"], ("detokenize", "stop_token_ids")),
    (["--prompt", "x", "--max-model-len", "2000"], ("--max-model-len 2000", "1024")),
    (["--prompt", "x", "--device", "cuda:0"], ("--device 'cuda:0'", "cuda")),
    (["--prompt", "x", "--model-id", "/nowhere"], ("/nowhere", "no folder")),
]
COMMANDS = [
    *((["generate", *argv], says) for argv, says in GENERATE),
    (["chat"], ("no chat template", "freight generate")),
    (["chat", "--skip-tokenizer-init"], ("tokenizer", "freight generate")),
    (["evaluate", str(BASE)], ("--data FILE is needed",)),
    (["evaluate", "--kv-scales", "unit"], ("--kv-scales unit", "bfloat16", "--kv-cache-dtype fp8")),
    (["evaluate", "--data", "/nowhere"], ("--data /nowhere", "cannot be read")),
    (["inspect", "/nowhere"], ("/nowhere", "no folder")),
]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("argv", "says"), COMMANDS, ids=[" ".join(argv)[:60] for argv, _ in COMMANDS]
)
def test_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    says: tuple[str, ...],
):
    for name in filter(is_option, list(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["freight", *argv])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == (1 if argv[-1] == "/nowhere" and argv[-2] != "--data" else 2)
    assert out == ""
    assert err.splitlines()[-1].startswith("error: ")
    for text in says:
        assert text in err
