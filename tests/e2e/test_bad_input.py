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
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.environment import is_option
from tests.refusals import refuses

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


def refused(error: type[FreightError], *says: str, **options: Any) -> None:
    with pytest.raises(error) as caught:
        LLM(**{"skip_tokenizer_init": True, "kv_cache_memory": "1MiB", **options})
    for text in says:
        assert text in str(caught.value)


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., str]:
    """model(scales by tensor name, **keys of config.json) -> a folder."""

    def write(scales: dict[str, float] | None = None, **config: Any) -> str:
        folder = tmp_path / "model"
        shutil.copytree(BASE, folder)
        if scales is not None:
            tensors = load_file(folder / "model.safetensors")
            tensors |= {
                f"model.layers.{name}": torch.tensor(value, dtype=torch.float32)
                for name, value in scales.items()
            }
            save_file(tensors, folder / "model.safetensors")
        said = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(said))
        return str(folder)

    return write


def scale_file(folder: Path, factors: dict[str, Any], model_type: str = "llama") -> str:
    path = folder / "kv_cache_scales.json"
    kv_cache = {"dtype": "float8_e4m3fn", "scaling_factor": factors}
    path.write_text(json.dumps({"model_type": model_type, "kv_cache": kv_cache}))
    return str(path)


@pytest.mark.usefixtures("no_weights")
class TestSettings:
    def test_an_unknown_dtype(self):
        refused(
            ConfigError,
            "fp9",
            "fp8_e4m3",
            "fp8_e5m2",
            "bfloat16",
            model=str(BASE),
            kv_cache_dtype="fp9",
        )
        refused(
            ConfigError, "float17", "bfloat16, float16 or float32", model=str(BASE), dtype="float17"
        )

    def test_an_unknown_option_names_the_nearest(self):
        refused(
            ConfigError, "gpu_memory_utilization", "kv_cache_memory", gpu_memory_utilization=0.9
        )

    @pytest.mark.parametrize("scales", ["unit", "dynamic", "checkpoint"])
    def test_scales_for_a_16_bit_cache(self, scales: str):
        says = (f"--kv-scales {scales}", "bfloat16", "--kv-cache-dtype fp8")
        refused(ConfigError, *says, model=str(BASE), kv_cache_dtype="bfloat16", kv_scales=scales)

    @pytest.mark.parametrize("name", ["enable_prefix_caching", "skip_tokenizer_init"])
    @pytest.mark.parametrize("value", ["false", 0, None])
    def test_a_switch_is_true_or_false(self, name: str, value: Any):
        refused(
            ConfigError, f"{name} is {value!r}", "True or False", model=str(BASE), **{name: value}
        )

    def test_a_block_size_is_a_whole_number(self):
        refused(ConfigError, "--block-size 16.0", model=str(BASE), block_size=16.0)

    def test_settings_are_checked_before_the_model_is_looked_for(self):
        refused(ConfigError, "fp9", model="/nowhere", kv_cache_dtype="fp9")
        refused(CheckpointError, "/nowhere", model="/nowhere")


@pytest.mark.usefixtures("no_weights")
class TestScales:
    def test_asked_for_and_missing(self):
        says = ("--kv-scales checkpoint", "no KV scales", "--kv-scales dynamic")
        refused(ConfigError, *says, model=str(BASE), kv_cache_dtype="fp8", kv_scales="checkpoint")

    def test_declared_and_missing(self, model: Callable[..., str]):
        says = ("declares static KV scales", "layers 0, 1", "--kv-scales dynamic")
        refused(CheckpointError, *says, model=model(quantization_config=STATIC))

    def test_partial(self, model: Callable[..., str]):
        folder = model({"1.self_attn.k_scale": 0.1, "1.self_attn.v_scale": 0.1})
        refused(
            CheckpointError,
            "layer 0 of 2",
            "--kv-scales dynamic",
            model=folder,
            kv_cache_dtype="fp8",
        )

    @pytest.mark.parametrize(
        ("value", "said"), [(0.0, "0.0"), (-0.5, "-0.5"), (math.nan, "nan"), (math.inf, "inf")]
    )
    def test_values_that_are_no_scales(self, model: Callable[..., str], value: float, said: str):
        scales = {f"{layer}.self_attn.kv_scale": 0.1 for layer in range(LAYERS)} | {
            "1.self_attn.kv_scale": value
        }
        says = ("model.layers.1.self_attn.kv_scale", f"is {said};", "finite and above 0")
        refused(CheckpointError, *says, model=model(scales), kv_cache_dtype="fp8")

    @pytest.mark.parametrize(
        ("factors", "model_type", "says"),
        [
            ({"rank0": {"0": 0.1, "1": 0.1}}, "llama", ("'rank0' is not a rank number", "'0'")),
            (
                {str(rank): {"0": 0.1, "1": 0.1 * (1 + rank % 2)} for rank in range(4)},
                "llama",
                ("layer 1", "0: 0.1", "1: 0.2"),
            ),
            ({"1": {"0": 0.1, "1": 0.1}}, "llama", ("ranks '0', '1'", "1 ranks, '1'")),
            ({"0": {"0": 0.1}}, "llama", ("1 layers", "the model has 2", "lacking '1'")),
            (
                {"0": {"0": 0.1, "1": 0.1, "2": 0.1}},
                "llama",
                ("3 layers", "the model has 2", "unknown '2'"),
            ),
            ({"0": {"0": 0.1, "1": 0.0}}, "llama", ("scaling_factor[0][1]", "0.0", "above 0")),
            ({"0": {"0": 0.1, "1": math.nan}}, "llama", ("scaling_factor[0][1]", "nan", "finite")),
            ({"0": {"0": 0.1, "1": 0.1}}, "mixtral", ("'mixtral'", "'llama'")),
        ],
    )
    @pytest.mark.parametrize("option", ["kv_scales", "quantization_param_path"])
    def test_a_scale_file(
        self, tmp_path: Path, option: str, factors: Any, model_type: str, says: tuple[str, ...]
    ):
        file = scale_file(tmp_path, factors, model_type)
        refused(
            CheckpointError, file, *says, model=str(BASE), kv_cache_dtype="fp8", **{option: file}
        )

    def test_a_scale_file_that_is_not_there(self):
        options = {"kv_cache_dtype": "fp8", "quantization_param_path": "/nowhere/scales.json"}
        refused(
            ConfigError,
            "--quantization-param-path",
            "/nowhere/scales.json",
            model=str(BASE),
            **options,
        )

    def test_a_scale_file_for_e5m2(self, tmp_path: Path):
        file = scale_file(tmp_path, {"0": {"0": 0.1, "1": 0.1}})
        options = {"kv_cache_dtype": "fp8_e5m2", "quantization_param_path": file}
        refused(
            ConfigError, "fp8_e5m2", file, "--kv-scales dynamic or unit", model=str(BASE), **options
        )

    def test_e5m2_over_scales_made_for_e4m3(self, model: Callable[..., str]):
        folder = model({f"{layer}.self_attn.kv_scale": 0.1 for layer in range(LAYERS)})
        refused(
            ConfigError,
            "fp8_e5m2",
            "fp8_e4m3fn",
            "--kv-scales unit",
            model=folder,
            kv_cache_dtype="fp8_e5m2",
        )


@pytest.mark.usefixtures("no_weights")
class TestFiles:
    def test_truncated(self, model: Callable[..., str]):
        folder = model()
        file = Path(folder) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        refused(CheckpointError, str(file), "truncated", model=folder)

    def test_a_missing_shard(self, model: Callable[..., str]):
        folder = Path(model())
        names = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        shards = dict.fromkeys(names, "model-00001-of-00002.safetensors")
        shards["lm_head.weight"] = "model-00002-of-00002.safetensors"
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        refused(CheckpointError, "model-00002-of-00002.safetensors", "missing", model=str(folder))

    @pytest.mark.parametrize(
        ("key", "value", "says"),
        [
            (
                "intermediate_size",
                512,
                ("model.layers.0.mlp.gate_proj.weight", "[384, 256]", "[512, 256]"),
            ),
            ("num_hidden_layers", 3, ("model.layers.2.self_attn.q_proj.weight", "missing")),
            ("vocab_size", 300, ("model.embed_tokens.weight", "[256, 256]", "[300, 256]")),
            ("num_key_value_heads", 3, ("num_attention_heads = 4", "num_key_value_heads = 3")),
        ],
    )
    def test_a_config_that_contradicts_the_tensors(
        self, model: Callable[..., str], key: str, value: int, says: tuple[str, ...]
    ):
        refused(CheckpointError, *says, model=model(**{key: value}))

    def test_no_tokenizer(self):
        refused(
            CheckpointError,
            "tokenizer",
            "skip_tokenizer_init",
            model=str(BASE),
            skip_tokenizer_init=False,
        )


def test_tensors_that_the_config_has_no_place_for(model: Callable[..., str]):
    refused(
        CheckpointError, "model.layers.1.", "belong to no part", model=model(num_hidden_layers=1)
    )


BAD_PARAMS = [
    ({"max_tokens": 0}, ("max_tokens", "0", "1 or more")),
    ({"max_tokens": -5}, ("max_tokens", "-5", "0 or more")),
    ({"temperature": -1.0}, ("temperature", "-1", "0 is greedy")),
    ({"temperature": math.nan}, ("temperature", "nan", "0 is greedy")),
    ({"top_p": 1.5}, ("top_p", "1.5", "at most 1")),
    ({"max_new_tokens": 5}, ("max_new_tokens", "max_tokens")),
]


@pytest.mark.parametrize(
    ("given", "says"), BAD_PARAMS, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_sampling_params(given: dict[str, Any], says: tuple[str, ...]):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
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


@pytest.mark.parametrize(
    ("prompt", "says"), BAD_PROMPTS, ids=[str(says[0]) for _, says in BAD_PROMPTS]
)
def test_a_bad_prompt_refuses_the_whole_call_before_a_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, prompt: Any, says: tuple[str, ...]
):
    monkeypatch.setattr(type(llm.engine), "step", lambda self: pytest.fail("a prompt was computed"))
    given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    with pytest.raises(RequestError) as caught:
        llm.generate([[1, 2, 3], given])
    for text in says:
        assert text in str(caught.value)
    assert not llm.engine.has_unfinished
    assert llm.engine.cache.num_held == 0


def test_ids_of_parameters_are_checked_too(llm: LLM):
    for params in (SamplingParams(stop_token_ids=[256]), SamplingParams(logit_bias={256: 1.0})):
        with pytest.raises(RequestError, match=r"256; the vocabulary has 0 to 255"):
            llm.generate([[1]], params)
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        llm.generate([[1]], SamplingParams(stop="x"))
    with pytest.raises(RequestError, match="2 SamplingParams for 3 prompts"):
        llm.generate([[1], [2], [3]], [SamplingParams(), SamplingParams()])


@pytest.mark.parametrize("given", [{"max_tokens": 2}, 5, "greedy", [None], [{}], iter([])])
def test_parameters_of_another_type(llm: LLM, given: Any):
    with refuses(RequestError, "sampling_params", "SamplingParams"):
        llm.generate([[1]], given)


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
    assert ended.value.code in (1, 2)
    assert out == ""
    assert err.splitlines()[-1].startswith("error: ")
    for text in says:
        assert text in err
