"""Details of published config.json files: spellings, and keys of mechanisms that Freight has."""

import math
from typing import Any

import pytest
from tests.refusals import refuses
from tests.unit.config.test_model import config, parsed

from freight.errors import CheckpointError
from freight.model.architectures import skipped_parts
from freight.model.config.layer import MoEConfig
from freight.model.config.mechanisms import missing_mechanisms
from freight.model.config.parse import parse_model_config
from freight.model.layers.rope import yarn_attention_factor
from freight.model.open import read_model_config

# like Granite 4.0 350M, with other sizes: no layer is recurrent, and keys describe such layers
GRANITE_4 = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 1024,
    "layer_types": ["attention"] * 28, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4,
    "mamba_d_head": 16, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 100352,
    "num_experts_per_tok": 0, "num_local_experts": 0, "shared_intermediate_size": 2048, "intermediate_size": 2048,
}  # fmt: skip
ERNIE_MOE = {  # like ERNIE-4.5-21B-A3B; written by hand, not compared with the file
    "architectures": ["Ernie4_5_MoeForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 2560, "intermediate_size": 12288, "max_position_embeddings": 131072, "model_type": "ernie4_5_moe",
    "num_attention_heads": 20, "num_key_value_heads": 4, "num_hidden_layers": 28, "pad_token_id": 0,
    "rms_norm_eps": 1e-05, "use_cache": False, "vocab_size": 103424, "rope_theta": 500000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_bias": False, "moe_num_experts": 64,
    "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_interval": 1, "moe_intermediate_size": 1536,
    "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_k": 6, "moe_layer_end_index": 29, "moe_use_aux_free": True,
    "num_nextn_predict_layers": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", ["LLaMAForCausalLM", "LlamaForCausalLM"])
def test_the_first_llama_files_write_the_architecture_in_other_letters(name: str) -> None:
    assert parsed(architectures=[name]).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("name", ["LlamaModel", "LlamaForSequenceClassification"])
def test_classes_without_a_head_are_named_too(name: str) -> None:
    model = parsed(architectures=[name])
    assert model.architecture == "LlamaForCausalLM"
    assert not model.has_head
    assert model.tie_word_embeddings


@pytest.mark.parametrize(
    "wrong", [["LlamaBlock"], "LlamaForCausalLM", 7, ["LlamaForCausalLM", "X"], [["a"]], {"a": 1}]
)
def test_other_architectures_are_refused(wrong: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"architectures .* Freight runs \['LlamaForCausalLM'\]"
    ):
        parsed(architectures=wrong)


def test_attn_factor_multiplies_what_yarn_computes() -> None:
    """DeepSeek-R1-0528-Qwen3-8B has 1 / (0.1 ln 4 + 1), so that attention stays as it was."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    published = parsed("qwen3", rope_scaling={**yarn, "attn_factor": 0.8782488562869419})
    assert yarn_attention_factor(published.ropes[0]) == pytest.approx(1.0)
    mscales = {**yarn, "mscale": 1.0, "mscale_all_dim": 0.5, "attn_factor": 0.5}
    found = yarn_attention_factor(parsed("qwen3", rope_scaling=mscales).ropes[0])
    assert found == pytest.approx(0.5 * (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))
    assert published != parsed("qwen3", rope_scaling=yarn)
    with pytest.raises(CheckpointError, match="attn_factor"):
        parsed("qwen3", rope_scaling={**yarn, "attn_factor": "x"})


def test_attn_factor_beside_attention_factor_is_refused() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "attn_factor": 0.5}
    with refuses(CheckpointError, "attn_factor = 0.5", "attention_factor = 1.5"):
        parsed("qwen3", rope_scaling=yarn)


def test_ernie_with_layers_that_predict_further_tokens() -> None:
    model = parse_model_config(ERNIE_MOE)
    plain = {key: value for key, value in ERNIE_MOE.items() if key != "num_nextn_predict_layers"}
    assert (model.prediction_layers, model.layers) == (1, parse_model_config(plain).layers)
    names = [
        "model.mtp_block.0.mlp.up_proj.weight",
        "model.mtp_linear_proj.0.weight",
        "model.norm.weight",
    ]
    assert skipped_parts(model, names) == {"of a layer that predicts further tokens": 2}


def top_k(written: dict[str, Any]) -> int:
    moe = parse_model_config(written).layers[1].feed_forward
    assert isinstance(moe, MoEConfig)
    return moe.routing.top_k


def test_the_number_of_chosen_experts_has_two_names() -> None:
    """A default under the other name is no contradiction."""
    ernie = {key: value for key, value in ERNIE_MOE.items() if key != "moe_k"}
    oss = {"model_type": "gpt_oss", "architectures": None}
    assert top_k({**ernie, "num_experts_per_tok": 3}) == top_k({**oss, "experts_per_token": 3}) == 3
    with refuses(CheckpointError, "num_experts_per_tok = 3", "moe_k = 6"):
        parse_model_config({**ERNIE_MOE, "num_experts_per_tok": 3})
    with refuses(CheckpointError, "experts_per_token = 4", "num_experts_per_tok = 2"):
        parse_model_config({**oss, "experts_per_token": 4, "num_experts_per_tok": 2})


def test_keys_of_recurrent_layers_show_none_where_every_layer_attends() -> None:
    assert missing_mechanisms(GRANITE_4) == {}
    mixed = {**GRANITE_4, "layer_types": ["mamba"] + ["attention"] * 27}
    for recurrent in (
        mixed,
        {**GRANITE_4, "layer_types": None},
        {**GRANITE_4, "layer_types": ["linear_attention"]},
    ):
        assert list(missing_mechanisms(recurrent)) == [
            "layers with a recurrent state (Mamba, linear attention)"
        ]
    assert len(read_model_config(GRANITE_4).attention) == 28


def test_an_old_file_of_qwen_2_vl_is_read() -> None:
    flat = config(
        "qwen2",
        rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
        vision_config={"depth": 1},
    )
    names = {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]}
    model = read_model_config({**flat, **names, "image_token_id": 3})
    assert model.layers[0].mixer.qkv_bias


def test_an_empty_value_switches_a_key_off() -> None:
    assert parsed(alibi={}, clip_qkv=[], scale_emb="") == parsed()


def test_a_key_of_the_text_model_may_stand_outside_again() -> None:
    text = config("mistral", sliding_window=24)
    wrapper = {"model_type": "mistral3", "text_config": text}
    assert parse_model_config({**wrapper, "sliding_window": 24}) == parse_model_config(wrapper)
    with pytest.raises(CheckpointError, match="sliding_window = 25"):
        parse_model_config({**wrapper, "sliding_window": 25})


RECURRENT = "layers with a recurrent state (Mamba, linear attention)"
SPARSE = "sparse attention over keys that an indexer chooses (DSA, MSA)"


@pytest.mark.parametrize(
    ("keys", "missing"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, [RECURRENT]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, []),
        ({"attn_type_list": [1, 0]}, [RECURRENT]),
        ({"attn_type_list": [1, 1]}, []),
        ({"sparse_attention_config": {"use_sparse_attention": True}}, [SPARSE]),
        ({"sparse_attention_config": {"use_sparse_attention": False}}, []),
    ],
)
def test_signs_of_a_mechanism(keys: dict[str, Any], missing: list[str]) -> None:
    assert list(missing_mechanisms(keys)) == missing
