"""docs/models.md and the count in README.md are what their tool prints, and what the tool says
follows the code.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import model_facts
import models_table
import published_models
import pytest
from model_facts import Tables, flags, of_attention, read_tests, united
from published_models import (
    FILES,
    NATIVE,
    REFUSED,
    Published,
    Verdict,
    ask,
    read_others,
    read_recipes,
    unreadable,
)

from freight.model.config.mechanisms import MECHANISMS
from freight.model.config.registry import FAMILIES
from freight.model.mixers.attention.spec import AttentionConfig, QKNormConfig

RECURRENT, MLA = "layers with a recurrent state", "latent attention (MLA)"


@pytest.fixture(scope="module")
def tests() -> Tables:
    return read_tests()


@pytest.fixture(scope="module")
def recipes(tests: Tables) -> list[Published]:
    return read_recipes(tests)[1]


def test_the_documents_are_what_the_tool_prints() -> None:
    """After a change to a family or to the tables of its tests: python tools/models_table.py
    --write
    """
    assert models_table.DOCUMENT.read_text(encoding="utf-8") == models_table.document()
    content = models_table.README.read_text(encoding="utf-8")
    assert models_table.readme(content) == content
    begin, end = models_table.MARKERS
    older = content.partition(begin)[0] + begin + "older\n" + end + content.partition(end)[2]
    assert models_table.readme(older) == content


def encodes(model_type: str, tests: Tables) -> bool:
    """Whether every variant of a model type is one without a head, whose final states are compared."""
    names = tests.states_of(model_type)
    return bool(names) and not tests.of(model_type)


def test_every_family_is_compared(tests: Tables) -> None:
    native = model_facts.native_types()
    others = {name for name in native if not tests.of(name)}
    assert others == {name for name in native if name in tests.same_weights or encodes(name, tests)}
    wrappers = {wrapper for wrappers in native.values() for wrapper in wrappers}
    assert FAMILIES.keys() == native.keys() | wrappers
    assert all(models_table.models_of(name, tests) for name in native)


@pytest.mark.parametrize(
    ("model_type", "more", "runs", "reason"),
    [
        ("qwen3", {}, NATIVE, ""),
        ("mistral3", {"text_type": "ministral3"}, NATIVE, ""),
        ("mistral3", {"text_type": "mistral4"}, NATIVE, ""),
        ("cohere2", {}, "through transformers", ""),
        ("deepseek_v3", {}, NATIVE, ""),
        ("kimi_linear", {}, NATIVE, ""),
        ("bailing_hybrid", {}, NATIVE, ""),
        (
            "bailing_hybrid",
            {"architecture": "BailingMoeV2_5ForCausalLM"},
            REFUSED,
            "no public implementation of it can be run to compare with",
        ),
        ("mistral4", {"keys": {"kv_lora_rank": 64}}, NATIVE, ""),
        ("granite_swa", {}, REFUSED, "s_aux (a sink)"),
        ("llava", {}, REFUSED, "it has several parts"),
        ("of_nobody", {}, REFUSED, "transformers does not know"),
        ("plamo3", {}, REFUSED, "no public implementation of it can be run to compare with"),
        ("bailing_moe", {}, REFUSED, "no public implementation of it can be run to compare with"),
        ("step3p5", {}, REFUSED, "no public implementation of it can be run to compare with"),
    ],
)
def test_the_code_is_asked(
    model_type: str, more: dict[str, Any], runs: str, reason: str, tests: Tables
) -> None:
    """Also of a model type that is moved to a row: `cohere2` is settled by a row or by the tables
    of the fallback.
    """
    verdict = ask(model_type, tests, **more)
    assert verdict.runs == (NATIVE if model_type in FAMILIES and not reason else runs)
    assert reason in "".join(verdict.reasons)


def test_each_mechanism_that_an_error_names_is_a_reason(tests: Tables) -> None:
    sparse, mla = ask("dots3_note", tests).reasons
    assert (sparse[:16], mla) == ("sparse attention", MLA)
    assert {sparse, mla} <= {mechanism.name for mechanism in MECHANISMS}


def write_recipes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, models: list[dict[str, Any]]
) -> None:
    file = folder / "recipes.json"
    file.write_text(json.dumps({"models": models}))
    monkeypatch.setattr(published_models, "RECIPES", file)


def test_a_model_without_a_readable_checkpoint_is_not_counted(
    tests: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precisions = {"both": ["nvfp6", "fp8"], "neither": ["nvfp6", "int2"]}
    models = [
        {"name": f"o/{k}", "model_type": "qwen3", "moe": False, "precisions": v}
        for k, v in precisions.items()
    ]
    write_recipes(tmp_path, monkeypatch, models)
    _, (both, neither) = read_recipes(tests)
    assert both.verdict == Verdict(NATIVE)
    assert neither.verdict == Verdict(REFUSED, ("nvfp6 is not read",))
    assert unreadable("bf16", "qwen3") is None
    assert unreadable("int4", "qwen3") is None
    assert unreadable("nvfp4", "qwen3") is None
    assert unreadable("mxfp4", "gpt_oss") is None
    assert "mxfp4" in (unreadable("mxfp4", "qwen3") or "")
    assert (both.is_fp8, neither.is_fp8) == (True, False)
    assert (both.seen, neither.seen) == (False, False)


def test_a_published_file_decides_over_the_model_type(
    tests: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-VL-2B-Instruct",
        "Qwen/Qwen3-0.6B-of-nobody",
        "moonshotai/Kimi-K3",
    )
    models = [
        {"name": name, "model_type": "qwen3", "moe": False, "precisions": ["bf16"]}
        for name in names
    ]
    write_recipes(tmp_path, monkeypatch, models)
    _, (file, excerpt, unseen, refused) = found = read_recipes(tests)
    assert [(one.runs, one.seen) for one in (file, excerpt, unseen)] == [
        (True, True),
        (True, False),
        (True, False),
    ]
    assert (file.family, excerpt.family) == (
        "qwen3",
        "qwen3_vl",
    )  # the second by its file, not by the recipe
    assert refused.verdict.reasons[1:] == (MLA,)
    assert RECURRENT in refused.verdict.reasons[0]
    assert models_table.counted(found[1]) == (1, 2, 1)
    others = read_others(found[1])
    assert len(others) == len(list(FILES.glob("*.json"))) - 3
    assert not {one.name for one in others} & {*names}


def test_every_published_file_is_in_one_table(recipes: list[Published]) -> None:
    others = read_others(recipes)
    files = {file.stem.replace("--", "/", 1) for file in FILES.glob("*.json")}
    named = {one.name for one in recipes if one.name in files}
    assert named | {one.name for one in others} == files
    assert {one.name for one in recipes if one.seen} < named  # some are excerpts
    assert "Qwen/Qwen2.5-32B" in named
    gemma = next(one for one in others if one.name == "google/gemma-4-26B-A4B")
    assert gemma.family == "gemma4_text"


def test_what_is_refused_has_its_reason_in_the_document(
    tests: Tables, recipes: list[Published]
) -> None:
    others = read_others(recipes)
    rows = models_table.refused_table(tests, recipes, others).splitlines()[2:]
    assert all(
        any(row.startswith(f"| {mechanism.name} |") for row in rows) for mechanism in MECHANISMS
    )
    numbers = [int(row.split(" | ")[1]) for row in rows]
    assert numbers == sorted(numbers, reverse=True)
    assert all(len(row.partition(" | ")[0]) < 90 for row in rows)
    listed = [row.split(" | ")[2].split(", ") for row in rows]
    for one in recipes:
        assert sum(one.short_name in names for names in listed) == len(one.verdict.reasons)
        assert one.runs == (not one.verdict.reasons)
    forms = models_table.forms_table().splitlines()[2:]
    assert len(forms) == len(models_table.ASKED_FORMS)
    assert all(reason.strip(" |") for _, reason in (row[2:].split(" | ", 1) for row in forms))


def test_the_list_is_complete() -> None:
    models = json.loads(published_models.RECIPES.read_text())["models"]
    assert len({model["name"] for model in models}) == len(models) == 131
    assert sum(model["moe"] for model in models) == 77
    assert sum(bool({"fp8", "mxfp8"} & set(model["precisions"])) for model in models) == 72


def test_features_are_named_and_those_of_some_variants_are_set_apart(tests: Tables) -> None:
    assert united([["a", "b"], ["b", "c"]]) == "b; by config: a, c"
    mixer = AttentionConfig(4, 2, 16, 16, 0.25, qk_norm=QKNormConfig(), soft_cap=5.0)
    assert flags(
        mixer, {"qk_norm": "norms"}, frozenset(("num_heads", "num_kv_heads", "k_dim", "v_dim"))
    ) == [*("softmax scale", "rope", "norms", "soft cap")]
    model = tests.models["gpt-oss"]
    assert {"windows in some layers", "sinks", "yarn rope"} <= set(of_attention(model))
    other = tuple(replace(layer, mixer=replace(layer.mixer, window=8)) for layer in model.layers)
    assert "window" in of_attention(replace(model, layers=other))
