"""Keys of models of text and pictures, of which the text model runs."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from freight.config.families import FAMILIES
from freight.config.layer import MoEConfig
from freight.config.model import ModelConfig, parse_model_config
from freight.errors import CheckpointError
from freight.models.architectures import ARCHITECTURES, skipped_parts

SHAPE = {"hidden_size": 2048, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 32}
OWN = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe")  # text models that are published in no other way


def parse(model_type: str, text: dict[str, Any] | None = None, **outside: Any) -> ModelConfig:
    inner = {"model_type": FAMILIES[model_type].text_type, **SHAPE, **(text or {})}
    return parse_model_config({"model_type": model_type, "vision_config": {"a": 1}, "text_config": inner, **outside})


@pytest.mark.parametrize("model_type", OWN)
def test_absent_keys_mean_what_transformers_takes(model_type: str) -> None:
    ours = parse(model_type)
    whole = AutoConfig.for_model(model_type, text_config=dict(SHAPE))
    theirs = whole.text_config
    mixer, rope = ours.layers[0].mixer, ours.ropes[0]
    assert (ours.vocab_size, ours.max_position_embeddings) == (theirs.vocab_size, theirs.max_position_embeddings)
    assert (ours.norm_eps, mixer.num_kv_heads) == (theirs.rms_norm_eps, theirs.num_key_value_heads)
    share = theirs.rope_parameters.get("partial_rotary_factor", 1.0)
    assert (rope.theta, rope.rotary_dim) == (theirs.rope_parameters["rope_theta"], share * mixer.k_dim)
    assert mixer.k_dim == (getattr(theirs, "head_dim", None) or 64)
    assert mixer.qkv_bias == getattr(theirs, "attention_bias", True)
    stop = getattr(theirs, "eos_token_id", None)
    assert ours.tie_word_embeddings == whole.tie_word_embeddings
    assert ours.eos_token_ids == (() if stop is None else (stop,))
    moe = ours.layers[-1].feed_forward
    if isinstance(moe, MoEConfig):
        count = theirs.n_routed_experts if model_type == "glm4v_moe" else theirs.num_experts
        assert (moe.num_experts, moe.routing.top_k) == (count, theirs.num_experts_per_tok)
        assert (moe.intermediate_size, moe.routing.normed) == (theirs.moe_intermediate_size, True)
    assert FAMILIES[model_type].architecture in ARCHITECTURES


@pytest.mark.parametrize("model_type", OWN)
def test_sections_of_a_rope_change_nothing_of_text(model_type: str) -> None:
    plain = parse(model_type, {"rope_theta": 5000.0})
    for kind in ({"type": "mrope"}, {"rope_type": "default", "type": "mrope"}, {"rope_type": "default"}):
        rope = {**kind, "mrope_section": [8, 12, 12], "mrope_interleaved": True}
        assert parse(model_type, {"rope_theta": 5000.0, "rope_scaling": rope}) == plain
    for bad in ([8, "a"], 3):
        with pytest.raises(CheckpointError, match="mrope_section"):
            parse(model_type, {"rope_scaling": {"type": "mrope", "mrope_section": bad}})
    with pytest.raises(CheckpointError, match="mrope"):  # of a text model by itself
        parse_model_config({"model_type": "qwen2", **SHAPE, "vocab_size": 64, "rope_scaling": {"type": "mrope"}})


def test_keys_that_are_not_known_are_refused_inside_and_outside() -> None:
    assert parse("glm4v_moe", {"image_token_id": 5}) == parse("glm4v_moe", image_token_id=5) == parse("glm4v_moe")
    assert parse("qwen3_vl_moe", {"norm_topk_prob": True}) == parse("qwen3_vl_moe")
    for model_type in FAMILIES.keys() & {*OWN, "internvl", "interns1", "glmga"}:
        for inside, outside in (({"new_kind": 7}, {}), ({}, {"new_kind": 7})):
            with pytest.raises(CheckpointError, match="new_kind = 7 is unknown"):
                parse(model_type, inside, **outside)
    with pytest.raises(CheckpointError, match="use_qk_norm"):
        parse("glm4v_moe", {"use_qk_norm": True})
    with pytest.raises(CheckpointError, match=r"text_config = None .*'glm4v_text' is"):
        parse_model_config({"model_type": "glmga", **SHAPE})


def test_what_is_skipped_is_counted_by_reason() -> None:
    names = ["model.visual.a.weight", "model.visual.b.weight", "model.language_model.norm.weight"]
    assert skipped_parts(parse("qwen3_vl"), names) == {"of the vision model: Freight runs the text model alone": 2}
    assert skipped_parts(parse_model_config({"model_type": "qwen3", **SHAPE, "vocab_size": 64}), names) == {}
