"""What `freight plan` counts of a head that drafts is what an engine with it allocates, and what it refuses
an engine refuses, in the same words.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import train_draft_heads
from tests.forked_server import CAN_FORK, forked
from tests.parity import test_eagle
from tests.parity.random_models import save_random
from tests.parity.test_eagle import TARGET, random_tensors, write_head
from tests.parity.test_eagle import VARIANTS as EAGLES
from tests.parity.test_predicting import CASES, save
from tests.refusals import refuses
from train_draft_heads import EAGLE, PREDICTING, train_heads
from transformers import LlamaConfig

from freight.checkpoint.config_only import read_config_only, tensor_dtypes, tensors_dtype
from freight.engine import leader
from freight.engine.build import start_engine
from freight.engine.leader import Leader
from freight.errors import CheckpointError, ConfigError, FreightError
from freight.kernels.cpu.library import installed, runnable
from freight.lab.capacity import Plan, Setting, Wish, make_plan
from freight.model.decoder import Decoder
from freight.model.held_tensors import held_tensors
from freight.model.open import open_model
from freight.model.sizes import Layout
from freight.settings.engine import EngineArgs

MIB = 2**20
LAYOUT = Layout.TILES if runnable()[:1] == ("amx",) else Layout.PACKED
# a kind, which of them, and the planned setting: of weights in 16 bits, or in 8
ON_RANKS = [
    ("draft_model", "", 6),
    ("mtp", "deepseek-v3", 0),
    ("mtp", "qwen3-5-moe", 6),
    ("mtp", "mimo", 12),
    ("eagle3", "midlayer", 6),
    ("eagle3", "speculators-qwen3", 0),
]
DEMO_HEADS = [EAGLE, PREDICTING, "demo"]
MTP = '{"method": "mtp"}'


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_draft_heads, "LENGTH", 128)
        train_heads(folder, 1, rows=1, depth=1, vocabulary=300, names=(EAGLE, PREDICTING))
    return folder


def planned(model: str, config: str | None, **wish: Any) -> Plan:
    described, modelopt = read_config_only(model)
    asked = Wish(
        **{
            "memory": 64 * MIB,
            "context": 300,
            "device": "cpu",
            "layout": LAYOUT,
            "speculative_config": config,
            **wish,
        }
    )
    stored = tensors_dtype(model, described)
    return make_plan(described, asked, modelopt, stored, (), None, tensor_dtypes(model), model)


def check(model: str, config: str, plan: Plan, setting: Setting) -> None:
    """The engine of these options has the planned cache, and weights to the byte."""
    pairs = dict(zip(setting.options[::2], setting.options[1::2], strict=True))
    options: dict[str, Any] = {flag[2:].replace("-", "_"): text for flag, text in pairs.items()}
    if options.get("kv_scales") in ("scales.json", "checkpoint"):
        options["kv_scales"] = "0.03"  # any static ones take as much
    args = EngineArgs(
        **options,
        model=model,
        speculative_config=config,
        skip_tokenizer_init=True,
        dtype=plan.wish.dtype,
        max_model_len=plan.context,
        kv_cache_memory=setting.cache_bytes * plan.wish.ranks,
        device="cpu",
        tensor_parallel_size=plan.wish.ranks,
    )
    engine, _ = start_engine(open_model(args))
    assert engine._drafting is not None
    target = engine.runner.model
    assert isinstance(target, Decoder)
    pool = engine.runner.pool
    assert engine._drafting.runner.pool.spec == setting.spec
    behind = setting.spec.layers[target.config.num_layers :]
    assert setting.head_bytes_per_token == sum(layer.bytes_per_token for layer in behind if layer)
    assert setting.head_bytes_per_token > 0
    assert pool.num_blocks == setting.num_blocks
    assert engine.cache.capacity_tokens == setting.capacity_tokens
    both = sum(held_tensors((target, engine._drafting.runner.head)).values())
    assert both - sum(held_tensors(target).values()) == setting.loaded.head > 0
    leading = engine.runner.leader
    assert isinstance(leading, Leader) == (plan.wish.ranks > 1)
    if isinstance(leading, Leader):
        leading.close()


@pytest.mark.parametrize("name", DEMO_HEADS)
def test_heads_of_the_demo_are_what_the_engine_allocates(name: str, heads: Path) -> None:
    model = str(heads / PREDICTING) if name == PREDICTING else "demo"
    folder = {EAGLE: str(heads / EAGLE), "demo": "demo"}.get(name)
    config = MTP
    if folder is not None:
        config = json.dumps(
            {"method": "eagle3" if name == EAGLE else "draft_model", "model": folder}
        )
    plan = planned(model, config)
    plain = planned(model, None)
    assert len(plan.settings) == len(plain.settings) == 20
    for setting in plan.settings[::3]:  # every form of weights, and every cache
        check(model, config, plan, setting)
    for setting, without in zip(plan.settings, plain.settings, strict=True):
        assert setting.capacity_tokens < without.capacity_tokens
        assert without.loaded.head == without.head_bytes_per_token == 0


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe", "mimo", "qwen3-5"])
def test_layers_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    """Of experts, latents and a hybrid; and of config.json alone, which declares them."""
    save(CASES[name], tmp_path)
    model = str(tmp_path)
    wish = {"dtype": "bfloat16", "context": 100}
    plan = planned(model, MTP, **wish)
    for setting in plan.settings[::6]:
        check(model, MTP, plan, setting)
    (tmp_path / "model.safetensors").unlink()
    alone = planned(model, MTP, **wish)
    assert alone.settings == plan.settings
    found = planned(model, None, speculate="auto", **wish)
    assert found.settings == plan.settings


@pytest.mark.parametrize("name", list(EAGLES))
def test_every_form_of_an_eagle_head(name: str, tmp_path: Path) -> None:
    save_random(LlamaConfig(**TARGET), tmp_path, torch.float32)
    head = write_head(tmp_path / "head", EAGLES[name], random_tensors(EAGLES[name]))
    config = json.dumps({"method": "eagle3", "model": str(head)})
    plan = planned(str(tmp_path), config, dtype="bfloat16", context=200)
    check(str(tmp_path), config, plan, plan.settings[1])


def test_a_head_beside_layers_in_16_bits(heads: Path) -> None:
    """The last layer's cache stays in 16 bits, and the head's with it."""
    config = json.dumps({"method": "eagle3", "model": str(heads / EAGLE)})
    plan = planned("demo", config, skip_layers=("5",))
    per_token = [setting.head_bytes_per_token for setting in plan.settings[:2]]
    assert per_token[0] == per_token[1]
    assert planned("demo", config).settings[1].head_bytes_per_token < per_token[0]


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The ranks after the first are forked."""
    environ = os.environ | {"FREIGHT_TEST_PAGES": str(tmp_path / "pages.pt")}

    def spawn(files: Any) -> Any:
        return forked(["python", "-m", "tests.rank_follower", *map(str, files)], files, environ)

    monkeypatch.setattr(leader, "spawn", spawn)


def of_two_ranks(folder: Path, kind: str, which: str) -> tuple[str, str]:
    """A model and the --speculative-config of what drafts for it."""
    model = folder / "model"
    if kind == "mtp":
        save(CASES[which], model)
        return str(model), MTP
    save_random(LlamaConfig(**TARGET), model, torch.float32)
    head = model
    if kind == "eagle3":
        head = write_head(folder / "head", EAGLES[which], random_tensors(EAGLES[which]))
    return str(model), json.dumps({"method": kind, "model": str(head)})


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.skipif(not CAN_FORK, reason="the other ranks are forked")
@pytest.mark.skipif(not installed(), reason="ranks gather in the compiled kernels")
@pytest.mark.parametrize(("kind", "which", "index"), ON_RANKS)
def test_a_rank_has_its_part_of_a_head(kind: str, which: str, index: int, tmp_path: Path) -> None:
    """As much of the cache as the first of two ranks allocates, and of the weights."""
    model, config = of_two_ranks(tmp_path, kind, which)
    wish = {"dtype": "bfloat16", "context": 100}
    whole = planned(model, config, **wish).settings[index]
    plan = planned(model, config, ranks=2, **wish)
    setting = plan.settings[index]
    check(model, config, plan, setting)
    assert setting.loaded.head < whole.loaded.head
    if which != "deepseek-v3":  # whose latents each rank has
        assert setting.head_bytes_per_token < whole.head_bytes_per_token


def refusal_of_an_engine(model: str, **options: Any) -> str:
    args = EngineArgs(model=model, skip_tokenizer_init=True, device="cpu", **options)
    with pytest.raises(FreightError) as refused:
        start_engine(open_model(args))
    return str(refused.value)


HYBRID = str(Path(__file__).parents[1] / "fixtures/hybrids/delta_net")
SECOND = {"method": "draft_model", "model": HYBRID}


@pytest.mark.parametrize(
    ("model", "config"),
    [("demo", {"method": "mtp"}), ("demo", SECOND), (HYBRID, {"method": "mtp"})],
)
def test_what_an_engine_refuses(model: str, config: dict[str, str]) -> None:
    said = refusal_of_an_engine(model, speculative_config=json.dumps(config))
    with refuses(ConfigError) as refused:
        planned(model, json.dumps(config))
    assert str(refused.value) == said


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_heads_that_ranks_cannot_divide(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the words of an engine, which name the head."""
    thirds = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16}
    model = tmp_path / "model"
    save_random(LlamaConfig(**TARGET), model, torch.float32)
    head = tmp_path / "head"
    if method == "eagle3":
        monkeypatch.setattr(test_eagle, "HEADS", 3)
        monkeypatch.setattr(test_eagle, "KV_HEADS", 3)
        variant = EAGLES["midlayer"]
        write_head(head, replace(variant, config=variant.config | thirds), random_tensors(variant))
    else:
        save_random(LlamaConfig(**TARGET | thirds | {"hidden_size": 48}), head, torch.float32)
    config = json.dumps({"method": method, "model": str(head)})
    said = refusal_of_an_engine(str(model), speculative_config=config, tensor_parallel_size=2)
    assert "is divided as" in said
    with refuses(ConfigError) as refused:
        planned(str(model), config, ranks=2, context=100)
    assert str(refused.value) == said


def test_a_head_of_another_model(heads: Path, tmp_path: Path) -> None:
    save_random(LlamaConfig(**TARGET), tmp_path, torch.float32)
    config = json.dumps({"method": "eagle3", "model": str(heads / EAGLE)})
    said = refusal_of_an_engine(str(tmp_path), speculative_config=config)
    with refuses(CheckpointError) as refused:
        planned(str(tmp_path), config, context=200)
    assert str(refused.value) == said


def test_where_nothing_drafts() -> None:
    """--speculate auto does without; a head that is named is refused."""
    for model, wish in (("demo", {}), (HYBRID, {}), ("demo", {"device": "cuda"})):
        assert planned(model, None, speculate="auto", **wish).head is None
    with refuses(ConfigError, "on a GPU the next step is launched"):
        planned("demo", MTP, device="cuda")
    assert planned("demo", '{"method": "ngram"}').head is None
    with refuses(ConfigError, "is no folder here", "downloads no head"):
        planned("demo", '{"method": "eagle3", "model": "someone/head"}')


def test_a_second_model_that_is_quantized_already(tmp_path: Path) -> None:
    """Weights are listed as an engine takes them beside it."""
    described, _ = read_config_only("demo")
    quantized = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(
        json.dumps({**described, "quantization_config": quantized})
    )
    plan = planned("demo", json.dumps({"model": str(tmp_path)}))
    assert {setting.weights for setting in plan.settings} == {"bfloat16", "fp8_e4m3fn"}
    first, second = plan.settings[0], plan.settings[5]
    assert first.loaded.head == second.loaded.head
    assert second.loaded.layers < first.loaded.layers
