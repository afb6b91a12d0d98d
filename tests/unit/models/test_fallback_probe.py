"""What a model without a row is, found without weights, and what is refused by name."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refuses
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from freight.errors import CheckpointError
from freight.model.config.registry import FAMILIES
from freight.model.fallback_probe import _window, foreign_config

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONGROPE = {
    "type": "longrope",
    "factor": 2.0,
    "original_max_position_embeddings": 128,
    "short_factor": [1.5] * 8,
}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, r"takes s_aux \(a sink\)"),
    ("deepseek_v3", LATENT, r"kv_lora_rank = 32 means latent attention \(MLA\)"),
    (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv"]},
        "layers of kind 'conv' means recurrent",
    ),
    (
        "qwen3_5_text",
        {"layer_types": ["linear_attention"] * 3},
        "layers of kind 'linear_attention' means recurrent",
    ),
    (
        "olmo2",
        {"layers_block_type": ["mamba", "attention", "attention"]},
        "layers of kind 'mamba' means recurrent",
    ),
    ("falcon_h1", {"mamba_d_ssm": 64}, "mamba_d_ssm = 64 means recurrent"),
    ("stablelm", {}, "does not pass the caller's arguments on to its attention"),
    ("bloom", {"n_layer": 3, "n_head": 4}, "does not go through transformers' AttentionInterface"),
    ("gpt_neox_japanese", {}, "does not go through transformers' AttentionInterface"),
    ("diffllama", {}, "attends more than once"),
    ("doge", {}, "makes its own mask or bias"),
    ("bert", {"is_decoder": False}, "neither all tokens before nor a sliding window"),
    (
        "gemma4_text",
        {"num_kv_shared_layers": 1},
        "num_kv_shared_layers = 1 means layers that share keys and values",
    ),
    ("plamo3", {}, "no public implementation of it can be run to compare with"),
    ("step3p5", {}, "no public implementation of it can be run to compare with"),
    ("t5", {"is_encoder_decoder": True}, "it is no causal language model there"),
    ("olmo2", {"architectures": ["Olmo2ForSequenceClassification"]}, "architectures is"),
    ("olmo2", {"alibi": True}, "alibi = True means biases by position"),
    (
        "olmo",
        {"rope_scaling": LONGROPE | {"long_factor": [2.0] * 8}},
        r"\(longrope\) has other angles",
    ),
    (
        "cohere2_moe",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "factor is 2.0, and its configuration class",
    ),
    (
        "cohere2_moe",
        {"rope_scaling": {"type": "linear", "alpha": 2.0}},
        "alpha is 2.0, and its configuration class",
    ),
    (
        "apertus",
        {"rope_theta": 5e5},
        "rope_theta is 500000.0, and its configuration class takes rope",
    ),
    ("apertus", {"max_position_embeddings": -1}, "max_position_embeddings = -1 must be at least 1"),
    ("olmo", {"layer_types": 7}, "cannot be used"),
    ("gptj", {}, "does not go through transformers' AttentionInterface"),
    (
        "gpt_neo",
        {"num_layers": 3, "attention_types": [[["global"], 3]]},
        "does not go through transformers' Attention",
    ),
    ("falcon", {}, "does not go through transformers' AttentionInterface"),
    ("codegen", {}, "does not go through transformers' AttentionInterface"),
    ("xglm", {"attention_heads": 4}, "does not go through transformers' AttentionInterface"),
    ("ministral", {}, "config.json has no head_dim, which MinistralForCausalLM needs"),
    (
        "jetmoe",
        {},
        "depends on the values of tensors, so its attention cannot be seen before weights are read",
    ),
    (
        "xmod",
        {},
        r"does not run without a cache and a mask of transformers: Input language unknown",
    ),
    ("musicgen", {}, "configuration is not accepted"),
    ("olmo2", {"vision_config": {"depth": 2}}, "inputs other than text"),
    ("olmo2", {"num_attention_heads": "many"}, "configuration is not accepted"),
    ("made_up", {}, "model_type 'made_up' is not implemented, and transformers"),
]


@pytest.mark.parametrize(
    ("model_type", "more", "says"), REFUSED, ids=[f"{r[0]}-{r[2][:20]}" for r in REFUSED]
)
def test_what_cannot_be_run_is_refused_by_name(
    model_type: str, more: dict[str, Any], says: str
) -> None:
    with pytest.raises(CheckpointError, match=says):
        foreign_config(SMALL | {"model_type": model_type} | more)


@pytest.mark.parametrize(
    "more", [{"layer_types": ["full_attention"] * 3, "mamba_d_conv": 4}, {"mamba_d_conv": 0}]
)
def test_keys_of_recurrent_layers_that_are_not_there_refuse_nothing(more: dict[str, Any]) -> None:
    assert foreign_config(SMALL | {"model_type": "olmo2"} | more).num_layers == 3


def test_layers_are_found_without_weights() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    more = {"head_dim": 16, "sliding_window": 8, "layer_types": kinds, "dtype": "bfloat16"}
    model = foreign_config(SMALL | {"model_type": "exaone4"} | more)
    assert [layer.mixer.window for layer in model.layers] == [8, None, 8]
    mixer = model.layers[0].mixer
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.k_dim, mixer.v_dim) == (4, 2, 16, 16)
    assert mixer.softmax_scale == 0.25
    assert model.checkpoint_format == "bfloat16"
    assert model.eos_token_ids == (2,)
    assert model.foreign is not None
    assert model.foreign.attention == tuple(f"model.layers.{i}.self_attn" for i in range(3))


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        (
            {"type": "dynamic", "factor": 2.0},
            256,
        ),  # it changes for sequences of more than `limit` tokens
        (LONGROPE | {"long_factor": [1.5] * 8}, 256),  # both tables are the same
        (LONGROPE | {"long_factor": [2.0] * 8}, 128),  # no sequence needs the second
    ],
)
def test_a_rope_that_cannot_change_passes(rope: dict[str, Any], limit: int) -> None:
    more = {"model_type": "olmo", "rope_scaling": rope, "max_position_embeddings": limit}
    config = SMALL | more
    before = copy.deepcopy(config)
    model = foreign_config(config)
    assert model.position_limit == limit
    assert config == before  # transformers writes into what it is given


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
    ],
)
def test_the_dtype_is_what_config_json_names(names: dict[str, Any], dtype: str) -> None:
    assert foreign_config(SMALL | {"model_type": "olmo"} | names).checkpoint_format == dtype


def test_published_names_of_architectures_pass() -> None:
    for model_type, name in (
        ("internlm3", "InternLM3ForCausalLM"),
        ("phimoe", "PhiMoEForCausalLM"),
    ):
        config = SMALL | {"model_type": model_type, "architectures": [name], "head_dim": 16}
        assert foreign_config(config | {"num_local_experts": 4}).num_layers == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(FAMILIES))
)
def test_every_causal_model_runs_or_is_refused_in_words(model_type: str) -> None:
    """With the defaults of its configuration: no name of an exception, and no name of ours."""
    try:
        config = CONFIG_MAPPING[model_type]().to_dict()
    except Exception:
        pytest.skip("its configuration class has no defaults that it accepts")
    try:
        model = foreign_config(config | {"model_type": model_type, "dtype": "bfloat16"})
    except CheckpointError as error:
        why = str(error).partition("cannot be used: ")[2].partition(". Model types")[0]
        assert len(why.split()) > 3
        assert not re.search(r"\w+(Error|Exception)|freight_", why)
    else:
        assert model.num_layers > 0


@given(st.integers(2, 300), st.integers(1, 400))
def test_a_window_is_read_off_the_rule_of_its_mask(limit: int, window: int) -> None:
    def rule(b: Any, h: Any, query: Any, key: Any) -> torch.Tensor:
        return (key <= query) & (query - key < window)

    assert _window("some", "layer", rule, limit) == (None if window >= limit else window)


@given(st.integers(20, 300), st.integers(2, 9))
def test_chunks_and_sight_ahead_are_no_window(limit: int, chunk: int) -> None:
    rules = [
        lambda b, h, query, key: (key <= query) & (key // chunk == query // chunk),
        lambda b, h, query, key: key <= query + 1,
        lambda b, h, query, key: (key <= query) & (key > 0),
    ]
    for rule in rules:
        with refuses(CheckpointError, "all tokens before", "sliding window"):
            _window("some", "layer", rule, limit)
