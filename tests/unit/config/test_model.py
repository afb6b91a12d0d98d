"""config.json -> ModelConfig: both spellings, transformers' defaults, and no key that is passed
over.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
from tests.refusals import refuses
from transformers import AutoConfig

from freight.errors import CheckpointError
from freight.fp8.formats import Format
from freight.model.config import registry
from freight.model.config.dtype import DtypeSource, checkpoint_dtype, names_dtype
from freight.model.config.model import ModelConfig
from freight.model.config.parse import parse_model_config, stop_token_ids
from freight.model.mixers.attention.spec import AttentionConfig
from freight.model.shapes import tensor_shapes
from freight.operands.activation import Activation, GatedActivation

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# tested on their own: what transformers does not know, and mixtures, latents and OPT in their files
LATENTS = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"),
    *("kimi_k2", "kimi_linear", "bailing_hybrid", "mistral4"),
)
ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert", "llama_bidirec")
APART = ("mimo", "mixtral", "qwen2_moe", "qwen3_moe", "opt", "nemotron_h", *ENCODERS, *LATENTS)
FAMILIES = {
    name: row.architecture
    for name, row in registry.FAMILIES.items()
    if row.text_type is None and name not in APART
}
TWO_ROPES = (
    "gemma3_text",
    "gemma4_text",
    "gemma4_unified_text",
    "laguna",
    "mellum",
    "mimo_v2_flash",
    "olmo3",
)
STATEFUL = ("conv", "linear_attention")  # kinds of layers without attention
NOT_ALWAYS = {
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2
    },  # by default no layer attends
}
ALL_WINDOWS = ("mistral", "phi3")  # families whose configuration has no layer_types


ACTIVATIONS = {
    "relu2": Activation.RELU_SQUARED,
    "silu": GatedActivation.SILU,
    "gelu_pytorch_tanh": GatedActivation.GELU_TANH,
}


def attention_of(model: ModelConfig) -> list[AttentionConfig]:
    return [layer.mixer for layer in model.layers if isinstance(layer.mixer, AttentionConfig)]


def windows_of(model: ModelConfig) -> tuple[int | None, ...]:
    return tuple(mixer.window for mixer in attention_of(model))


def num_parameters(model: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in tensor_shapes(model).values())


def config(model_type="llama", **more):
    return {
        "model_type": model_type,
        "architectures": [FAMILIES[model_type]],
        **SHAPE,
        **NOT_ALWAYS.get(model_type, {}),
        **more,
    }


def parsed(model_type="llama", **more):
    return parse_model_config(config(model_type, **more))


def refused(*named, **more):
    with pytest.raises(CheckpointError) as error:
        parsed(**more)
    for word in named:
        assert word in str(error.value)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_absent_keys_mean_what_transformers_takes(model_type):
    said = config(model_type)
    ours, theirs = parse_model_config(said), AutoConfig.for_model(**said)
    theirs.allow_global_per_layer_attribute_access = True
    mixer = attention_of(ours)[0]
    assert ours.architecture == FAMILIES[model_type]
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.norm_eps == (
        theirs.norm_eps if model_type.startswith("lfm2") else theirs.rms_norm_eps
    )
    if model_type in TWO_ROPES:
        ropes = [theirs.rope_parameters[kind] for kind in ("full_attention", "sliding_attention")]
    else:
        ropes = [theirs.rope_parameters]
    assert [(r.theta, r.kind) for r in ours.ropes] == [
        (r["rope_theta"], r["rope_type"]) for r in ropes
    ]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert mixer.k_dim == (getattr(theirs, "head_dim", None) or 64)
    scale = (
        1.0
        if model_type.startswith("gemma4")
        else getattr(theirs, "query_pre_attn_scalar", mixer.k_dim) ** -0.5
    )
    assert mixer.softmax_scale == getattr(theirs, "attention_multiplier", scale)
    factor = (ropes[0]["rope_type"] == "default" and ropes[0].get("partial_rotary_factor")) or 1.0
    assert ours.ropes[0].rotary_dim == int(factor * attention_of(ours)[-1].k_dim)
    assert mixer.qkv_bias == getattr(theirs, "attention_bias", model_type == "qwen2")
    assert mixer.soft_cap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.logit_soft_cap == getattr(theirs, "final_logit_softcapping", None)
    clamped = GatedActivation.CLAMPED_SWIGLU if model_type == "gpt_oss" else None
    assert ours.layers[0].feed_forward.activation == (clamped or ACTIVATIONS[acts(theirs)])
    assert ours.bos_token_id == theirs.bos_token_id
    stops = theirs.eos_token_id
    assert list(ours.eos_token_ids) == (
        [] if stops is None else stops if isinstance(stops, list) else [stops]
    )
    slides = (
        getattr(theirs, "layer_types", None)
        or ["sliding_attention" if model_type in ALL_WINDOWS else None] * 4
    )
    attends = [kind for kind in slides if kind not in STATEFUL]
    assert windows_of(ours) == tuple(
        theirs.sliding_window if kind == "sliding_attention" else None for kind in attends
    )


def acts(theirs):
    return getattr(theirs, "hidden_activation", None) or getattr(
        theirs, "hidden_act", "silu"
    )  # LFM2 names none


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_transformers_writes_is_read(model_type, tmp_path):
    more = {"rope_theta": 5e5, "dtype": "float16", "bos_token_id": 3, "eos_token_id": [4, 5]}
    if model_type in TWO_ROPES:  # has a theta for each kind of layer
        ropes = {
            kind: {"rope_type": "default", "rope_theta": 5e5}
            for kind in ("full_attention", "sliding_attention")
        }
        more["rope_parameters"] = ropes
        del more["rope_theta"]
    if (
        model_type == "ministral3"
    ):  # has a theta in its default rope, which one outside does not change
        more["rope_parameters"] = {
            "rope_type": "yarn",
            "rope_theta": more.pop("rope_theta"),
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "llama_4_scaling_beta": 0.1,
        }
    AutoConfig.for_model(**config(model_type, **more)).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    ours = parse_model_config({**written, "architectures": [FAMILIES[model_type]]})
    assert (ours.num_layers, attention_of(ours)[0].num_kv_heads, ours.ropes[0].theta) == (4, 2, 5e5)
    assert ours.checkpoint_format is Format.FLOAT16
    assert (ours.bos_token_id, ours.eos_token_ids) == (3, (4, 5))


def test_biases_and_norms_by_family():
    def facts(model_type, **more):
        c = parsed(model_type, **more)
        mixer = c.layers[0].mixer
        return (
            mixer.qkv_bias,
            mixer.o_bias,
            c.layers[0].feed_forward.bias,
            mixer.qk_norm is not None,
        )

    assert facts("llama") == (False, False, False, False)
    assert facts("llama", attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert facts("qwen2") == (True, False, False, False)
    assert facts("qwen2", attention_bias=True) == (True, False, False, False)
    assert facts("qwen3", attention_bias=True) == (True, True, False, True)
    refused("attention_bias", model_type="mistral", attention_bias=True)


def test_heads():
    assert parsed().layers[0].mixer.k_dim == 64
    assert parsed(head_dim=32).layers[0].mixer.k_dim == 32
    assert parsed("qwen3").layers[0].mixer.k_dim == 128
    assert parsed(num_key_value_heads=None).layers[0].mixer.num_kv_heads == 4
    absent = {key: value for key, value in config().items() if key != "num_key_value_heads"}
    assert parse_model_config(absent).layers[0].mixer.num_kv_heads == 4


def windows(model_type="qwen2", **more):
    return windows_of(parsed(model_type, **more))


def test_mistral_window_is_that_of_all_layers():
    assert windows("mistral", sliding_window=8) == (8,) * 4
    assert windows("mistral", sliding_window=None) == (None,) * 4
    assert windows("mistral", sliding_window=8, use_sliding_window=False) == (None,) * 4
    refused(
        "layer_types", model_type="mistral", layer_types=["sliding_attention", "full_attention"] * 2
    )


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwen_windows(model_type):
    assert windows(model_type, sliding_window=8, max_window_layers=2) == (None,) * 4
    assert (
        windows(model_type, sliding_window=8, max_window_layers=2, use_sliding_window=False)
        == (None,) * 4
    )
    assert windows(model_type, sliding_window=8, max_window_layers=2, use_sliding_window=True) == (
        None,
        None,
        8,
        8,
    )
    types = ["sliding_attention", "full_attention"] * 2
    assert windows(model_type, sliding_window=8, use_sliding_window=True, layer_types=types) == (
        8,
        None,
        8,
        None,
    )
    said = config(model_type, sliding_window=8, max_window_layers=1, use_sliding_window=True)
    kinds = AutoConfig.for_model(**said).layer_types
    assert windows_of(parse_model_config(said)) == tuple(
        8 if kind == "sliding_attention" else None for kind in kinds
    )


def test_window_contradictions():
    types = ["sliding_attention", "full_attention"] * 2
    refused(
        "layer_types", "use_sliding_window", model_type="qwen2", sliding_window=8, layer_types=types
    )
    refused("layer_types", "num_hidden_layers", model_type="qwen2", layer_types=types[:3])
    refused("chunked_attention", model_type="qwen2", layer_types=["chunked_attention"] * 4)
    refused("sliding_window", "0", model_type="mistral", sliding_window=0)
    refused("sliding_window", "4096", model_type="llama", sliding_window=4096)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu_new"),
        ("partial_rotary_factor", 0.5),
        ("logit_scale", 0.0625),
        ("residual_multiplier", 0.22),
        ("embedding_multiplier", 12.0),
        ("num_local_experts", 8),
        ("rope_interleaved", True),
        ("is_encoder_decoder", True),
        ("scale_emb", 7),
        ("alibi", True),
    ],
)
def test_a_key_that_changes_the_mathematics_is_named_with_its_value(key, value):
    refused(key, repr(value), **{key: value})


def test_soft_caps():
    plain = parsed(attn_logit_softcapping=None)
    assert (plain.layers[0].mixer.soft_cap, plain.logit_soft_cap) == (None, None)
    capped = parsed(attn_logit_softcapping=50, final_logit_softcapping=30.0)
    assert (capped.layers[0].mixer.soft_cap, capped.logit_soft_cap) == (50.0, 30.0)
    refused("attn_logit_softcapping", "0", "finite number > 0", attn_logit_softcapping=0)
    refused("final_logit_softcapping", "'30'", final_logit_softcapping="30")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", []),
        ("layer_types", [[]] * 4),
        ("rope_scaling", {"rope_type": []}),
        ("rope_scaling", {"rope_type": "linear", "factor": 10**400}),
        ("rms_norm_eps", 10**400),
        ("num_hidden_layers", 10**30),
        ("vocab_size", 10**30),
        ("hidden_size", 10**400),
        ("head_dim", 2**31),
        ("max_position_embeddings", 10**30),
        ("partial_rotary_factor", [[]]),
    ],
)
def test_values_of_no_use_are_named(key, value):
    refused(
        key if key != "rope_scaling" else "factor" if "factor" in value else "rope_type",
        **{key: value},
    )


def test_keys_that_change_nothing():
    neutral = {
        "hidden_act": "silu",
        "partial_rotary_factor": 1.0,
        "pretraining_tp": 1,
        "logit_scale": 1.0,
        "attn_logit_softcapping": None,
        "something_new": None,
        "something_else": False,
        "pruned_heads": {},
        "_name_or_path": "x",
        "_anything": 3,
        "transformers_version": "4.40",
        "temperature": 0.7,
    }
    assert parsed(**neutral) == parsed()


def test_contradictions_and_gaps():
    refused("num_attention_heads", "num_key_value_heads", "3", num_key_value_heads=3)
    refused("hidden_size", "250", hidden_size=250)
    refused("head_dim", "7", head_dim=7)
    refused("hidden_size", hidden_size=None)
    refused("num_hidden_layers", "0", num_hidden_layers=0)
    refused("vocab_size", "True", vocab_size=True)
    refused("rms_norm_eps", "-1", rms_norm_eps=-1)
    refused("dtype", "float8_e4m3fn", dtype="float8_e4m3fn")
    refused("torch_dtype", "float16", dtype="bfloat16", torch_dtype="float16")
    refused("eos_token_id", "x", eos_token_id="x")
    refused("tie_word_embeddings", tie_word_embeddings="yes")


def test_other_models_are_named():
    with refuses(CheckpointError, "gpt2", "llama, llama_bidirec, mistral", "qwen3"):
        parse_model_config({"model_type": "gpt2", **SHAPE})
    with pytest.raises(CheckpointError, match="None"):
        parse_model_config(SHAPE)
    refused("LlamaForTokenClassification", architectures=["LlamaForTokenClassification"])
    assert (
        parse_model_config({**config(), "architectures": None}).architecture == "LlamaForCausalLM"
    )


def test_dtype_under_both_names():
    assert parsed(torch_dtype="bfloat16").checkpoint_format is Format.BFLOAT16
    assert parsed(dtype="float16").checkpoint_format is Format.FLOAT16
    assert parsed(torch_dtype="torch.float16", dtype="float16").checkpoint_format is Format.FLOAT16


@pytest.mark.parametrize(
    ("outside", "inside", "stored", "found"),
    [
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, "float16", ("float32", "config.json")),
        ({}, {"dtype": "float16"}, "float32", ("float16", "text_config")),
        ({"dtype": None}, {"torch_dtype": None}, "float16", ("float16", "tensors")),
        ({}, {}, None, ("bfloat16", "assumed")),
    ],
)
def test_where_the_dtype_is_from(
    outside: dict[str, Any], inside: dict[str, Any], stored: str | None, found: tuple[str, str]
):
    text = {**config("gemma3_text"), **inside}
    stored_format = None if stored is None else Format(stored)
    model = parse_model_config(
        {"model_type": "gemma3", **outside, "text_config": text}, stored=stored_format
    )
    assert (model.checkpoint_format, model.dtype_source) == found
    assert checkpoint_dtype({"llm_config": text, **outside}, stored_format) == found
    assert names_dtype({"text_config": text, **outside}) == (
        found[1] in ("config.json", "text_config")
    )


def test_every_place_of_a_text_model_is_asked_for_its_dtype():
    for key in {family.text_key for family in registry.FAMILIES.values()}:
        assert checkpoint_dtype({key: {"dtype": "float16"}})[1] is DtypeSource.TEXT_CONFIG


def test_stop_ids_are_the_union():
    assert stop_token_ids(config(eos_token_id=2), None) == {2}
    assert stop_token_ids(config(eos_token_id=[2, 7]), {"eos_token_id": [7, 9]}) == {2, 7, 9}
    assert stop_token_ids(config(eos_token_id=None), {"eos_token_id": 5}) == {5}
    assert stop_token_ids(config("qwen2"), {}) == frozenset()


@pytest.mark.parametrize(
    ("generation", "ids"),
    [(None, {2}), ({}, {2}), ({"eos_token_id": 5}, {5}), ({"eos_token_id": None}, set())],
)
def test_the_stop_id_of_the_class_joins_no_other(
    generation: dict[str, object] | None, ids: set[int]
):
    said = {key: value for key, value in config("llama").items() if key != "eos_token_id"}
    assert stop_token_ids(said, generation) == ids


def test_no_torch():
    code = "import sys, freight.model.config.parse, freight.settings.resolve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
