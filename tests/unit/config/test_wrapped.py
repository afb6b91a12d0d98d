"""Keys of models of text and pictures, of which the text model runs."""

from __future__ import annotations

from typing import Any

import pytest
from tests.refusals import refuses
from transformers import AutoConfig

from freight.errors import CheckpointError
from freight.model.architectures import ARCHITECTURES, skipped_parts
from freight.model.config.layer import MoEConfig
from freight.model.config.model import ModelConfig
from freight.model.config.parse import parse_model_config
from freight.model.config.registry import FAMILIES

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
}
OWN = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "glm4v",
    "glm4v_moe",
)  # text models that are published in no other way


def parse(model_type: str, text: dict[str, Any] | None = None, **outside: Any) -> ModelConfig:
    inner = {"model_type": FAMILIES[model_type].text_type, **SHAPE, **(text or {})}
    return parse_model_config(
        {"model_type": model_type, "vision_config": {"a": 1}, "text_config": inner, **outside}
    )


@pytest.mark.parametrize("model_type", OWN)
def test_absent_keys_mean_what_transformers_takes(model_type: str) -> None:
    ours = parse(model_type)
    whole = AutoConfig.for_model(model_type, text_config=dict(SHAPE))
    theirs = whole.text_config
    mixer, rope = ours.layers[0].mixer, ours.ropes[0]
    assert ours.vocab_size == theirs.vocab_size
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert (ours.norm_eps, mixer.num_kv_heads) == (theirs.rms_norm_eps, theirs.num_key_value_heads)
    share = theirs.rope_parameters.get("partial_rotary_factor", 1.0)
    assert rope.theta == theirs.rope_parameters["rope_theta"]
    assert rope.rotary_dim == share * mixer.k_dim
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
    for kind in (
        {"type": "mrope"},
        {"rope_type": "default", "type": "mrope"},
        {"rope_type": "default"},
    ):
        rope = {**kind, "mrope_section": [8, 12, 12], "mrope_interleaved": True}
        assert parse(model_type, {"rope_theta": 5000.0, "rope_scaling": rope}) == plain
    for bad in ([8, "a"], 3):
        with pytest.raises(CheckpointError, match="mrope_section"):
            parse(model_type, {"rope_scaling": {"type": "mrope", "mrope_section": bad}})
    with pytest.raises(CheckpointError, match="mrope"):  # of a text model by itself
        parse_model_config(
            {"model_type": "qwen2", **SHAPE, "vocab_size": 64, "rope_scaling": {"type": "mrope"}}
        )


def test_keys_that_compute_are_refused_inside_and_outside() -> None:
    assert (
        parse("glm4v_moe", {"image_token_id": 5})
        == parse("glm4v_moe", image_token_id=5)
        == parse("glm4v_moe")
    )
    assert parse("qwen3_vl_moe", {"norm_topk_prob": True}) == parse("qwen3_vl_moe")
    for model_type in FAMILIES.keys() & {*OWN, "internvl", "interns1", "glmga"}:
        for inside, outside in (({"scale_emb": 7}, {}), ({}, {"scale_emb": 7})):
            with pytest.raises(CheckpointError, match="scale_emb = 7 decides"):
                parse(model_type, inside, **outside)
    with pytest.raises(CheckpointError, match="use_qk_norm"):
        parse("glm4v_moe", {"use_qk_norm": True})
    with refuses(CheckpointError, "text_config = None", "'glm4v_text'"):
        parse_model_config({"model_type": "glmga", **SHAPE})


def test_what_holds_for_the_model_outside_decides_over_text_config() -> None:
    """A null outside decides nothing."""
    inside = {"tie_word_embeddings": True, "dtype": "float16", "eos_token_id": 7}
    ours = parse("qwen3_vl", inside, tie_word_embeddings=False, dtype="bfloat16", eos_token_id=8)
    assert (ours.tie_word_embeddings, ours.checkpoint_format) == (False, "bfloat16")
    assert ours.eos_token_ids == (8,)
    ours = parse("qwen3_vl", inside, tie_word_embeddings=None, dtype=None, eos_token_id=None)
    assert (ours.tie_word_embeddings, ours.checkpoint_format) == (True, "float16")
    assert ours.eos_token_ids == (7,)


def test_what_is_skipped_is_counted_by_reason() -> None:
    names = ["model.visual.a.weight", "model.visual.b.weight", "model.language_model.norm.weight"]
    assert skipped_parts(parse("qwen3_vl"), names) == {
        "of the vision model: Freight runs the text model alone": 2
    }
    assert (
        skipped_parts(parse_model_config({"model_type": "qwen3", **SHAPE, "vocab_size": 64}), names)
        == {}
    )


def test_absent_keys_of_muse_glimmer_mean_what_transformers_takes() -> None:
    ours = parse("muse_glimmer", {"num_hidden_layers": 6})
    whole = AutoConfig.for_model("muse_glimmer", text_config={**SHAPE, "num_hidden_layers": 6})
    theirs, mixers = whole.text_config, [layer.mixer for layer in ours.layers]
    assert ours.vocab_size == theirs.vocab_size
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert (ours.norm_eps, ours.post_norm_eps) == (theirs.rms_norm_eps, theirs.post_norm_eps)
    assert mixers[0].k_dim == theirs.head_dim
    assert mixers[0].num_kv_heads == theirs.num_key_value_heads
    assert mixers[0].softmax_scale == pytest.approx(theirs.qk_scale_factor * theirs.head_dim**-0.5)
    slides = [
        theirs.sliding_window if kind == "sliding_attention" else None
        for kind in theirs.layer_types
    ]
    assert [mixer.window for mixer in mixers] == slides == [2048, None, 2048, 2048, 2048, None]
    assert [mixer.rope is not None for mixer in mixers] == [
        theta != 0 for theta in theirs.layer_rope_theta
    ]
    assert ours.ropes[0].theta == theirs.rope_parameters["rope_theta"]
    assert ours.logit_soft_cap == theirs.final_logit_softcapping
    assert ours.logit_divisor == 1 / theirs.output_multiplier
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert (ours.bos_token_id, ours.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))


def test_a_rope_of_its_own_in_a_layer_of_muse_glimmer_is_refused() -> None:
    """Its code reads of `layer_rope_theta` only which are 0."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    thetas = [5e5, 0, 5e5, 0]
    found = [
        layer.mixer.rope
        for layer in parse("muse_glimmer", {**rope, "layer_rope_theta": thetas}).layers
    ]
    assert found == [0, None, 0, None]
    for wrong in ([5e5, 0, 1e4, 0], [5e5, 0], 5e5):
        with refuses(CheckpointError, "layer_rope_theta", "rope_theta = 500000"):
            parse("muse_glimmer", {**rope, "layer_rope_theta": wrong})


def test_experts_of_ernie_for_text_and_for_pictures() -> None:
    ours = parse("ernie4_5_vl_moe", {"num_hidden_layers": 3})
    whole = AutoConfig.for_model("ernie4_5_vl_moe", text_config={**SHAPE, "num_hidden_layers": 3})
    theirs = whole.text_config
    kinds = [
        "sparse" if isinstance(layer.feed_forward, MoEConfig) else "dense" for layer in ours.layers
    ]
    assert kinds == theirs.mlp_layer_types
    moe = ours.layers[-1].feed_forward
    assert isinstance(moe, MoEConfig)
    assert moe.shared is not None
    assert (moe.num_experts, moe.routing.top_k) == (theirs.moe_num_experts, theirs.moe_k)
    assert moe.intermediate_size == theirs.moe_intermediate_size[0]
    assert moe.shared.intermediate_size == theirs.moe_num_shared_experts * moe.intermediate_size
    assert ours.ropes[0].theta == theirs.rope_parameters["rope_theta"]
    assert ours.ropes[0].interleaved is True
    assert ours.vocab_size == theirs.vocab_size
    assert ours.tie_word_embeddings == whole.tie_word_embeddings
    sections = {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e5,
            "mrope_section": [22, 22, 20],
        }
    }
    assert parse("ernie4_5_vl_moe", {"num_hidden_layers": 3, **sections}) == ours
    with refuses(CheckpointError, "moe_intermediate_size = 1536", "list of two"):
        parse("ernie4_5_vl_moe", {"moe_intermediate_size": 1536})
