"""What a model without a row is, found without weights, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freight.errors import CheckpointError
from freight.models.fallback_probe import _window, foreign_config

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
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, r"takes s_aux \(a sink\)"),
    ("deepseek_v3", LATENT, r"kv_lora_rank = 32 means latent attention \(MLA\)"),
    ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "layers of kind 'conv' means recurrent"),
    ("qwen3_5_text", {"layer_types": ["linear_attention"] * 3}, "layers of kind 'linear_attention' means recurrent"),
    ("falcon_h1", {"mamba_d_ssm": 64}, "mamba_d_ssm = 64 means recurrent"),
    ("stablelm", {}, "does not pass the caller's arguments on to its attention"),
    ("bloom", {"n_layer": 3, "n_head": 4}, "does not go through transformers' AttentionInterface"),
    ("gpt_neox_japanese", {}, "does not go through transformers' AttentionInterface"),
    ("diffllama", {}, "attends more than once"),
    ("doge", {}, "makes its own mask or bias"),
    ("bert", {"is_decoder": False}, "neither all tokens before nor a sliding window"),
    ("gemma4_text", {"num_kv_shared_layers": 1}, "num_kv_shared_layers = 1 means layers that share keys and values"),
    ("t5", {"is_encoder_decoder": True}, "it is no causal language model there"),
    ("olmo2", {"architectures": ["Olmo2ForSequenceClassification"]}, "architectures is"),
    ("olmo2", {"alibi": True}, "alibi = True means biases by position"),
    (
        "olmo2",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "'dynamic', which changes",
    ),
    ("olmo2", {"vision_config": {"depth": 2}}, "inputs other than text"),
    ("olmo2", {"num_attention_heads": "many"}, "configuration is not accepted"),
    ("made_up", {}, "model_type 'made_up' is not implemented, and transformers"),
]


@pytest.mark.parametrize(("model_type", "more", "says"), REFUSED, ids=[f"{r[0]}-{r[2][:20]}" for r in REFUSED])
def test_what_cannot_be_run_is_refused_by_name(model_type: str, more: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        foreign_config(SMALL | {"model_type": model_type} | more)


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
        with pytest.raises(CheckpointError, match="neither all tokens before nor a sliding window"):
            _window("some", "layer", rule, limit)
