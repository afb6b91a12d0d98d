"""config.json -> RopeConfig: kinds, both spellings, contradictions."""

from __future__ import annotations

import math

import pytest
import torch
from tests.unit.config.test_model import config, parsed, refused
from transformers import Ministral3Config
from transformers.models.ministral3 import modeling_ministral3

from freight.model.config.parse import parse_model_config
from freight.model.layers.rope import build_rope, cos_and_sin

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"type": "linear", "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "attention_factor": 1.2,
    "beta_fast": 16,
    "beta_slow": 2,
    "mscale": 0.7,
    "mscale_all_dim": 0.5,
    "truncate": False,
}


@pytest.mark.parametrize(
    "scaling", [LINEAR, {"rope_type": "llama3", **LLAMA3}, YARN], ids=["linear", "llama3", "yarn"]
)
def test_both_rope_spellings_mean_the_same(scaling):
    old = parsed(rope_theta=1e6, rope_scaling=scaling).ropes[0]
    new = parsed(rope_parameters={**scaling, "rope_theta": 1e6}).ropes[0]
    both = parsed(
        rope_theta=1e6, rope_scaling=scaling, rope_parameters={**scaling, "rope_theta": 1e6}
    )
    assert old == new == both.ropes[0]
    assert old.theta == 1e6
    assert old.kind == scaling.get("rope_type", scaling.get("type"))
    assert dict(old.parameters) == {
        k: v for k, v in scaling.items() if k not in ("type", "rope_type")
    }


def test_rope_without_scaling():
    default = parsed(rope_parameters={"rope_type": "default", "rope_theta": 500.0}).ropes[0]
    assert (default.theta, default.kind, dict(default.parameters)) == (500.0, "default", {})
    assert parsed(rope_scaling=None).ropes[0].kind == "default"


def test_the_original_length_defaults_to_the_present_one():
    yarn = parsed(rope_scaling={"type": "yarn", "factor": 4.0}, max_position_embeddings=4096)
    assert yarn.ropes[0].parameters["original_max_position_embeddings"] == 4096
    assert yarn.position_limit == 16384
    outside = config(
        rope_scaling={"type": "yarn", "factor": None}, original_max_position_embeddings=512
    )
    rope = parse_model_config({**outside, "max_position_embeddings": 2048}).ropes[0]
    assert rope.parameters == {"factor": 4.0, "original_max_position_embeddings": 512}


def test_position_limit():
    assert parsed(max_position_embeddings=100).position_limit == 100
    assert parsed(max_position_embeddings=100, rope_scaling=LINEAR).position_limit == 400
    llama3 = {"rope_type": "llama3", **LLAMA3}
    assert parsed(max_position_embeddings=131072, rope_scaling=llama3).position_limit == 131072


@pytest.mark.parametrize("kind", ["dynamic", "mrope", "proportional"])
def test_other_rope_kinds_are_named(kind):
    refused(kind, "rope_scaling", rope_scaling={"type": kind, "factor": 2.0})
    refused(kind, "rope_parameters", rope_parameters={"rope_type": kind, "rope_theta": 1e4})


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"type": "linear"}, "factor"),
        ({"type": "linear", "factor": 0}, "factor"),
        ({"type": "linear", "factor": "4"}, "'4'"),
        ({"rope_type": "llama3", **LLAMA3, "low_freq_factor": None}, "low_freq_factor"),
        ({"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}, "high_freq_factor"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate"),
        ({"rope_type": "yarn", "factor": 2.0, "mrope_section": [1, 2]}, "mrope_section"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "yarn", "type": "linear", "factor": 2.0}, "linear"),
    ],
)
def test_bad_rope_is_named(scaling, named):
    refused(named, rope_scaling=scaling)


def test_rope_contradictions():
    refused(
        "rope_theta",
        "500",
        "10000",
        rope_theta=1e4,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    refused("contradicts", rope_scaling=LINEAR, rope_parameters={"rope_type": "default"})


def test_a_length_beside_the_ropes_of_laguna_repeats_that_of_each():
    """As Laguna-XS.2 has it; transformers reads the one inside. One that differs, or stands alone,
    is ambiguous.
    """
    yarn = {
        "rope_type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "rope_theta": 5e5,
    }
    ropes = {
        "full_attention": yarn,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    both = {**ropes, "original_max_position_embeddings": 4096}
    assert parsed("laguna", rope_parameters=both) == parsed("laguna", rope_parameters=ropes)
    refused("contradicts", "8192", "4096", model_type="laguna",
            rope_parameters={**ropes, "original_max_position_embeddings": 8192})  # fmt: skip
    alone = {
        **both,
        "full_attention": {
            key: value for key, value in yarn.items() if not key.startswith("original")
        },
    }
    refused(
        "contradicts", "4096", "full_attention None", model_type="laguna", rope_parameters=alone
    )
    refused("rope_parameters", model_type="laguna", rope_parameters={**ropes, "factor": 2.0})


SCALED = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "llama_4_scaling_beta": 0.1,
}


def test_queries_of_ministral_3_are_scaled_by_their_position():
    """`type` beside `rope_type`, and the length inside, as Mistral writes them; without any, the
    class's own.
    """
    whole = {**SCALED, "type": "yarn", "max_position_embeddings": 4096, "rope_theta": 1e6}
    for said in ({"rope_parameters": whole}, {"rope_scaling": SCALED, "rope_theta": 1e6}):
        rope = parsed("ministral3", **said).ropes[0]
        assert rope.parameters == {
            key: value for key, value in SCALED.items() if key != "rope_type"
        }
        assert (rope.kind, rope.theta) == ("yarn", 1e6)
    default = parsed("ministral3").ropes[0]
    theirs = Ministral3Config().rope_parameters
    assert dict(default.parameters) | {"rope_theta": default.theta, "rope_type": default.kind} == {
        key: value
        for key, value in theirs.items()
        if key not in ("max_position_embeddings", "type")
    }


@pytest.mark.parametrize(
    "rope", [{**SCALED, "llama_4_scaling_beta": None}, {"rope_type": "default"}]
)
def test_a_rope_of_ministral_3_says_how_queries_are_scaled(rope):
    refused("llama_4_scaling_beta", "yarn", model_type="ministral3", rope_parameters=rope)


def test_queries_of_other_families_are_not_scaled():
    refused("llama_4_scaling_beta", "0.1", model_type="mistral", rope_parameters=SCALED)
    refused(
        "llama_4_scaling_beta",
        "-1",
        model_type="ministral3",
        rope_parameters=SCALED | {"llama_4_scaling_beta": -1},
    )


def test_the_factor_of_queries_is_that_of_transformers():
    """The table's bits, in spans of the original length; a beta of 0 needs no table."""
    table = build_rope(parsed("ministral3", rope_parameters=SCALED).ropes[0], 5000, "cpu").q_factor
    theirs = modeling_ministral3.get_llama_4_attn_scale(torch.arange(5000)[None], 0.1, 1024)
    assert table is not None
    assert torch.equal(table, theirs[0, 0, :, 0])
    assert (table[:1024] == 1).all()
    assert table[1024] == pytest.approx(1.0693, abs=1e-4)
    for said in (
        config("ministral3", rope_parameters=SCALED | {"llama_4_scaling_beta": 0}),
        config(),
    ):
        assert build_rope(parse_model_config(said).ropes[0], 10, "cpu").q_factor is None


def test_cosines_and_sines_are_the_nearest_float32():
    """torch's float32 functions are not, and gave other bits in some processes."""
    angles = torch.outer(torch.arange(0.0, 100_000, 997), 10_000 ** -torch.linspace(0, 1, 32))
    for table, function in zip(cos_and_sin(angles), (math.cos, math.sin), strict=True):
        exact = [[function(one) for one in row] for row in angles.tolist()]
        assert torch.equal(table, torch.tensor(exact, dtype=torch.float64).float())
