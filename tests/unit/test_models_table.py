"""docs/models.md is what its tool prints, and what the tool says follows the code."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import model_facts
import models_table
import pytest
from model_facts import Tables, Verdict, ask, flags, of_attention, read_published, read_tests, united, unreadable

from freight.config.families import FAMILIES
from freight.config.layer import AttentionConfig


@pytest.fixture(scope="module")
def tests() -> Tables:
    return read_tests()


def test_the_document_is_what_the_tool_prints() -> None:
    """After a change to a family or to the tables of its tests: python tools/models_table.py --write"""
    assert models_table.DOCUMENT.read_text(encoding="utf-8") == models_table.document()


def test_every_family_has_variants_that_are_compared(tests: Tables) -> None:
    assert [name for name in model_facts.native_types() if not tests.of(name)] == []
    wrappers = {wrapper for wrappers in model_facts.native_types().values() for wrapper in wrappers}
    assert FAMILIES.keys() == model_facts.native_types().keys() | wrappers


@pytest.mark.parametrize(
    ("model_type", "more", "runs", "reason"),
    [
        ("qwen3", {}, "natively", ""),
        ("mistral3", {"text_type": "ministral3"}, "natively", ""),
        ("mistral3", {"text_type": "mistral4"}, "refused", "mistral4"),
        ("cohere2", {}, "through transformers", ""),
        ("deepseek_v3", {}, "refused", "MLA"),
        ("qwen3_5", {"text_type": "qwen3_5_text"}, "refused", "qwen3_5_text: layers of kind 'linear_attention'"),
        ("deepseek_v3", {"keys": {"kv_lora_rank": 64}}, "refused", "kv_lora_rank = 64"),
        ("of_nobody", {}, "refused", "transformers does not know it"),
    ],
)
def test_the_code_is_asked(model_type: str, more: dict[str, Any], runs: str, reason: str, tests: Tables) -> None:
    """Also of a model type that is moved to a row: `cohere2` is settled by a row or by the tables of the fallback."""
    verdict = ask(model_type, tests, **more)
    assert verdict.runs == ("natively" if model_type in FAMILIES and not reason else runs)
    assert reason in verdict.reason


def test_a_model_without_a_readable_checkpoint_is_not_counted(
    tests: Tables, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    precisions = {"both": ["nvfp4", "fp8"], "neither": ["nvfp4", "int4"]}
    models = [{"name": f"o/{k}", "model_type": "qwen3", "moe": False, "precisions": v} for k, v in precisions.items()]
    file = tmp_path / "recipes.json"
    file.write_text(json.dumps({"models": models}))
    monkeypatch.setattr(model_facts, "RECIPES", file)
    _, (both, neither) = read_published(tests)
    assert both.verdict == Verdict("natively")
    assert neither.verdict == Verdict("refused", "nvfp4 is not read")
    assert unreadable("bf16", "qwen3") is None
    assert unreadable("mxfp4", "gpt_oss") is None
    assert "mxfp4" in (unreadable("mxfp4", "qwen3") or "")
    assert (both.is_fp8, neither.is_fp8) == (True, False)


def test_the_list_is_complete() -> None:
    models = json.loads(model_facts.RECIPES.read_text())["models"]
    assert len({model["name"] for model in models}) == len(models) == 131
    assert sum(model["moe"] for model in models) == 77
    assert sum(bool({"fp8", "mxfp8"} & set(model["precisions"])) for model in models) == 72


def test_features_are_named_and_those_of_some_variants_are_set_apart(tests: Tables) -> None:
    assert united([["a", "b"], ["b", "c"]]) == "b; by config: a, c"
    mixer = AttentionConfig(4, 2, 16, 16, 0.25, qk_norm=True, soft_cap=5.0)
    assert flags(mixer, {"qk_norm": "norms"}, frozenset(("num_heads", "num_kv_heads", "k_dim", "v_dim"))) == [
        *("softmax scale", "rope", "norms", "soft cap")
    ]
    model = tests.models["gpt-oss"]
    assert {"windows in some layers", "sinks", "yarn rope"} <= set(of_attention(model))
    other = tuple(replace(layer, mixer=replace(layer.mixer, window=8)) for layer in model.layers)
    assert "window" in of_attention(replace(model, layers=other))
