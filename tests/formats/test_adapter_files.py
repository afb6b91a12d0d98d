"""Adapters that PEFT wrote, read for run time: the matrices of each module, and what is refused.

`expected.safetensors` of each has the logits of PEFT over transformers, of a model that
`save_random` makes again. An adapter whose matrices are added to that model's weights has to give
them: names, ranks, scalings and values are then PEFT's.
"""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.gguf_models import write_model
from tests.parity.random_models import digest_of_weights, freight_logits, save_random
from tests.parity.variants import VARIANTS
from tests.refusals import refuses
from torch import Tensor, nn

from freight.checkpoint.lora import LoraAdapter
from freight.checkpoint.merge import merge
from freight.errors import CheckpointError, ConfigError, FreightError
from freight.model.adapter_modules import adapter_modules
from freight.model.config.model import ModelConfig
from freight.model.config.parse import parse_model_config
from freight.model.open import open_model
from freight.settings.engine import EngineArgs

FIXTURES = Path(__file__).parents[1] / "fixtures"
ADAPTERS = FIXTURES / "adapters"
NAMES = sorted(path.parent.name for path in ADAPTERS.glob("*/expected.safetensors"))
PREFIX = "base_model.model."
QUERY = "model.layers.1.self_attn.q_proj"
MERGE = "freight merge BASE ADAPTER OUT"


def open_adapter(name: str, config: ModelConfig, max_rank: int) -> LoraAdapter:
    """Open the adapter `name` for the model of `config`."""
    return LoraAdapter.open(name, adapter_modules(config), max_rank)


def config_of(variant: str) -> ModelConfig:
    return parse_model_config(VARIANTS[variant].to_dict(), ())


def config_in(folder: Path) -> ModelConfig:
    return open_model(EngineArgs(str(folder), skip_tokenizer_init=True)).model


def write_adapter(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def halves(module: str, outputs: int = 64, inputs: int = 64, rank: int = 2) -> dict[str, Tensor]:
    return {
        f"{PREFIX}{module}.lora_A.weight": torch.randn(rank, inputs),
        f"{PREFIX}{module}.lora_B.weight": torch.randn(outputs, rank),
    }


def opened(folder: Path, variant: str = "llama", max_rank: int = 64) -> LoraAdapter:
    return open_adapter(str(folder), config_of(variant), max_rank)


def of_expert(weights: dict[str, Tensor], module: str) -> Tensor:
    """Return a view of the matrix of a module of gpt-oss: the outputs of gate and up alternate."""
    layer, number, part = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)", module).groups()
    if part == "down_proj":
        return weights[f"{layer}.down_proj"][int(number)].T
    return weights[f"{layer}.gate_up_proj"][int(number), :, part == "up_proj" :: 2].T


@pytest.mark.parametrize("name", NAMES)
def test_a_model_with_the_matrices_added_has_the_logits_of_peft(name: str, tmp_path: Path) -> None:
    with safe_open(ADAPTERS / name / "expected.safetensors", framework="pt") as file:
        metadata = file.metadata()
    save_random(VARIANTS[metadata["variant"]], tmp_path, torch.float32)
    assert digest_of_weights(tmp_path) == metadata["base_sha256"], "the seed makes another model"
    expected = load_file(ADAPTERS / name / "expected.safetensors")
    ids = expected["token_ids"].tolist()
    base = freight_logits(tmp_path, ids, "float32")
    adapter = open_adapter(str(ADAPTERS / name), config_in(tmp_path), 64)
    adapter.check_values()
    weights = load_file(tmp_path / "model.safetensors")
    for module in adapter.ranks:
        added = adapter.matrices(module)
        assert added.a.shape[0] == adapter.ranks[module]
        weight = weights.get(f"{module}.weight")
        if weight is None:
            weight = of_expert(weights, module)
        weight += added.scaling * added.b @ added.a
    save_file(weights, tmp_path / "model.safetensors")
    assert (freight_logits(tmp_path, ids, "float32") - expected["logits"]).abs().max() < 1e-4
    assert (base - expected["logits"]).abs().max() > 0.05


def test_ranks_scalings_and_bytes_of_patterns() -> None:
    adapter = opened(ADAPTERS / "llama")
    assert set(adapter.ranks.values()) == {1, 8, 64}
    assert adapter.largest_rank == 64
    assert adapter.ranks["model.layers.2.self_attn.k_proj"] == 64
    assert adapter.matrices("model.layers.2.self_attn.k_proj").scaling == 20 / 8
    assert adapter.matrices(QUERY).scaling == 12
    assert adapter.matrices("model.layers.0.mlp.down_proj").scaling == 3 / math.sqrt(8)
    stored = load_file(ADAPTERS / "llama/adapter_model.safetensors")
    assert adapter.num_bytes(2) == 2 * sum(tensor.numel() for tensor in stored.values())
    half = adapter.matrices(QUERY, torch.bfloat16)
    assert torch.equal(half.b, stored[f"{PREFIX}{QUERY}.lora_B.weight"].bfloat16())


@pytest.mark.parametrize(
    "variant",
    [
        "mixtral",
        "kimi-linear",
        "ling",
        "hy-v3",
        "laguna",
        "step3p7",
        "nemotron-h-latent",
        "nemotron-h-omni",
        "qwen3-vl",
        "qwen3-5-moe",
        "granite-h-moe",
        "lfm2-vl",
        "deepseek-v3",
        "gemma4-own-inputs",
        "opt-350m",
    ],
)
def test_every_linear_module_of_transformers_has_its_name_and_shape(
    variant: str, tmp_path: Path
) -> None:
    model = save_random(VARIANTS[variant], tmp_path, torch.float32)
    modules = adapter_modules(config_in(tmp_path))
    reached = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not re.search("vision|projector|merger|visual", name):
            stored = modules.stored_name(name)
            assert stored is not None, name
            if stored in modules.refused:
                continue
            assert modules.shapes[stored] == tuple(module.weight.shape), name
            assert stored not in reached
            reached.add(stored)
    for name, parameter in model.named_parameters():
        stacked = modules.stacked_in(name)
        if stacked is not None:
            experts = (len(stacked.modules), *stacked.shape(modules.shapes))
            assert tuple(parameter.shape) == experts, name
            reached |= {module for of_expert in stacked.modules for module in of_expert}
    assert reached == modules.shapes.keys()


def test_modules_of_a_wrapped_model_and_of_the_decoder_alone(tmp_path: Path) -> None:
    for prefix in ("model.language_model.", "language_model.model.", ""):
        tensors = halves(f"{prefix}layers.1.self_attn.q_proj")
        adapter = opened(write_adapter(tmp_path / "adapter", tensors))
        assert list(adapter.ranks) == [QUERY]
    both = halves(QUERY) | halves("model.language_model.layers.1.self_attn.q_proj")
    with refuses(CheckpointError, QUERY, "two names"):
        opened(write_adapter(tmp_path / "adapter", both))


def test_base_models_in_other_forms(tmp_path: Path) -> None:
    """Names and shapes are the config's, whatever the weights are stored in."""
    write_model(tmp_path / "model.gguf", "llama")
    for base in (
        tmp_path / "model.gguf",
        FIXTURES / "autofp8_static_kv",
        FIXTURES / "four_bits/int4",
    ):
        config = config_in(base)
        outputs, inputs = adapter_modules(config).shapes["model.layers.0.mlp.down_proj"]
        tensors = halves("model.layers.0.mlp.down_proj", outputs, inputs)
        folder = write_adapter(tmp_path / "adapter", tensors)
        adapter = open_adapter(str(folder), config, 16)
        assert adapter.ranks == {"model.layers.0.mlp.down_proj": 2}


def test_the_digest_is_of_what_decides_the_values(tmp_path: Path) -> None:
    def digest_of(**config: Any) -> str:
        folder = shutil.copytree(ADAPTERS / "llama", tmp_path / "adapter", dirs_exist_ok=True)
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config, sort_keys=True))
        return opened(folder).digest

    digest = opened(ADAPTERS / "llama").digest
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert (
        digest_of() == digest_of(base_model_name_or_path="x", lora_dropout=0.5) == digest_of(r=8.0)
    )
    digests = [digest_of(lora_alpha=13), digest_of(use_rslora=False), digest_of(alpha_pattern={})]
    assert len({digest, *digests}) == 4
    file = shutil.copytree(ADAPTERS / "llama", tmp_path / "other") / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert opened(tmp_path / "other").digest != digest


@pytest.mark.parametrize("replace", [True, False])
def test_a_file_that_changes_after_it_was_opened_is_refused(replace: bool, tmp_path: Path) -> None:
    """Also one that became shorter, which ends a process that has it mapped."""
    adapter = opened(write_adapter(tmp_path, halves(QUERY)))
    adapter.check_values()
    file = tmp_path / "adapter_model.safetensors"
    if replace:
        save_file(halves(QUERY), tmp_path / "new")
        (tmp_path / "new").replace(file)
    else:
        file.write_bytes(file.read_bytes()[:-64])
    with refuses(CheckpointError, "adapter_model.safetensors", "changed", "load it again"):
        adapter.matrices(QUERY)


def test_a_b_of_zeros_is_an_adapter(tmp_path: Path) -> None:
    tensors = halves(QUERY)
    tensors[f"{PREFIX}{QUERY}.lora_B.weight"].zero_()
    adapter = opened(write_adapter(tmp_path, tensors))
    adapter.check_values()
    assert not adapter.matrices(QUERY).b.any()


@pytest.mark.parametrize("value", [math.nan, math.inf, 7e4])
def test_values_that_are_not_finite_are_refused_by_name(value: float, tmp_path: Path) -> None:
    tensors = halves(QUERY)
    name = f"{PREFIX}{QUERY}.lora_B.weight"
    tensors[name][5, 1] = value
    adapter = opened(write_adapter(tmp_path, tensors))
    with refuses(CheckpointError, QUERY, "lora_B", "not finite", "torch.float16"):
        adapter.check_values(torch.float16)
    if math.isfinite(value):
        adapter.check_values()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nan_is_seen_at_any_place(dtype: torch.dtype, tmp_path: Path) -> None:
    for place in range(0, 128, 3):
        tensors = {name: value.to(dtype) for name, value in halves(QUERY).items()}
        tensors[f"{PREFIX}{QUERY}.lora_A.weight"].view(-1)[place] = math.nan
        adapter = opened(write_adapter(tmp_path, tensors))
        with refuses(CheckpointError, f"{QUERY}.lora_A.weight"):
            adapter.check_values()


REFUSED: dict[str, tuple[str, dict[str, Tensor], type[FreightError], tuple[str, ...]]] = {
    "embedding": (
        "llama",
        {
            f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.zeros(2, 320),
            f"{PREFIX}model.embed_tokens.lora_embedding_B": torch.zeros(64, 2),
        },
        ConfigError,
        ("model.embed_tokens", "embedding", MERGE),
    ),
    "head": ("llama", halves("lm_head", 320), ConfigError, ("lm_head", "the head", MERGE)),
    "tied head": ("llama-tied", halves("lm_head", 320), ConfigError, ("lm_head", MERGE)),
    "saved module": (
        "llama",
        halves(QUERY) | {f"{PREFIX}lm_head.weight": torch.zeros(320, 64)},
        ConfigError,
        ("lm_head.weight", "modules_to_save", MERGE),
    ),
    "bias": (
        "qwen2",
        halves(QUERY) | {f"{PREFIX}{QUERY}.base_layer.bias": torch.zeros(64)},
        ConfigError,
        (QUERY, "bias", MERGE),
    ),
    "expert": (
        "qwen3-moe",
        halves("model.layers.0.mlp.experts.8.gate_proj", 32),
        CheckpointError,
        ("model.layers.0.mlp.experts.8.gate_proj", "no such"),
    ),
    "stacked experts": (
        "qwen3-moe",
        halves("model.layers.0.mlp.experts.base_layer", 32),
        ConfigError,
        ("model.layers.0.mlp.experts.base_layer", "target_parameters", "merge_and_unload"),
    ),
    "router": (
        "qwen3-moe",
        halves("model.layers.0.mlp.gate", 8),
        ConfigError,
        ("model.layers.0.mlp.gate", "router", MERGE),
    ),
    "latents": (
        "deepseek-v3",
        halves("model.layers.0.self_attn.kv_b_proj"),
        ConfigError,
        ("model.layers.0.self_attn.kv_b_proj", "by heads", MERGE),
    ),
    "later layer": (
        "llama",
        halves("model.layers.3.self_attn.q_proj"),
        CheckpointError,
        ("model.layers.3.self_attn.q_proj", "3 layers", "another model"),
    ),
    "unknown": (
        "llama",
        halves("model.layers.0.self_attn.qkv_proj"),
        CheckpointError,
        ("model.layers.0.self_attn.qkv_proj", "another model"),
    ),
    "vision": (
        "qwen3-vl",
        halves("model.visual.blocks.0.attn.qkv"),
        CheckpointError,
        ("model.visual.blocks.0.attn.qkv", "Freight does not run"),
    ),
    "shape": (
        "llama",
        halves(QUERY, 96),
        CheckpointError,
        (QUERY, "[96, 64]", "[64, 64]"),
    ),
    "rank": ("llama", halves(QUERY, rank=4), CheckpointError, (QUERY, "rank 2")),
    "half": (
        "llama",
        {f"{PREFIX}{QUERY}.lora_A.weight": torch.zeros(2, 64)},
        CheckpointError,
        (QUERY, "only a"),
    ),
    "two kinds": (
        "llama",
        halves(QUERY) | {f"{PREFIX}{QUERY}.lora_embedding_A": torch.zeros(2, 64)},
        CheckpointError,
        (QUERY, "lora_embedding_A", "twice"),
    ),
    "8 bits": (
        "llama",
        {name: tensor.to(torch.float8_e4m3fn) for name, tensor in halves(QUERY).items()},
        CheckpointError,
        (QUERY, "F8_E4M3", "16 or 32 bits"),
    ),
    "terminal": (
        "llama",
        halves("model.layers.0.\x1b[31mred"),
        CheckpointError,
        (r"model.layers.0.\u001b[31mred",),
    ),
    "empty": ("llama", {}, CheckpointError, ("has no tensor",)),
    "not of PEFT": ("llama", {"lora_te.alpha": torch.zeros(1)}, CheckpointError, (PREFIX,)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_applied_by_row_is_refused_by_name(case: str, tmp_path: Path) -> None:
    variant, tensors, kind, names = REFUSED[case]
    folder = write_adapter(tmp_path, {name: value.clone() for name, value in tensors.items()})
    with pytest.raises(kind) as error:
        opened(folder, variant)
    assert all(name in str(error.value) for name in names), error.value
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("changed", "kind", "names"),
    [
        ({"use_dora": True}, CheckpointError, ("only a", "magnitude")),
        ({"modules_to_save": ["lm_head"]}, ConfigError, ("modules_to_save", MERGE)),
        ({"lora_bias": True}, ConfigError, ("lora_bias", "merge_and_unload")),
        ({"lora_alpha": 1e300}, CheckpointError, (QUERY, "lora_alpha", "float32")),
        ({"lora_alpha": math.inf}, CheckpointError, ("lora_alpha", "positive")),
        ({"lora_alpha": -1}, CheckpointError, ("lora_alpha", "positive")),
        ({"peft_type": "LOHA"}, ConfigError, ("peft_type", "LOHA")),
    ],
)
def test_configs_that_are_not_applied_are_refused(
    changed: dict[str, Any], kind: type[FreightError], names: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(kind) as error:
        opened(write_adapter(tmp_path, halves(QUERY), **changed))
    assert any(name in str(error.value) for name in names), error.value


def test_dora_is_refused() -> None:
    with refuses(ConfigError, "use_dora", MERGE):
        opened(FIXTURES / "peft/dora")


def experts_of_peft(folder: Path, **config: Any) -> Path:
    """Copy an adapter of gate_up and down of experts, with other fields in its config."""
    shutil.copytree(ADAPTERS / "qwen2-moe-experts", folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


GATE_UP = "mlp.experts.gate_up_proj"
DOWN = "mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ({"target_parameters": None}, CheckpointError, ("mlp.experts", "rank 1")),
        ({"target_parameters": [DOWN]}, CheckpointError, ("base_layer", "2 times", "has 1")),
        (
            {"target_parameters": [DOWN, "experts.up_proj"]},
            CheckpointError,
            ("up_proj", "no such"),
        ),
        ({"target_parameters": [GATE_UP, DOWN, "experts.up_proj"]}, CheckpointError, (GATE_UP,)),
        (
            {"target_parameters": ["mlp.experts.gate_up_proj_bias"]},
            ConfigError,
            ("mlp.experts.gate_up_proj_bias",),
        ),
        ({"target_parameters": {DOWN: 1}}, CheckpointError, ("list of names",)),
        ({"rank_pattern": {DOWN: 3}}, CheckpointError, (DOWN, "rank 3")),
        ({"rank_pattern": {DOWN: 2}}, CheckpointError, (DOWN, "4 experts", "8 of them")),
        ({"rank_pattern": {DOWN: 0.5}}, CheckpointError, (DOWN, "rank 0.5")),
    ],
)
def test_experts_that_do_not_fit_are_refused_by_name(
    changed: dict[str, Any], kind: type[FreightError], words: tuple[str, ...], tmp_path: Path
) -> None:
    with refuses(kind, *words):
        opened(experts_of_peft(tmp_path / "adapter", **changed), "qwen2-moe")


def test_experts_of_peft_belong_to_a_mixture_of_that_shape(tmp_path: Path) -> None:
    with refuses(CheckpointError, GATE_UP, "8 experts", "4 of them"):
        opened(ADAPTERS / "qwen2-moe-experts", "mixtral")
    with refuses(CheckpointError, GATE_UP, "[192, 64]", "[64, 64]"):
        opened(ADAPTERS / "gpt-oss-experts", "qwen2-moe")
    with refuses(CheckpointError, GATE_UP, "no such"):
        opened(ADAPTERS / "mixtral-experts", "llama")
    with refuses(ConfigError, GATE_UP, "--max-lora-rank 2"):
        opened(ADAPTERS / "mixtral-experts", "mixtral", max_rank=1)


def separated(stacked: LoraAdapter, folder: Path) -> Path:
    """Write an adapter of the separate matrices, as older models of transformers have them."""
    tensors = {}
    for module in stacked.ranks:
        matrices = stacked.matrices(module)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = matrices.a.clone()
        tensors[f"{PREFIX}{module}.lora_B.weight"] = matrices.b.contiguous()
    return write_adapter(folder, tensors, r=1, lora_alpha=2)


def test_separate_modules_are_those_of_the_parameters(tmp_path: Path) -> None:
    stacked = opened(ADAPTERS / "qwen2-moe-experts", "qwen2-moe")
    separate = opened(separated(stacked, tmp_path), "qwen2-moe")
    assert separate.ranks == stacked.ranks
    assert len(separate.ranks) == 3 * 3 * 8 + 1
    for module in stacked.ranks:
        expected = stacked.matrices(module)
        matrices = separate.matrices(module)
        assert torch.equal(matrices.a, expected.a)
        assert torch.equal(matrices.b, expected.b)
        assert matrices.scaling == expected.scaling


def test_separate_experts_are_merged_and_parameters_are_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_random(VARIANTS["qwen2-moe"], base, torch.float32)
    stacked = ADAPTERS / "qwen2-moe-experts"
    with refuses(ConfigError, GATE_UP, "8 experts", "merge_and_unload"):
        merge(str(base), str(stacked), tmp_path / "out")
    separate = separated(opened(stacked, "qwen2-moe"), tmp_path / "adapter")
    merge(str(base), str(separate), tmp_path / "out")
    expected = load_file(stacked / "expected.safetensors")
    logits = freight_logits(tmp_path / "out", expected["token_ids"].tolist(), "float32")
    assert (logits - expected["logits"]).abs().max() < 1e-4


def test_ranks_above_the_largest_name_the_option() -> None:
    assert opened(ADAPTERS / "llama", max_rank=64).largest_rank == 64
    with refuses(ConfigError, "model.layers.2.self_attn.k_proj", "--max-lora-rank 64"):
        opened(ADAPTERS / "llama", max_rank=63)


def test_folders_without_an_adapter_are_refused(tmp_path: Path) -> None:
    absent = (str(tmp_path / "absent"), "a\0b", "../" * 5000, "~no-such-user/x")
    for name in (str(tmp_path), "demo", *absent):
        with pytest.raises(FreightError):
            open_adapter(name, config_of("llama"), 16)


def test_what_is_no_folder_names_what_an_adapter_is(tmp_path: Path) -> None:
    """None of them is looked for on a hub."""
    file = tmp_path / "adapter_model.safetensors"
    file.touch()
    for name in (str(file), "/dev/null", "https://127.0.0.1/x", "owner/name:x.gguf", "ollama:x"):
        with refuses(CheckpointError, name, "adapter_config.json", "OWNER/NAME"):
            open_adapter(name, config_of("llama"), 16)


# Mutations. Each changes a copy of an adapter in `folder`.

ODD_VALUES = (
    None,
    True,
    -1,
    0,
    0.5,
    1,
    3,
    1e308,
    10**400,
    math.nan,
    "8",
    "x",
    [],
    [1],
    {},
    {"q_proj": 2},
    {"(": 1},
)


def _tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def flip_bytes(folder: Path, draw: random.Random) -> None:
    file = folder / draw.choice(["adapter_model.safetensors"] * 3 + ["adapter_config.json"])
    data = bytearray(file.read_bytes())
    end = draw.choice([8, 200, 1000, len(data)])
    for _ in range(draw.choice([1, 1, 4])):
        data[draw.randrange(min(end, len(data)))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def truncate(folder: Path, draw: random.Random) -> None:
    file = folder / draw.choice(["adapter_model.safetensors", "adapter_config.json"])
    data = file.read_bytes()
    file.write_bytes(data[: draw.randrange(len(data))] + b"\0" * draw.choice([0, 0, 100]))


def change_config(folder: Path, draw: random.Random) -> None:
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    key = draw.choice([*config, "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"])
    config[key] = draw.choice(ODD_VALUES)
    if draw.random() < 0.2:
        del config[key]
    file.write_text(json.dumps(config))


def change_tensors(folder: Path, draw: random.Random) -> None:
    tensors = _tensors_of(folder)
    name = draw.choice(list(tensors))
    other = draw.choice(list(tensors))
    tensor = tensors[name]
    kind = draw.choice(["rename", "swap", "drop", "dtype", "turn", "nan", "cut", "add"])
    if kind == "rename":
        at = draw.randrange(len(name))
        tensors[name[:at] + draw.choice(["", ".", "\x1b", "7", "é"]) + name[at + 1 :]] = (
            tensors.pop(name)
        )
    elif kind == "swap":
        tensors[name], tensors[other] = tensors[other], tensor
    elif kind == "drop":
        del tensors[name]
    elif kind == "dtype":
        dtypes = (
            torch.float16,
            torch.bfloat16,
            torch.float64,
            torch.int32,
            torch.uint8,
            torch.float8_e4m3fn,
        )
        tensors[name] = tensor.to(draw.choice(dtypes))
    elif kind == "turn":
        tensors[name] = tensor.T.contiguous()
    elif kind == "nan":
        tensors[name] = tensor.flatten().index_fill(0, torch.tensor(1), math.nan).view(tensor.shape)
    elif kind == "cut":
        tensors[name] = tensor[: draw.randrange(len(tensor) + 1)].clone()
    else:
        tensors[
            name.replace("lora_", draw.choice(["lora_embedding_", "", "lora_A.default.lora_"]))
        ] = tensor.clone()
    save_file(tensors, folder / "adapter_model.safetensors")


def expected_scaling(config: dict[str, Any], module: str, rank: int) -> float:
    """As PEFT: the first pattern that is a name's end."""
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = value
            break
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def check_read(folder: Path, adapter: LoraAdapter) -> None:
    """Compare with what safetensors and json read of the files."""
    tensors = _tensors_of(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert 2 * len(adapter.ranks) == len(tensors)
    for module, rank in adapter.ranks.items():
        matrices = adapter.matrices(module)
        written = next(name for name in tensors if f"{module}.lora_A" in name).removesuffix(
            ".lora_A.weight"
        )
        assert torch.equal(matrices.a, tensors[f"{written}.lora_A.weight"])
        assert torch.equal(matrices.b, tensors[f"{written}.lora_B.weight"])
        assert matrices.a.shape[0] == rank
        expected = expected_scaling(config, written.removeprefix(PREFIX), rank)
        assert math.isclose(matrices.scaling, expected)


MUTATIONS: tuple[Callable[[Path, random.Random], None], ...] = (
    flip_bytes, truncate, change_config, change_tensors, change_tensors,
)  # fmt: skip


def check_read_experts(folder: Path, adapter: LoraAdapter) -> None:
    """Compare the experts of Mixtral with PEFT's formula (`ParamWrapper.get_delta_weight`)."""
    tensors = _tensors_of(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    num_modules = 0
    for module, rank in adapter.ranks.items():
        expert = re.fullmatch(r"(.*\.)block_sparse_moe\.experts\.(\d+)\.(w[123])", module)
        if expert is None:
            continue
        layer, number, part = expert.groups()
        wrapper = f"{PREFIX}{layer}mlp.experts.{'' if part == 'w2' else 'base_layer.'}"
        a = tensors[f"{wrapper}lora_A.weight"]
        b = tensors[f"{wrapper}lora_B.weight"]
        a = a.reshape(4, rank, -1).float()
        b = b.reshape(len(b), rank, 4).float()
        rows = {"w1": slice(0, 96), "w3": slice(96, 192), "w2": slice(None)}[part]
        delta = torch.einsum("ore,eri->eoi", b, a)[int(number), rows]
        matrices = adapter.matrices(module)
        assert torch.allclose(matrices.b.float() @ matrices.a.float(), delta, atol=1e-6)
        parameter = f"{layer}mlp.experts.{'down_proj' if part == 'w2' else 'gate_up_proj'}"
        assert math.isclose(matrices.scaling, expected_scaling(config, parameter, rank))
        num_modules += 1
    assert num_modules == 3 * 4 * 3 or len(tensors) < 3 * 6


@pytest.mark.clock
@pytest.mark.parametrize(
    ("variant", "adapters", "count", "check"),
    [
        ("llama", ["llama", "llama-rank-1"], 300, check_read),
        ("mixtral", ["mixtral-experts"], 100, check_read_experts),
    ],
)
def test_mutated_files_are_refused_or_read_right(
    variant: str,
    adapters: list[str],
    count: int,
    check: Callable[[Path, LoraAdapter], None],
    tmp_path: Path,
) -> None:
    modules = adapter_modules(config_of(variant))
    draw = random.Random(0)
    counts = {"read": 0, "refused": 0}
    messages = []
    started = time.process_time()
    for number in range(count):
        folder = tmp_path / str(number)
        shutil.copytree(ADAPTERS / draw.choice(adapters), folder)
        mutate = draw.choice(MUTATIONS)
        mutate(folder, draw)
        try:
            adapter = LoraAdapter.open(str(folder), modules, 64)
            adapter.check_values()
        except FreightError as error:
            messages.append(str(error))
            counts["refused"] += 1
        else:
            check(folder, adapter)
            counts["read"] += 1
        shutil.rmtree(folder)
    assert time.process_time() - started < 10
    assert min(counts.values()) > count // 10, counts
    assert all(message.isprintable() for message in messages)
