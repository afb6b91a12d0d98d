"""Patterns of module names: what they match, and what they leave behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freight.errors import ConfigError
from freight.model.config.model import ModelConfig
from freight.model.config.parse import parse_model_config
from freight.model.shapes import kept_in_16_bits
from freight.quantizer.modules import ignored_modules, kept_modules, layer_modules, linear_modules

BASE = Path(__file__).parents[2] / "fixtures" / "base_bf16"


@pytest.fixture
def config() -> ModelConfig:
    return parse_model_config(json.loads((BASE / "config.json").read_text()))


def test_modules_have_their_full_names(config: ModelConfig):
    first, second = layer_modules(config)
    assert first.mixer == "model.layers.0.self_attn"
    parts = (
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj "
        "mlp.gate_proj mlp.up_proj mlp.down_proj"
    )
    assert [name for group in second.groups for name in group] == [
        f"model.layers.1.{part}" for part in parts.split()
    ]


def test_the_head_is_always_left_out(config: ModelConfig):
    assert ignored_modules(config, []) == (("lm_head",), ())
    assert ignored_modules(config, ["re:.*lm_head"]) == (("lm_head",), ())


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("model.layers.1.mlp.down_proj", ["model.layers.1.mlp.down_proj"]),
        ("re:.*down_proj", ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]),
        (
            "re:0.*o_proj$",
            ["model.layers.0.self_attn.o_proj"],
        ),  # searched, not matched from the start
    ],
)
def test_a_pattern_becomes_names(config: ModelConfig, pattern: str, names: list[str]):
    assert ignored_modules(config, [pattern]) == ((*names, "lm_head"), ())


def test_what_tears_a_merged_group_apart_is_told(config: ModelConfig):
    _, torn = ignored_modules(config, ["re:0.*q_proj", "re:1.*(gate|up)_proj"])
    assert torn == ("model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj")


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("re:.*experts", "matches no Linear module"),
        ("down_proj", "matches no Linear module"),
        ("model.layers.1.mlp.down_prj", "did you mean model.layers.1.mlp.down_proj"),
        ("model.embed_tokens", "matches no Linear module"),
        ("re:(", "is not a regular expression"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(config: ModelConfig, pattern: str, says: str):
    with pytest.raises(ConfigError, match=says):
        ignored_modules(config, [pattern])


@pytest.mark.parametrize(
    ("model_type", "architecture", "gate"),
    [
        ("laguna", "LagunaForCausalLM", "g_proj"),
        ("afmoe", "AfmoeForCausalLM", "gate_proj"),
    ],
)
def test_gates_of_heads_are_never_quantized(
    config: ModelConfig, model_type: str, architecture: str, gate: str
):
    said = json.loads((BASE / "config.json").read_text()) | {
        "model_type": model_type,
        "architectures": [architecture],
    }
    gated = parse_model_config(said | {"rope_parameters": None})
    name = f"model.layers.0.self_attn.{gate}"
    assert name in kept_modules(gated)
    assert name not in linear_modules(gated)
    assert name in ignored_modules(gated, [])[0]
    assert f"{name}.weight" in kept_in_16_bits(gated)
    assert not [kept for kept in kept_modules(config) if gate in kept]
