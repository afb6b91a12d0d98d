"""Layers of one part: one without a mixer and one without a feed-forward, through everything that
runs a model.

Nemotron-H has them beside Mamba-2; this row is made here. The oracle is the same model with both
parts everywhere: a part whose last matrix is zero adds zero, which changes no bit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parity.random_models import freight_logits, save_random, tokens
from tests.parity.variants import SHAPE
from tests.refusals import refuses
from transformers import LlamaConfig

import freight
from freight import LLM, SamplingParams
from freight.errors import CheckpointError, ConfigError
from freight.lab.capacity import Wish, make_plan
from freight.lab.evaluate.grid import GridArgs, evaluate_grid
from freight.lab.evaluate.report import compare_caches
from freight.lab.evaluate.sensitivity import per_layer
from freight.model.config.family import Family
from freight.model.config.model import ModelConfig
from freight.model.config.registry import FAMILIES
from freight.model.open import open_checkpoint, open_model
from freight.model.sizes import Layout, loaded_bytes
from freight.model.weight_bytes import weight_bytes
from freight.settings.engine import EngineArgs

IDS = tokens(120)
FED, MIXED = (
    1,
    3,
)  # the layer that is a feed-forward alone, and the one that is attention alone, the last
CACHES: list[dict[str, Any]] = [
    {"kv_cache_dtype": "bfloat16"},
    {"kv_cache_dtype": "fp8", "kv_scales": "dynamic"},
    {"kv_cache_dtype": "int8"},
    {"kv_cache_dtype": "fp8", "kv_scales": "unit", "quantization": "fp8"},
]
DATA: dict[str, Any] = {"calibration_data": [IDS], "kv_cache": "fp8"}


def _derive(config: object, model: ModelConfig) -> ModelConfig:
    layers = list(model.layers)
    layers[FED] = replace(layers[FED], mixer=None)
    layers[MIXED] = replace(layers[MIXED], feed_forward=None)
    return replace(model, layers=tuple(layers))


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> Family:
    """A row whose model_type is "parts"."""
    parts = replace(FAMILIES["llama"], derive=_derive)
    monkeypatch.setitem(FAMILIES, "parts", parts)
    return parts


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the model with both parts everywhere, two of which add zero; the same model without these)."""
    base = tmp_path_factory.mktemp("parts")
    whole, parts = base / "whole", base / "parts"
    save_random(LlamaConfig(**{**SHAPE, "num_hidden_layers": 4}), whole, torch.bfloat16)
    tensors = load_file(whole / "model.safetensors")
    fed, mixed = f"model.layers.{FED}.", f"model.layers.{MIXED}."
    for name in (f"{fed}self_attn.o_proj.weight", f"{mixed}mlp.down_proj.weight"):
        tensors[name].zero_()
    save_file(tensors, whole / "model.safetensors", {"format": "pt"})
    gone = (f"{fed}self_attn.", f"{fed}input_", f"{mixed}mlp.", f"{mixed}post_")
    parts.mkdir()
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(gone)}
    save_file(kept, parts / "model.safetensors", {"format": "pt"})
    config = json.loads((whole / "config.json").read_text())
    (parts / "config.json").write_text(json.dumps({**config, "model_type": "parts"}))
    return whole, parts


def both(folders: tuple[Path, Path]) -> tuple[EngineArgs, EngineArgs]:
    whole, parts = (EngineArgs(str(folder), skip_tokenizer_init=True) for folder in folders)
    return whole, parts


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_logits_are_those_of_parts_that_add_nothing(
    folders: tuple[Path, Path], kernels: str
) -> None:
    for cache in CACHES:
        whole, parts = (freight_logits(folder, IDS, "auto", kernels, **cache) for folder in folders)
        assert torch.equal(whole, parts), cache
        assert parts.isfinite().all(), cache


def test_the_engine_generates_the_same(folders: tuple[Path, Path]) -> None:
    """Batches, chunks, prefix hits and decode steps that are recorded."""
    params = SamplingParams(max_tokens=20, temperature=0.0, logprobs=2, ignore_eos=True)
    prompts = [{"prompt_token_ids": IDS[:count]} for count in (90, 90, 40, 1)]
    answers = []
    for folder in folders:
        llm = LLM(
            str(folder), skip_tokenizer_init=True, kv_cache_dtype="fp8", kv_cache_memory="1MiB",
            max_num_batched_tokens=32, max_model_len=128,
        )  # fmt: skip
        outputs = llm.generate(prompts, params) + llm.generate(prompts, params)
        choices = [output.outputs[0] for output in outputs]
        answers.append([(list(choice.token_ids), repr(choice.logprobs)) for choice in choices])
        assert llm.engine.runner.pool.counters()[0] == 0
    assert answers[0] == answers[1]


def test_only_attention_has_pages(folders: tuple[Path, Path]) -> None:
    whole, parts = (open_model(args) for args in both(folders))
    assert list(parts.model.attention) == [0, 2, 3]
    assert parts.model.without_pages == {FED}
    specs = [opened.cache_spec(opened.resolve(opened.args)) for opened in (whole, parts)]
    assert specs[1].layers[FED] is None
    assert [group.layers for group in specs[1].groups] == [(0, 2, 3)]
    assert specs[1].bytes_per_token * 4 == specs[0].bytes_per_token * 3


def test_quantizing_gives_the_scales_of_the_layers_with_attention(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """They are the same numbers, the layer without attention has none, and none is missed when the
    result is read.
    """
    options: dict[str, Any] = {
        "weights": "fp8", "activations": "static", "kv_cache": "fp8", "kv_granularity": "head",
        "calibration_data": [IDS],
    }  # fmt: skip
    made = []
    for folder in folders:
        made.append(tmp_path / f"{folder.name}-fp8")
        freight.quantize(str(folder), made[-1], **options)
    whole, parts = (open_checkpoint(str(folder)).kv_scales for folder in made)
    assert parts.layers[FED] is None
    assert not parts.missing
    assert [parts.layers[i] == whole.layers[i] for i in (0, 2, 3)] == [True] * 3
    stored = load_file(made[1] / "model.safetensors")
    assert not [name for name in stored if name.startswith(f"model.layers.{FED}.self_attn")]
    opened = open_model(EngineArgs(str(made[1]), skip_tokenizer_init=True))
    assert str(opened.resolve(opened.args).kv.scale_source) == "checkpoint"
    assert torch.equal(
        *(freight_logits(folder, IDS, "auto", kv_cache_dtype="auto") for folder in made)
    )


def test_a_scale_that_is_missing_is_still_refused(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    freight.quantize(str(folders[1]), tmp_path / "made", **DATA)
    file = tmp_path / "made" / "model.safetensors"
    stored = load_file(file)
    scales = [name for name in stored if name.endswith(("k_scale", "v_scale"))]
    assert len(scales) == 6
    kept = {name: stored[name] for name in stored if name not in scales or ".layers.2." not in name}
    wrong = f"model.layers.{FED}.self_attn.k_scale"
    for tensors, says in (
        (kept, ("none for layer 2 of 4",)),
        (kept | {wrong: torch.ones(1)}, (wrong, "layer 1", "no attention")),
    ):
        save_file(tensors, file, {"format": "pt"})
        opened = open_model(EngineArgs(str(tmp_path / "made"), skip_tokenizer_init=True))
        with refuses(CheckpointError, *says):
            opened.resolve(opened.args)


def test_evaluation_says_the_same(folders: tuple[Path, Path]) -> None:
    caches = [("fp8", "dynamic"), ("fp8", "unit")]
    whole, parts = (compare_caches(args, caches, IDS, window=60) for args in both(folders))
    for one, other in zip(whole, parts, strict=True):
        for name in ("perplexity", "mean_kl", "same_top_share"):
            assert getattr(one, name) == getattr(other, name), name
        assert one.bytes_per_token * 3 == other.bytes_per_token * 4


def test_evaluation_by_layer_leaves_out_what_has_no_cache(folders: tuple[Path, Path]) -> None:
    whole, parts = (per_layer(args, [IDS]) for args in both(folders))
    assert [layer.layer for layer in parts.layers] == [0, 2, 3]
    kls = {layer.layer: layer.kl for layer in whole.layers}
    assert {layer.layer: layer.kl for layer in parts.layers} | {FED: kls[FED]} == kls
    assert parts.kl_whole == whole.kl_whole


def test_the_whole_evaluation_says_the_same(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Static scales measured on text, errors and KL by layer, and decode steps that are timed."""
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"input_ids": IDS}))
    grid = GridArgs(
        caches=("tensor", "channel", "token"), calibration_data=str(data), window=60, per_layer=True
    )
    whole, parts = (evaluate_grid(args, [IDS], grid).runs for args in both(folders))
    assert [one.kl_mean for one in whole] == [one.kl_mean for one in parts]
    by_layer = [[one.layer_kl for one in runs if one.layer_kl] for runs in (whole, parts)]
    assert len(by_layer[1]) == 3
    for of_whole, of_parts in zip(*by_layer, strict=True):
        assert of_parts == [0.0 if layer == FED else kl for layer, kl in enumerate(of_whole)]
    assert all((one.decode_tokens_per_second or 0) > 0 for one in parts)
    centered = evaluate_grid(
        both(folders)[1], [IDS], replace(grid, caches=("centered",), speed=False)
    )
    assert any("Centered keys were not measured" in note for note in centered.overview.notes)


def test_the_plan_counts_what_is_loaded(folders: tuple[Path, Path]) -> None:
    opened = open_model(replace(both(folders)[1], kernels="reference"))
    config = opened.resolve(opened.args)
    counted = loaded_bytes(
        opened.model,
        config.compute_format,
        config.weight_format,
        lambda _: None,
        Layout.PLAIN,
        config.max_model_len,
    )
    held = weight_bytes(opened.load(config))
    assert (counted.layers, counted.embeddings) == (held.layers, held.embeddings)
    plan = make_plan(
        json.loads((folders[1] / "config.json").read_text()), Wish(2**26, device="cpu")
    )
    spec = opened.cache_spec(config)
    assert plan.settings[0].spec.bytes_per_token == spec.bytes_per_token
    assert plan.settings[0].num_blocks


def test_layers_without_a_cache_cannot_be_skipped(folders: tuple[Path, Path]) -> None:
    opened = open_model(replace(both(folders)[1], kv_cache_dtype="fp8"))
    skipping = replace(opened.args, kv_cache_dtype_skip_layers=("1",))
    with refuses(ConfigError, "layer 1", "no attention", "0, 2"):
        opened.resolve(skipping)
    kv = opened.resolve(replace(skipping, kv_cache_dtype_skip_layers=("2",))).kv
    assert [kind.granularity is None for kind in kv.layers or ()] == [False, False, True, False]


def test_options_that_need_pages_in_every_layer_say_so(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    options: tuple[dict[str, Any], ...] = (DATA | {"center": True}, {"kv_budget": "kl=0.01"})
    for option in options:
        with pytest.raises(CheckpointError, match="layer 1 has no attention"):
            freight.quantize(
                str(folders[1]), tmp_path / "made", **option | {"calibration_data": [IDS, IDS]}
            )
