"""What single families have in their config.json beside the keys of all: windows, ropes, wrappers,
activations.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.refusals import refuses
from tests.unit.config.test_model import SHAPE, parsed, refused, windows, windows_of
from transformers import OPTConfig

from freight.errors import CheckpointError
from freight.model.config.layer import DenseConfig, NormKind, NormPlacement
from freight.model.config.parse import parse_model_config, stop_token_ids
from freight.operands.activation import Activation, GatedActivation
from freight.operands.routing import Routing, Scoring


def test_every_second_layer_of_gemma_2_has_a_window_unless_layer_types_says_otherwise():
    assert windows("gemma2", sliding_window=8) == (8, None, 8, None)
    types = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
    assert windows("gemma2", sliding_window=8, layer_types=types) == (None, None, 8, None)
    assert windows("gemma2", sliding_window=None) == (None,) * 4


def test_what_gemma_2_adds():
    model = parsed("gemma2", query_pre_attn_scalar=144)
    assert (model.norm_offset, model.embedding_multiplier) == (1.0, 16.0)
    assert model.layers[0].norms is NormPlacement.SANDWICH
    assert model.layers[0].mixer.softmax_scale == pytest.approx(1 / 12)
    plain = parsed("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (plain.layers[0].mixer.soft_cap, plain.logit_soft_cap) == (None, None)
    refused("query_pre_attn_scalar", "144", query_pre_attn_scalar=144)  # of a Llama


def test_layers_of_gemma_3_with_a_window_have_their_own_rope():
    model = parsed("gemma3_text", num_hidden_layers=7, sliding_window=8)
    assert windows_of(model) == (8,) * 5 + (None, 8)
    assert [layer.mixer.rope for layer in model.layers] == [1, 1, 1, 1, 1, 0, 1]
    assert windows("gemma3_text", sliding_window=8, sliding_window_pattern=3) == (8, 8, None, 8)
    for kinds in ({"rope_type": "default"}, {"full_attention": {}, "chunked_attention": {}}):
        refused(
            "rope_parameters", "sliding_attention", model_type="gemma3_text", rope_parameters=kinds
        )
    refused("sliding_window_pattern", "2", model_type="gemma2", sliding_window_pattern=2)


def test_layers_of_gemma_4_without_a_window_have_their_own_heads():
    model = parsed("gemma4_text", num_hidden_layers=7, attention_k_eq_v=True)
    assert (
        windows_of(model) == (512,) * 5 + (None,) * 2
    )  # the last has no window, whatever the pattern
    shapes = [
        (m.k_dim, m.v_dim, m.num_kv_heads, m.k_eq_v)
        for m in (layer.mixer for layer in model.layers)
    ]
    assert shapes == [(256, 256, 2, False)] * 5 + [(512, 512, 2, True)] * 2
    assert model.layers[6].mixer.projected_sizes == (2048, 1024)
    expected = [("proportional", 512), ("default", 256)]
    assert [(rope.kind, rope.rotary_dim) for rope in model.ropes] == expected
    for index in ("3", "03"):  # transformers writes the second, in models of more than ten layers
        own = parsed("gemma4_text", per_layer_config={index: {"head_dim": 64}})
        assert [layer.mixer.k_dim for layer in own.layers] == [256, 256, 256, 64]
    more = {"global_head_dim": 64, "num_global_key_value_heads": 1}
    for said, kv_heads in (({"attention_k_eq_v": True}, 1), ({}, 2)):
        last = parsed("gemma4_text", **more, **said).layers[-1].mixer
        assert (last.k_dim, last.num_kv_heads) == (64, kv_heads)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"per_layer_config": {"0": {"intermediate_size": 7}}}, "intermediate_size"),
        ({"per_layer_config": {"9": {"head_dim": 64}}}, "per_layer_config"),
        ({"per_layer_config": {"0": {"head_dim": 64}}}, "heads of 64 or 256 values"),
        ({"per_layer_config": {"3": {"head_dim": 63}}}, "head_dim = 63 is odd"),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "num_key_value_heads of layer 3 = 3",
        ),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"enable_moe_block": True, "moe_intermediate_size": 8, "num_experts": 4}, "top_k_experts"),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2.0}
                }
            },
            "most 1",
        ),
    ],
)
def test_what_gemma_4_must_not_have_is_named(said, named):
    with pytest.raises(CheckpointError, match=named):
        parsed("gemma4_text", **said)


def test_the_last_layers_of_gemma_4_read_the_keys_and_values_of_others():
    kinds = ["sliding_attention", "full_attention"] * 3
    said = {
        "num_hidden_layers": 6,
        "layer_types": kinds,
        "num_kv_shared_layers": 3,
        "attention_k_eq_v": True,
    }
    model = parsed("gemma4_text", **said, use_double_wide_mlp=True)
    mixers = [layer.mixer for layer in model.layers]
    assert [mixer.kv_from for mixer in mixers] == [None, None, None, 1, 2, 1]
    assert [len(mixer.projected_sizes) for mixer in mixers] == [3, 2, 3, 1, 1, 1]
    assert [layer.feed_forward.intermediate_size for layer in model.layers] == [384] * 3 + [768] * 3
    for count in (5, 6, 7):
        with pytest.raises(CheckpointError, match=f"num_kv_shared_layers = {count}"):
            parsed("gemma4_text", **said | {"num_kv_shared_layers": count})


def test_what_tokens_have_for_each_layer_of_gemma_4():
    for said, size in (
        ({"hidden_size_per_layer_input": 8}, 8),
        ({"hidden_size_per_layer_input": None}, 256),
    ):
        model = parsed("gemma4_text", **said)
        assert [layer.per_layer.size for layer in model.layers] == [size] * 4
        assert (model.per_layer_vocab_size, model.per_layer_size) == (262144, 4 * size)
    assert parsed("gemma4_text").per_layer_vocab_size is None
    with refuses(CheckpointError, "vocab_size_per_layer_input = 7", "vocab_size"):
        parsed("gemma4_text", hidden_size_per_layer_input=8, vocab_size_per_layer_input=7)


def test_experts_of_gemma_4_are_beside_a_feed_forward():
    said = {
        "enable_moe_block": True,
        "moe_intermediate_size": 8,
        "num_experts": 4,
        "top_k_experts": 2,
    }
    for wide, width in ((False, 384), (True, 768)):
        more = {
            "num_kv_shared_layers": 1,
            "layer_types": ["full_attention"] * 4,
            "use_double_wide_mlp": wide,
        }
        experts = parsed("gemma4_text", **said, **more).layers[-1].feed_forward
        assert (experts.intermediate_size, experts.shared.intermediate_size) == (8, width)
        assert experts.parallel_experts is True
        assert (experts.routing.num_experts, experts.routing.top_k) == (4, 2)
        assert experts.routing.normed is True
    off = parsed("gemma4_text", **said | {"enable_moe_block": False})
    assert off.layers[0].feed_forward == DenseConfig(384, GatedActivation.GELU_TANH)


def test_a_proportional_rope_is_gemma_4s():
    refused("proportional", rope_parameters={"rope_type": "proportional", "rope_theta": 1e4})


def wrapped(text=None, **more):
    text = {**SHAPE, "model_type": "gemma3_text"} if text is None else text
    outside = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "vision_config": {"a": 1},
    }
    return {**outside, "text_config": text, **more}


def test_a_decoder_that_is_one_part_of_a_model():
    text = {**SHAPE, "model_type": "gemma3_text", "eos_token_id": 1, "sliding_window": 8}
    said = wrapped(text, eos_token_id=[1, 106], torch_dtype="bfloat16")
    model = parse_model_config(said, ["language_model.model.embed_tokens.weight"])
    assert replace(
        model, prefixes=("model.", ""), model_type="gemma3_text", architecture="Gemma3ForCausalLM"
    ) == (parse_model_config({**text, "torch_dtype": "bfloat16", "eos_token_id": [1, 106]}))
    assert model.prefixes == ("language_model.model.", "language_model.")
    expected = ("model.language_model.", "")
    assert parse_model_config(said, ["model.language_model.norm.weight"]).prefixes == expected
    assert stop_token_ids(said, None) == {1, 106}


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (wrapped(scale_emb=7), "scale_emb"),
        (wrapped({**SHAPE, "scale_emb": 7}), "scale_emb"),
        (wrapped({**SHAPE, "model_type": "qwen3"}), "qwen3"),
        (wrapped(text_config=None), "text_config"),
        (wrapped(hidden_size=128), "hidden_size"),
    ],
)
def test_what_a_wrapper_must_not_have_is_named(said, named):
    with pytest.raises(CheckpointError, match=named):
        parse_model_config(said)


MISTRAL_3 = {  # as Ministral-3-8B has it
    "architectures": ["Mistral3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "transformers_version": "5.0.0.dev0",
    "vision_config": {"model_type": "pixtral"},
    "vision_feature_layer": -1,
}


@pytest.mark.parametrize("text_type", ["mistral", "ministral3"])
def test_the_text_model_in_mistral_3_is_of_either_kind(text_type):
    text = {**SHAPE, "model_type": text_type, "sliding_window": None}
    model = parse_model_config({**MISTRAL_3, "text_config": text})
    alone = parse_model_config({**text, "dtype": "bfloat16"})
    assert model == replace(
        alone, model_type="mistral3", architecture="Mistral3ForConditionalGeneration",
        prefixes=("model.language_model.", ""),
    )  # fmt: skip
    assert (alone.layers[0].mixer.k_dim, alone.ropes[0].kind) == {
        "mistral": (64, "default"), "ministral3": (128, "yarn")
    }[text_type]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ({"model_type": "mistral5"}, "'mistral5'.*'mistral', 'ministral3' or 'mistral4' is"),
        ({"model_type": "ministral3", "scale_emb": 7}, "scale_emb = 7 decides .* ministral3"),
        (
            {
                "model_type": "mistral",
                "rope_parameters": {"rope_type": "yarn", "llama_4_scaling_beta": 1},
            },
            "llama_4_sc",
        ),
    ],
)
def test_what_the_text_model_in_mistral_3_must_not_have_is_named(text, named):
    with pytest.raises(CheckpointError, match=named):
        parse_model_config({**MISTRAL_3, "text_config": {**SHAPE, **text}})


@pytest.mark.parametrize(
    ("names", "tied"), [(["language_model.lm_head.weight"], False), ([], True)]
)
def test_a_head_that_is_stored_beside_a_vision_model_is_used(names, tied):
    """Where the key outside is absent, transformers ties unless a head is stored, whatever
    text_config says.
    """
    said = {
        **MISTRAL_3,
        "text_config": {**SHAPE, "model_type": "mistral", "tie_word_embeddings": not tied},
    }
    tensors = ["language_model.model.norm.weight", *names]
    assert parse_model_config(said, tensors).tie_word_embeddings == tied
    assert parse_model_config({**said, "tie_word_embeddings": True}, tensors).tie_word_embeddings


def test_partial_rotation_of_phi_3():
    def rotary_dim(**more):
        return parsed("phi3", **more).ropes[0].rotary_dim

    assert rotary_dim() == rotary_dim(partial_rotary_factor=1.0) == 64
    inside = {"rope_type": "default", "partial_rotary_factor": 0.75}
    assert rotary_dim(partial_rotary_factor=0.75) == rotary_dim(rope_parameters=inside) == 48
    refused("0.75 and 0.5", model_type="phi3", partial_rotary_factor=0.5, rope_parameters=inside)
    refused("1.5", model_type="phi3", partial_rotary_factor=1.5)
    refused("0.3", "19", model_type="phi3", partial_rotary_factor=0.3)


def test_longrope():
    scaling = {"type": "su", "short_factor": [1] * 32, "long_factor": [2.0] * 32}
    more = {"max_position_embeddings": 16384, "original_max_position_embeddings": 4096}
    rope = parsed("phi3", rope_scaling=scaling, **more).ropes[0]
    assert (rope.kind, rope.short_factors) == ("longrope", (1.0,) * 32)
    assert rope.long_factors == (2.0,) * 32
    assert rope.parameters == {"factor": 4.0, "original_max_position_embeddings": 4096}
    for bad in ([1.0] * 31, None, [0.0] * 32):
        refused(
            "long_factor", model_type="phi3", rope_scaling=scaling | {"long_factor": bad}, **more
        )


def test_activations():
    def of(model_type, **more):
        return parsed(model_type, **more).layers[0].feed_forward.activation

    assert of("llama", hidden_act="gelu_pytorch_tanh") is GatedActivation.GELU_TANH
    both = {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
    }  # as the first Gemma 2 has
    assert of("gemma2", **both) is of("gemma2") is GatedActivation.GELU_TANH
    assert of("gemma2", hidden_activation="silu") is GatedActivation.SILU
    refused("contradicts", "hidden_act", "'silu'", model_type="gemma2", hidden_act="silu")
    refused("hidden_activation", "'gelu_new'", model_type="gemma2", hidden_activation="gelu_new")


OPT_125M = {  # as its authors wrote it
    "_name_or_path": "facebook/opt-125m",
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float16",
    "transformers_version": "4.21.0.dev0",
    "use_cache": True,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}


def test_opt_is_read_as_it_is_written_and_by_its_defaults(tmp_path):
    model = parse_model_config(OPT_125M)
    mixer, feed_forward = model.layers[0].mixer, model.layers[0].feed_forward
    assert (model.num_layers, model.hidden_size, model.embedding_size) == (12, 768, None)
    assert model.position_offset == 2
    assert (model.norm_kind, model.norm_eps, model.final_norm) == (NormKind.LAYER, 1e-5, True)
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.k_dim, mixer.rope) == (12, 12, 64, None)
    assert (mixer.qkv_bias, mixer.o_bias, feed_forward.bias) == (True, True, True)
    assert (feed_forward.intermediate_size, feed_forward.activation) == (3072, Activation.RELU)
    assert (model.ropes, model.position_limit, model.tie_word_embeddings) == ((), 2048, True)
    assert model.layers[0].norms is NormPlacement.PRE
    bare = {"model_type": "opt", "torch_dtype": "float16"}
    assert parse_model_config(bare) == model
    OPTConfig().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert parse_model_config({**written, "torch_dtype": "float16"}) == model
    assert stop_token_ids(bare, None) == {2}


def test_variants_of_opt():
    post = parse_model_config(
        {**OPT_125M, "do_layer_norm_before": False, "word_embed_proj_dim": 512}
    )
    assert (post.layers[0].norms, post.final_norm) == (NormPlacement.POST, False)
    assert post.embedding_size == 512
    assert not parse_model_config({**OPT_125M, "_remove_final_layer_norm": True}).final_norm
    without = parse_model_config({**OPT_125M, "enable_bias": False})
    assert not without.layers[0].mixer.qkv_bias
    assert not without.layers[0].feed_forward.bias
    expected = ("decoder.", "")
    assert parse_model_config(OPT_125M, ["decoder.layers.0.fc1.weight"]).prefixes == expected
    expected = ("model.decoder.", "")
    assert parse_model_config(OPT_125M, ["model.decoder.layers.0.fc1.weight"]).prefixes == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("activation_function", "gelu_new"),
        ("layer_norm_elementwise_affine", False),
        ("do_layer_norm_before", "yes"),
        ("word_embed_proj_dim", 0),
        ("rope_theta", 1e4),  # not of this family: it would be passed over
        ("intermediate_size", 3072),
        ("num_key_value_heads", 4),
    ],
)
def test_what_opt_does_not_have_is_refused_by_name(key, value):
    with pytest.raises(CheckpointError, match=rf"{key}.*{value!r}"):
        parse_model_config({**OPT_125M, key: value})


GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}


def test_what_openai_writes_of_gpt_oss():
    model = parse_model_config(GPT_OSS_20B)
    assert windows_of(model) == (128, None) * 12
    rope = model.ropes[0]
    assert (rope.kind, rope.theta, rope.parameters["truncate"]) == ("yarn", 150000, False)
    assert model.position_limit == 131072
    layer = model.layers[0]
    assert (layer.mixer.sinks, layer.mixer.qkv_bias, layer.mixer.o_bias, model.wide_norms) == (
        True,
    ) * 4
    moe = layer.feed_forward
    assert moe.routing == Routing(32, 4, Scoring.CHOSEN, normed=False)
    assert (moe.intermediate_size, moe.activation) == (2880, GatedActivation.CLAMPED_SWIGLU)
    assert (moe.router_bias, moe.bias, moe.choice_bias, moe.shared) == (True, True, False, None)
    without = {
        key: value
        for key, value in GPT_OSS_20B.items()
        if key not in ("rope_scaling", "layer_types")
    }
    assert parse_model_config(without) == model  # transformers' defaults


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("swiglu_limit", 5.0, "swiglu_limit = 5.0 is not implemented; only 7.0 is"),
        ("swiglu_alpha", 1.0, "swiglu_alpha = 1.0 is not implemented; only 1.702 is"),
        ("experts_per_token", 2, "experts_per_token = 2, but num_experts_per_tok = 4"),
    ],
)
def test_what_is_not_computed_of_gpt_oss_is_refused(key, value, named):
    with pytest.raises(CheckpointError, match=named):
        parse_model_config(GPT_OSS_20B | {key: value})
