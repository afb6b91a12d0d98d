"""config.json from the metadata of GGUF files, against what llama.cpp's converter was given."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from typing import Any

import pytest
from tests.formats.gguf_files import NAMES, converted

from freight.checkpoint.gguf.architectures import ROWS
from freight.checkpoint.gguf.config import config_of
from freight.checkpoint.gguf.keys import shortest
from freight.checkpoint.gguf.names import tensor_names
from freight.checkpoint.gguf.ropes import llama3_divisors
from freight.errors import CheckpointError
from freight.model.config.parse import parse_model_config


@pytest.mark.parametrize("name", NAMES)
def test_config_describes_the_model_that_was_converted(name: str) -> None:
    file = converted(name)
    gguf = file.read()
    assert gguf.unread == ()
    assert parse_model_config({**gguf.config, "dtype": "float32"}) == parse_model_config(
        file.config
    )


def test_every_architecture_has_a_file() -> None:
    assert {converted(name).metadata["general.architecture"] for name in NAMES} == set(ROWS)


@pytest.mark.parametrize("architecture", ["mamba", "clip", None, 3, ["llama"]])
def test_other_architectures_are_refused_with_those_that_are_read(architecture: object) -> None:
    with pytest.raises(
        CheckpointError, match=r"general\.architecture = .* is not implemented.*qwen35moe"
    ):
        config_of({"general.architecture": architecture}, {}, lambda name: [])


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("llama", "llama.attention.causal", False, "only True is"),
        ("llama", "llama.attention.clamp_kqv", 8.0, "decides what a model computes"),
        ("llama", "llama.attention.sliding_window", 4096, "decides what a model computes"),
        ("llama", "llama.attention.value_length", 16, "only 32 is"),
        ("llama", "llama.attention.head_count", [4, 4, 2], "one number for all layers is"),
        ("llama", "llama.attention.head_count", 0, "an integer > 0 is"),
        ("llama", "llama.attention.key_length", 0, "an integer > 0 is"),
        ("llama", "llama.vocab_size", 321, "only 320 is"),
        ("llama", "llama.block_count", None, "lacks llama.block_count"),
        ("llama", "llama.block_count", "3", "an integer >= 0 is"),
        ("llama", "llama.block_count", 10**6, "1 to 10000 are"),
        ("llama", "llama.rope.freq_base", -1.0, "a number > 0 is"),
        ("llama", "llama.rope.freq_base", float("nan"), "a finite number is"),
        ("llama", "llama.rope.scaling.type", "dynamic", "'yarn' or 'longrope' is"),
        ("llama", "llama.rope.scaling.attn_factor", 1.2, "only 1.0 is"),
        ("gemma3", "gemma3.rope.local.freq_base", 1e4, "decides what a model computes"),
        ("qwen3", "qwen3.pooling_type", 3, "decides what a model computes"),
        ("qwen3-moe", "qwen3moe.expert_gating_func", 2, "only 0 or 1 is"),
        ("qwen3-moe", "qwen3moe.expert_weights_scale", 2.5, "only 0.0 or 1.0 is"),
        ("granite", "granite.rope.scaling.finetuned", False, "only True is"),
        ("granite", "granite.logit_scale", None, "lacks granite.logit_scale"),
        ("granite-moe", "granitemoe.expert_shared_feed_forward_length", 48, "decides what"),
        ("glm4", "glm4.rope.dimension_sections", [2, 3, 3, 0], "only a rope without sections is"),
        ("deepseek-v3", "deepseek2.expert_gating_func", None, "llama.cpp takes a softmax"),
        ("deepseek-v3", "deepseek2.attention.temperature_scale", 0.1, "decides what"),
        ("lfm2", "lfm2.attention.head_count_kv", [0, 2, 4], "0, and one other number, is"),
        ("lfm2", "lfm2.attention.sliding_window", 128, "decides what a model computes"),
        ("gemma4", "gemma4.feed_forward_length", [96, 96, 96, 80], "doubled in layers that share"),
        ("gemma4", "gemma4.attention.head_count_kv", [2, 1, 2, 1], "each kind of layer"),
        ("qwen3-5", "qwen35.ssm.inner_size", 33, "a multiple of ssm.time_step_rank = 4 is"),
    ],
)  # fmt: skip
def test_what_is_not_carried_over_is_refused_by_name(
    name: str, key: str, value: object, words: str
) -> None:
    with pytest.raises(CheckpointError) as error:
        converted(name).read(**{key: value})
    assert key in str(error.value)
    assert words in str(error.value)


def test_other_keys_of_the_model_are_listed() -> None:
    gguf = converted("llama").read(
        **{"llama.tensor_data_layout": "Meta AI original pth", "llama.expert_count": 0,
           "llama.swin_norm": False, "llama.invented": 7, "llama.rope.scaling.finetuned": True, "general.url": "x"}
    )  # fmt: skip
    assert gguf.unread == (
        "llama.tensor_data_layout", "llama.swin_norm", "llama.invented", "llama.rope.scaling.finetuned"
    )  # fmt: skip


def test_absent_keys_have_the_defaults_of_llama_cpp() -> None:
    gemma3 = converted("gemma3")
    names = ("rope.freq_base_swa", "attention.sliding_window_pattern", "rope.dimension_count")
    config = gemma3.read(**{f"gemma3.{name}": None for name in names}).config
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 10000.0
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]
    qwen = converted("qwen2")
    config = qwen.read(
        **{"qwen2.attention.head_count_kv": None, "qwen2.rope.freq_base": None}
    ).config
    assert config["num_key_value_heads"] == config["num_attention_heads"] == 4
    assert config["rope_parameters"]["rope_theta"] == 10000.0
    granite = converted("granite").read(**{"granite.attention.scale": None}).config
    assert granite["attention_multiplier"] == 0.25
    moe = converted("glm4-moe").read(
        **{"glm4moe.expert_weights_scale": None, "glm4moe.expert_gating_func": None}
    )
    assert moe.config["routed_scaling_factor"] == 1.0


def test_layers_with_a_window_may_be_given_as_a_period() -> None:
    file = converted("gemma3")
    types = file.read(**{"gemma3.attention.sliding_window_pattern": 3}).config["layer_types"]
    assert types == (["sliding_attention"] * 2 + ["full_attention"]) * 2
    types = file.read(**{"gemma3.attention.sliding_window": None}).config["layer_types"]
    assert set(types) == {"full_attention"}


def test_the_largest_gemmas_divide_scores_by_their_share_of_channels() -> None:
    file = converted("gemma2")
    assert file.read().config["query_pre_attn_scalar"] == 32
    assert file.read(**{"gemma2.block_count": 46}).config["query_pre_attn_scalar"] == 16


def test_every_end_of_a_turn_ends_a_completion() -> None:
    file = converted("llama")
    ids = file.read(**{"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 2}).config[
        "eos_token_id"
    ]
    assert ids == [2, 9]
    none = file.read(
        **{
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.bos_token_id": None,
            "tokenizer.ggml.eos_token_id": None,
        }
    ).config
    assert (none["bos_token_id"], none["eos_token_id"]) == (1, 2)
    with pytest.raises(CheckpointError, match="is not the id of a token"):
        file.read(**{"tokenizer.ggml.eos_token_id": "2"})


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_divisors_of_llama_3_become_its_rope(factor: float) -> None:
    divisors = llama3_divisors(32, 5e5, factor, 8192)
    rope = _rope_with(divisors)
    assert rope == {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


def test_other_divisors_are_kept_as_they_are() -> None:
    divisors = [1.0 + pair / 8 for pair in range(32)]
    rope = _rope_with(divisors)
    assert (rope["rope_type"], rope["attention_factor"]) == ("longrope", 1.0)
    assert rope["short_factor"] == rope["long_factor"] == divisors
    assert _rope_with([1.0] * 32)["rope_type"] == "default"


@pytest.mark.parametrize(
    "divisors", [[1.0] * 31, [1.0] * 31 + [1e30], [0.0] * 32, [float("nan")] * 32]
)
def test_divisors_that_are_none_are_refused(divisors: list[float]) -> None:
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        _rope_with(divisors)


def _rope_with(divisors: list[float]) -> Any:
    file = converted("llama3")
    gguf = config_of(file.metadata, file.shapes, lambda name: divisors)
    parse_model_config(gguf.config)
    return gguf.config["rope_parameters"]


def test_float32_numbers_get_their_decimals_back() -> None:
    assert shortest(9.999999747378752e-06) == 1e-5
    assert shortest(0.2199999988079071) == 0.22
    assert shortest(500000.0) == 500000.0
    assert shortest(0.1) == 0.1  # no float32
    assert shortest(1e300) == 1e300


_HOSTILE: tuple[object, ...] = (
    -1, 0, 1, 3, 2**31, 2**63, -(2**63), 1.5, 0.0, -0.5, float("inf"), float("nan"), True, False, "", "yarn", [], [0],
    [1, 2, 3], [True] * 3, ["a"], [[1]], [2**40] * 8,
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_hostile_metadata_and_shapes_are_read_or_refused(name: str) -> None:
    """Every value of the model is exchanged for each of many others, and so are shapes."""
    file = converted(name)
    dice = random.Random(name)
    prefix = file.metadata["general.architecture"] + "."
    keys = [key for key in file.metadata if key.startswith(prefix)]
    cases = [(key, value) for key in keys for value in _HOSTILE]
    for key, value in dice.sample(cases, len(cases)):
        _read_or_refuse(file.metadata | {key: value}, file.shapes, file.values)
    for tensor in dice.sample(sorted(file.shapes), 12):
        for shape in ((), (0,), (2**40,), (1, 2, 3, 4), (2**40, 2**40)):
            _read_or_refuse(file.metadata, file.shapes | {tensor: shape}, file.values)


def _read_or_refuse(
    metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]], values: dict[str, list[float]]
) -> None:
    with contextlib.suppress(CheckpointError):
        gguf = config_of(metadata, shapes, lambda name: values[name])
        parse_model_config(gguf.config)
        tensor_names(gguf, shapes)


def test_the_router_of_glm_4_7_flash_is_known_by_its_size() -> None:
    """Its files do not say how scores are made, and llama.cpp knows it by layers and tokens."""
    file = converted("deepseek-v3")
    shapes = file.shapes | {"token_embd.weight": (154880, 64)}
    changes = {"block_count": 47, "vocab_size": 154880, "expert_gating_func": None}
    flash = replace(file, shapes=shapes)
    config = flash.read(**{f"deepseek2.{key}": value for key, value in changes.items()}).config
    assert config["model_type"] == "deepseek_v3"
    older = replace(
        file, shapes={name: s for name, s in file.shapes.items() if "probs" not in name}
    )
    assert (
        older.read(**{"deepseek2.expert_gating_func": None}).config["model_type"] == "deepseek_v2"
    )


def test_mistral_without_yarn_scales_no_queries() -> None:
    file = converted("ministral3")
    changes = {"mistral3.rope.scaling.type": None, "mistral3.rope.scaling.factor": None,
               "mistral3.rope.scaling.attn_factor": None}  # fmt: skip
    plain = file.read(**changes, **{"mistral3.attention.temperature_scale": None}).config
    assert parse_model_config(plain).architecture == "MistralForCausalLM"
    with pytest.raises(
        CheckpointError, match=r"attention\.temperature_scale = 0\.5.* is not implemented"
    ):
        file.read(**changes)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("mixtral", "blk.0.attn_q.bias", "biases of attention in a mixture of experts"),
        (
            "deepseek-v2",
            "rope_freqs.weight",
            r"rope_freqs\.weight is not implemented for deepseek2",
        ),
        ("phi3", "rope_factors_long.weight", r"rope_factors_short\.weight is missing"),
    ],
)
def test_tensors_that_change_the_computation_are_refused(
    name: str, tensor: str, words: str
) -> None:
    file = converted(name)
    with pytest.raises(CheckpointError, match=words):
        replace(file, shapes=file.shapes | {tensor: (8,)}).read()


def test_scaled_and_other_ropes_of_gemma_4_are_refused() -> None:
    file = converted("gemma4")
    with pytest.raises(CheckpointError, match=r"rope\.scaling\.type = 'yarn' is not implemented"):
        file.read(**{"gemma4.rope.scaling.type": "yarn"})
    with pytest.raises(CheckpointError, match="must have 1 for pairs of channels that rotate"):
        replace(file, values={"rope_freqs.weight": [2.0] * 32}).read()


def test_lists_that_switch_off_are_listed() -> None:
    unread = converted("granite").read(**{"granite.deepstack_mapping": [-1, -1, -1]}).unread
    assert unread == ("granite.deepstack_mapping",)
