"""Kimi Linear in config.json: the publisher's spelling and that of transformers, defaults, and what
is refused.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.config.test_model import num_parameters

from freight.cache.spec import LayerStateSpec, cache_spec
from freight.errors import CheckpointError
from freight.fp8.formats import Format, Granularity
from freight.model.architectures import tensor_names
from freight.model.config.layer import DenseConfig, MoEConfig
from freight.model.mixers.kimi_delta.spec import KimiDeltaConfig
from freight.model.mixers.latent.spec import LatentConfig
from freight.model.mixers.spec import mixer_parts
from freight.model.open import read_model_config
from freight.model.shapes import kept_in_16_bits
from freight.settings.engine import KVCacheConfig
from freight.settings.states import with_state

Json = dict[str, Any]
ATTEND = [4, 8, 12, 16, 20, 24, 27]
NESTED: Json = {
    "full_attn_layers": ATTEND,
    "kda_layers": [number for number in range(1, 28) if number not in ATTEND],
    "head_dim": 128,
    "num_heads": 32,
    "short_conv_kernel_size": 4,
}
PUBLISHERS: Json = {  # keys and values of Kimi-Linear-48B-A3B
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": NESTED,
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def test_in_the_publishers_spelling() -> None:
    model = read_model_config(PUBLISHERS)
    assert num_parameters(model) == pytest.approx(49.1e9, rel=5e-3)
    latent = LatentConfig(32, None, 512, 128, 64, 128, softmax_scale=192**-0.5, rope=None)
    assert [layer.mixer for layer in model.layers] == [
        latent if number in ATTEND else KimiDeltaConfig(32, 128, 4, rank=128)
        for number in range(1, 28)
    ]
    assert model.ropes == ()
    assert model.position_limit == 1048576
    moe = model.layers[1].feed_forward
    assert isinstance(moe, MoEConfig)
    assert (moe.routing.num_experts, moe.routing.top_k, moe.routing.factor) == (256, 8, 2.446)
    assert moe.routing.normed
    assert moe.shared == DenseConfig(1024)
    assert [isinstance(layer.feed_forward, MoEConfig) for layer in model.layers] == [False] + [
        True
    ] * 26


def test_what_a_sequence_takes() -> None:
    """A state of 32 × 128 × 128 in each of 20 layers, and of a token 576 values in each of 7."""
    model = read_model_config(PUBLISHERS)
    kv = KVCacheConfig(Format.E4M3FN, Granularity.TOKEN, None, None)
    spec = cache_spec(with_state(kv, "int8", Format.BFLOAT16, Format.E4M3FN, model), model, 16)
    assert spec.bytes_per_token == 7 * 578
    layer = spec.layers[0]
    assert isinstance(layer, LayerStateSpec)
    rows = 16 * 32 * 128 * (2 + 2 + 4)  # keys and u in bfloat16, decays of channels in float32
    assert layer.bytes_per_state == 32 * 128 * (128 + 2) + rows + 3 * 3 * 4096 * 2
    assert spec.bytes_per_state == 20 * layer.bytes_per_state


def test_gates_stay_in_16_bits() -> None:
    model = read_model_config(PUBLISHERS)
    kept = {
        name.removeprefix("model.layers.0.")
        for name in kept_in_16_bits(model)
        if ".layers.0.self_attn" in name
    }
    assert kept == {f"self_attn.{one}_proj.weight" for one in ("f_a", "f_b", "b", "g_a", "g_b")}
    parts = mixer_parts(model.layers[0].mixer, 2304, tensor_names(model))
    modules = [module for one in parts.projections.values() for module in one.modules]
    assert modules == [f"self_attn.{one}_proj" for one in "qkvo"]


def test_in_the_spelling_of_transformers() -> None:
    """`save_pretrained` has no `linear_attn_config`."""
    own = (
        "linear_attn_config",
        "first_k_dense_replace",
        "mla_use_nope",
        "moe_layer_freq",
        "use_grouped_topk",
    )
    written = {key: value for key, value in PUBLISHERS.items() if key not in own}
    written |= {
        "head_dim": 64,
        "qk_head_dim": 192,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
        "layer_types": [
            "full_attention" if number in ATTEND else "linear_attention" for number in range(1, 28)
        ],
        "mlp_layer_types": ["dense"] + ["sparse"] * 26,
    }
    assert read_model_config(written) == read_model_config(PUBLISHERS)


def test_by_the_defaults_of_transformers() -> None:
    """Every fourth layer attends, but not the first."""
    model = read_model_config({"model_type": "kimi_linear", "num_experts": 256})
    assert [index for index, layer in enumerate(model.layers) if isinstance(layer.mixer, LatentConfig)] == [
        4, 8, 12, 16, 20, 24
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"linear_attn_config": {**NESTED, "full_attn_layers": [4]}}, "which are not the layers 1 to num_hidden"),
        ({"linear_attn_config": {**NESTED, "kda_layers": [*NESTED["kda_layers"], 4]}}, "= 27, each once"),
        ({"linear_attn_config": {**NESTED, "kda_layers": 3}}, "kda_layers = 3"),
        ({"linear_attn_config": {**NESTED, "gate_lower_bound": -5.0}}, r"gate_lower_bound = -5\.0, which is not impl"),
        ({"linear_attn_config": [1]}, r"linear_attn_config = \[1\] must be an object"),
        ({"linear_attn_config": {**NESTED, "short_conv_kernel_size": 9}}, "linear_conv_kernel_dim = 9 is not"),
        ({"mla_use_nope": False}, "mla_use_nope = False is not implemented; only True is"),
        ({"moe_router_activation_func": "softmax"}, "only 'sigmoid' is"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True is not implemented for this model_type"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act = 'gelu_pytorch_tanh' is not implemented for layers with a"),
        ({"num_experts_per_tok": 4}, "num_experts_per_token = 8, but num_experts_per_tok = 4"),
        ({"layer_types": ["linear_attention"] * 26 + ["sliding_attention"]}, "sliding_attention"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(keys: Json, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_model_config({**PUBLISHERS, **keys})


@pytest.mark.parametrize("key", ["moe_renormalize", "norm_topk_prob"])
def test_null_does_not_norm_the_weights_of_experts(key: str) -> None:
    """Under both names, as transformers reads it; false says the same."""
    plain = {
        name: value
        for name, value in PUBLISHERS.items()
        if name not in ("moe_renormalize", "norm_topk_prob")
    }
    models = [read_model_config(plain | more) for more in ({key: None}, {key: False}, {})]
    experts = [model.layers[-1].feed_forward for model in models]
    expected = [False, False, True]
    assert [one.routing.normed for one in experts if isinstance(one, MoEConfig)] == expected
