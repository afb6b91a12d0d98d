"""What Granite, GLM, SmolLM and the mixtures of experts have in their config.json beside the keys
of all.
"""

from __future__ import annotations

import pytest
from tests.unit.config.test_model import config, parsed, refused, windows

from freight.model.architectures import tensor_names
from freight.model.config.layer import DenseConfig, MoEConfig, NormPlacement
from freight.model.config.parse import parse_model_config
from freight.model.mixers.attention.spec import NormPlace, OutputGateConfig, QKNormConfig
from freight.operands.activation import Activation, GateFunction
from freight.operands.routing import Routing, Scoring


def test_multipliers_of_granite():
    said = {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
    }
    model = parsed("granite", **said, logits_scaling=8)
    assert (model.embedding_multiplier, model.rounds_multiplier) == (12.0, False)
    assert model.residual_multiplier == 0.22
    assert (model.layers[0].mixer.softmax_scale, model.logit_divisor) == (0.015625, 8.0)
    plain = parsed("granite")
    assert (plain.embedding_multiplier, plain.residual_multiplier) == (None, 1.0)
    assert plain.logit_divisor is None
    assert plain.layers[0].mixer.softmax_scale == 1.0
    for key in said:
        refused(key, "0", "finite number > 0", model_type="granite", **{key: 0})


def test_glm_rotates_neighbouring_channels_of_half_a_head():
    def rope(model_type="glm4", **more):
        return parsed(model_type, **more).ropes[0]

    assert (rope().interleaved, rope().rotary_dim, rope("glm").rotary_dim) == (True, 64, 64)
    assert rope(partial_rotary_factor=0.25).rotary_dim == 32
    inside = {"rope_type": "default", "partial_rotary_factor": 0.75, "rope_theta": 500.0}
    assert rope(rope_parameters=inside).rotary_dim == 96
    assert rope(rope_parameters=inside).interleaved is True
    assert not rope("phi3").interleaved
    assert parsed("glm4").layers[0].norms is NormPlacement.SANDWICH
    assert parsed("glm").layers[0].norms is NormPlacement.PRE
    plain = parsed("glm", attention_bias=False).layers[0].mixer
    assert (plain.qkv_bias, plain.o_bias) == (False, False)


def test_routers_with_a_bias_for_the_choice():
    def moe(model_type, layer=1, **more):
        feed_forward = parsed(model_type, **more).layers[layer].feed_forward
        assert isinstance(feed_forward, MoEConfig)
        assert feed_forward.choice_bias
        return feed_forward

    glm = moe("glm4_moe", routed_scaling_factor=2.5, n_group=4, topk_group=2, n_shared_experts=2)
    assert glm.routing == Routing(128, 8, Scoring.SIGMOID, True, 2.5, 4, 2)
    assert glm.shared == DenseConfig(2 * 1408)
    assert not moe("glm4_moe", norm_topk_prob=False).routing.normed
    minimax = moe("minimax_m2", 0)
    assert (minimax.routing, minimax.intermediate_size) == (Routing(256, 8, Scoring.SIGMOID), 384)
    assert moe("hy_v3").routing == Routing(192, 8, Scoring.SIGMOID, True, 2.826)
    assert moe("hy_v3").shared == DenseConfig(1536)
    ernie = moe("ernie4_5_moe")
    assert (ernie.routing, ernie.shared) == (Routing(64, 6, Scoring.SOFTMAX), DenseConfig(3072))


def test_layers_without_experts():
    def sparse(model_type, **more):
        layers = parsed(model_type, **more).layers
        return [isinstance(layer.feed_forward, MoEConfig) for layer in layers]

    assert (
        sparse("glm4_moe") == sparse("hy_v3") == sparse("ernie4_5_moe") == [False, True, True, True]
    )
    assert sparse("glm4_moe", first_k_dense_replace=3) == [False, False, False, True]
    assert sparse("hy_v3", mlp_layer_types=["sparse", "dense"] * 2) == [True, False, True, False]
    expected = [False, True, False, False]
    assert sparse("ernie4_5_moe", moe_layer_end_index=2, moe_layer_interval=2) == expected
    for bad in (["sparse"] * 3, ["sparse"] * 3 + ["other"]):
        refused("mlp_layer_types", model_type="hy_v3", mlp_layer_types=bad)


def test_norms_of_q_and_k():
    def sizes(model_type, **more):
        mixer = parsed(model_type, **more).layers[0].mixer
        return mixer.qk_norm_sizes if mixer.qk_norm else None

    assert sizes("glm4_moe") is None
    assert sizes("glm4_moe", use_qk_norm=True) == (64, 64)
    assert sizes("minimax_m2") == (4 * 128, 2 * 128)
    assert sizes("hy_v3") == (128, 128)


def test_minimax_says_how_many_channels_it_rotates():
    assert parsed("minimax_m2", rotary_dim=64).ropes[0].rotary_dim == 64
    refused("0.25", "0.5", model_type="minimax_m2", rotary_dim=64, partial_rotary_factor=0.25)
    refused("rotary_dim", rotary_dim=64)  # of a Llama


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("minimax_m2", "scoring_func", "softmax"),
        ("minimax_m2", "attn_type_list", [1, 0, 1, 1]),
        ("minimax_m2", "shared_intermediate_size", 64),
        ("hy_v3", "num_key_value_heads", 3),
        ("ernie4_5_moe", "use_bias", True),
        ("glm4_moe", "scoring_func", "softmax"),
        ("minimax_m2", "use_qk_norm", False),
        ("minimax_m2", "use_routing_bias", False),
        ("hy_v3", "route_norm", False),
        ("hy_v3", "qk_norm", False),
        ("ernie4_5_moe", "moe_use_aux_free", False),
        ("laguna", "norm_topk_prob", False),
        ("laguna", "moe_router_use_sigmoid", False),
        ("afmoe", "route_norm", False),
    ],
)
def test_what_these_mixtures_do_not_compute_is_refused(model_type, key, value):
    refused(key, str(value), model_type=model_type, **{key: value})
    if model_type == "minimax_m2":
        good = {"scoring_func": "sigmoid", "attn_type_list": [1] * 4, "shared_intermediate_size": 0}
        assert parsed(model_type, **good) == parsed(model_type)


def test_layers_that_predict_further_tokens_are_skipped_by_name():
    model = parsed("glm4_moe", num_nextn_predict_layers=2)
    expected = ["model.layers.4.*", "model.layers.5.*"]
    assert [pattern for pattern, _ in tensor_names(model).unused] == expected
    assert not tensor_names(parsed("glm4_moe")).unused


def test_layers_of_smollm_3_without_a_rope():
    def ropes(**more):
        return [layer.mixer.rope for layer in parsed("smollm3", **more).layers]

    assert ropes() == [0, 0, 0, None]
    assert ropes(no_rope_layer_interval=2) == [0, None, 0, None]
    assert ropes(no_rope_layers=[0, 1, 1, 0]) == [None, 0, 0, None]
    assert windows("smollm3", use_sliding_window=True, sliding_window=8) == (None, None, None, 8)
    for bad in ([1, 1, 1], [1, 1, 1, 2]):
        refused("no_rope_layers", model_type="smollm3", no_rope_layers=bad)


def test_a_head_in_float32_is_that_of_every_model():
    plain = parsed("hy_v3")
    assert parsed("hy_v3", enable_lm_head_fp32=True) == plain
    refused("enable_lm_head_fp32", enable_lm_head_fp32=True)  # of a Llama


def test_granite_with_experts():
    model = parsed(
        "granitemoe", num_local_experts=40, num_experts_per_tok=8, residual_multiplier=0.22
    )
    moe = model.layers[0].feed_forward
    assert isinstance(moe, MoEConfig)
    assert (moe.routing, moe.intermediate_size) == (Routing(40, 8, Scoring.CHOSEN, False), 384)
    assert (model.residual_multiplier, moe.shared) == (0.22, None)
    refused("shared_intermediate_size", model_type="granitemoe", shared_intermediate_size=64)


def test_heads_and_gates_of_laguna():
    def mixers(**more):
        return [layer.mixer for layer in parsed("laguna", **more).layers]

    assert {mixer.output_gate for mixer in mixers()} == {
        OutputGateConfig(GateFunction.SOFTPLUS, by_head=True)
    }
    assert mixers()[0].output_gate_size == mixers(gating="per-head")[0].output_gate_size == 4
    assert mixers(gating="per-element")[0].output_gate_size == 4 * 128
    for bad in (False, "none", 1):
        refused("gating", repr(bad), "per-element", model_type="laguna", gating=bad)
    assert [mixer.num_heads for mixer in mixers(num_attention_heads_per_layer=[4, 6, 8, 6])] == [
        4,
        6,
        8,
        6,
    ]
    assert mixers(num_attention_heads_per_layer=[4, 6, 8, 6])[1].output_gate_size == 6
    for bad, named in (
        ([4] * 3, "num_hidden_layers = 4"),
        ([4, 5, 4, 4], "= 5"),
        (4, "list"),
        ([4, 0, 4, 4], "0"),
    ):
        refused(
            "num_attention_heads_per_layer",
            named,
            model_type="laguna",
            num_attention_heads_per_layer=bad,
        )
    refused("num_attention_heads_per_layer", num_attention_heads_per_layer=[4] * 4)  # of a Llama


def test_laguna_as_its_hub_files_have_it():
    full = {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 64,
    }
    ropes = {
        "full_attention": full
        | {"partial_rotary_factor": 0.5, "attention_factor": 1.34, "beta_fast": 64.0},
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
        },
    }
    older = {
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
        "qkv_bias": False,
    }
    said = config(
        "laguna", **older, rope_parameters=ropes, layer_types=["full_attention", "sliding_attention"] * 2,
        moe_routed_scaling_factor=2.5, moe_router_logit_softcapping=0.0, moe_router_use_sigmoid=True,
    )  # fmt: skip
    model = parse_model_config(said)
    expected = [("yarn", 64, 5e5), ("default", 128, 1e4)]
    assert [(rope.kind, rope.rotary_dim, rope.theta) for rope in model.ropes] == expected
    assert [layer.mixer.window for layer in model.layers] == [None, 512, None, 512]
    expected = [False, True, True, True]
    assert [isinstance(layer.feed_forward, MoEConfig) for layer in model.layers] == expected
    moe = model.layers[1].feed_forward
    assert isinstance(moe, MoEConfig)
    assert moe.routing == Routing(256, 8, Scoring.SIGMOID, True, 2.5)
    assert moe.shared == DenseConfig(512)
    for key, value in (
        ("moe_router_logit_softcapping", 30.0),
        ("moe_apply_router_weight_on_input", True),
    ):
        refused(key, str(value), model_type="laguna", **{key: value})


def test_mellum_has_windows_experts_in_every_layer_and_layers_that_do_not_run():
    kinds = ["full_attention", "sliding_attention"] * 2
    predicts = {
        "num_nextn_predict_layers": 1,
        "mtp_layer_types": kinds[1:2],
        "mtp_mlp_layer_types": ["sparse"],
    }
    model = parsed("mellum", layer_types=kinds, **predicts)
    assert [layer.mixer.window for layer in model.layers] == [None, 1024, None, 1024]
    moe = [layer.feed_forward for layer in model.layers]
    assert all(isinstance(one, MoEConfig) and one.routing == Routing(64, 8) for one in moe)
    assert "mtp.*" in [pattern for pattern, _ in tensor_names(model).unused]
    refused("partial_rotary_factor", model_type="mellum", partial_rotary_factor=0.5)


def test_norms_and_windows_of_olmo():
    olmo = parsed("olmo2")
    layer = olmo.layers[0]
    assert (layer.norms, layer.mixer.qk_norm_sizes) == (NormPlacement.OUTPUT, (256, 128))
    assert olmo.wide_norms is True
    assert windows("olmo2") == (None,) * 4
    assert windows("olmo3") == (4096, 4096, 4096, None)
    yarn = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    older = parsed("olmo3", rope_theta=5e5, rope_scaling=yarn)  # of layers without a window alone
    assert [(rope.kind, rope.theta) for rope in older.ropes] == [("yarn", 5e5), ("default", 5e5)]
    refused("clip_qkv", model_type="olmo2", clip_qkv=8.0)


def test_layers_with_a_window_alone_rotate_in_exaone_and_trinity():
    def ropes(model_type, **more):
        return [layer.mixer.rope for layer in parsed(model_type, **more).layers]

    assert ropes("exaone4") == ropes("afmoe") == [0, 0, 0, None]
    kinds = ["full_attention", "sliding_attention"] * 2
    assert ropes("exaone4", sliding_window_pattern="LLLG", layer_types=kinds) == [None, 0, None, 0]
    whole = {
        "sliding_window": None,
        "sliding_window_pattern": 0,
        "layer_types": ["full_attention"] * 4,
    }
    assert ropes("exaone4", **whole) == [0] * 4
    assert windows("exaone4", **whole) == (None,) * 4
    refused("sliding_window_pattern", "LLLG", model_type="exaone4", sliding_window_pattern="LLLG")
    assert ropes("afmoe", global_attn_every_n_layers=2) == [0, None, 0, None]


def test_trinity():
    said = {
        "route_norm": True,
        "score_func": "sigmoid",
        "n_group": 1,
        "num_limited_groups": 1,
        "use_grouped_mm": True,
    }
    model = parsed("afmoe", **said, mup_enabled=True, num_dense_layers=2, route_scale=2.8)
    assert model.embedding_multiplier == 256**0.5
    assert not model.rounds_multiplier
    assert parsed("afmoe").embedding_multiplier is None
    assert model.layers[0].mixer.output_gate == OutputGateConfig(
        GateFunction.SIGMOID, by_head=False
    )
    assert model.layers[0].mixer.output_gate_size == 4 * 128
    expected = [False, False, True, True]
    assert [isinstance(layer.feed_forward, MoEConfig) for layer in model.layers] == expected
    moe = model.layers[2].feed_forward
    assert isinstance(moe, MoEConfig)
    assert moe.routing == Routing(64, 6, Scoring.SIGMOID, True, 2.8)
    assert moe.shared == DenseConfig(2 * 1408)
    refused("n_group", "2", model_type="afmoe", n_group=2)
    refused("score_func", "softmax", model_type="afmoe", score_func="softmax")


def test_arcee_has_no_gate():
    feed_forward = parsed("arcee", mlp_bias=True).layers[0].feed_forward
    assert feed_forward == DenseConfig(384, Activation.RELU_SQUARED, True)
    assert feed_forward.up_sizes == (384,)
    refused("hidden_act", "silu", model_type="arcee", hidden_act="silu")


HUNYUAN_ROPE = {
    "alpha": 1000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
HUNYUAN = {  # what files of Hunyuan-A13B have beside the keys of all, but for the number of layers
    "attention_head_dim": 64, "head_dim": 64, "kv_lora_rank": None, "moe_intermediate_size": [384] * 4,
    "moe_layer_num_skipped": 0, "moe_topk": [2] * 4, "num_experts": 8, "num_shared_expert": [1] * 4, "n_group": False,
    "norm_topk_prob": True, "norm_type": "rms", "rope_scaling": HUNYUAN_ROPE | {"type": "dynamic"}, "rope_theta": 1e4,
    "routed_scaling_factor": False, "use_cla": False, "use_mixed_mlp_moe": True, "use_mla": False, "use_qk_norm": True,
}  # fmt: skip


def test_hunyuan_as_its_files_have_it():
    model = parsed("hunyuan_v1_moe", **HUNYUAN)
    moe = model.layers[0].feed_forward
    assert moe == MoEConfig(Routing(8, 2, Scoring.SOFTMAX), 384, shared=DenseConfig(384))
    mixer, rope = model.layers[0].mixer, model.ropes[0]
    assert mixer.qk_norm == QKNormConfig(place=NormPlace.AFTER_ROPE)
    assert mixer.qk_norm_sizes == (64, 64)
    assert (rope.kind, rope.theta, rope.parameters) == ("default", 1e4 * 1000 ** (64 / 62), {})
    inside = {"rope_type": "dynamic", "rope_theta": 1e4, **HUNYUAN_ROPE}
    newer = {key: value for key, value in HUNYUAN.items() if not key.startswith("rope")} | {
        "rope_parameters": inside
    }
    assert parsed("hunyuan_v1_moe", **newer) == model
    dense = {"num_experts": 1, "moe_topk": 1, "num_shared_expert": 1, "moe_intermediate_size": None}
    plain = parsed("hunyuan_v1_dense", **{**HUNYUAN, **dense, "use_mixed_mlp_moe": False})
    assert (plain.layers[0].mixer, plain.ropes) == (mixer, model.ropes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("moe_topk", [2, 2, 2, 1]),
        ("moe_intermediate_size", [192] * 4),
        ("num_shared_expert", [2] * 4),
        ("use_qk_norm", False),
        ("use_cla", True),
        ("use_mla", True),
        ("n_group", 2),
        ("norm_topk_prob", False),
        ("use_mixed_mlp_moe", False),
        ("moe_layer_num_skipped", 1),
        ("attention_head_dim", 32),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
    ],
)
def test_what_hunyuan_does_not_compute_is_refused(key, value):
    refused(key, model_type="hunyuan_v1_moe", **{**HUNYUAN, key: value})
