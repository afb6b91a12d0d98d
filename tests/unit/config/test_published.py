"""config.json files as their owners published them: read, or refused for what Freight does not
have.
"""

import json
from pathlib import Path

import pytest
from tests.refusals import refuses
from tests.unit.config.test_model import config, num_parameters, parsed

from freight.cache.spec import cache_spec
from freight.checkpoint.layouts import read_scheme
from freight.errors import CheckpointError, ConfigError
from freight.fp8.formats import Format
from freight.model.config.keys import HARMLESS
from freight.model.config.layer import MoEConfig
from freight.model.config.mechanisms import MECHANISMS
from freight.model.config.parse import parse_model_config
from freight.model.open import read_model_config
from freight.model.shapes import tensor_shapes
from freight.settings.engine import EngineArgs, KVCacheConfig, names_of

FILES = sorted((Path(__file__).parents[2] / "fixtures/published").glob("*.json"))
LACKS = "lacks text_config"
REFUSED = {  # words that the error has, by the beginning of a file's name; every other file is read
    "MiniMaxAI--MiniMax-M3": "sparse attention",
    "deepseek-ai--DeepSeek-V4": "compressed keys",
    "meta-llama--Llama-4": "chunks",
    "moonshotai--Kimi-K3": "recurrent state",
    "nvidia--Llama-3_3-Nemotron": "block_configs",
    "sgl-project--DeepSeek-V4": "compressed keys",
    "stepfun-ai--Step-3.7": LACKS,
}


# null or false in the files that have them; gating_types repeats Laguna's `gating` for each layer
SWITCHED_OFF = frozenset(
    [
        "use_mrope",
        "gating_types",
        "expert_intermediate_size",
        "cross_attention_hidden_size",
        "tie_encoder_decoder",
    ]
)


def read(file: Path):
    content = json.loads(file.read_text())
    return read_model_config(content), read_scheme(content, None)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_published_file_is_read_or_refused_for_what_freight_does_not_have(file: Path) -> None:
    words = next((words for name, words in REFUSED.items() if file.stem.startswith(name)), None)
    if words is None:
        model, _ = read(file)
        assert model.num_layers > 1
        assert SWITCHED_OFF.issuperset(model.unread_keys.unknown)
        return
    with pytest.raises(CheckpointError) as error:
        read(file)
    assert words in str(error.value)
    assert words == LACKS or any(mechanism.name in str(error.value) for mechanism in MECHANISMS)


def test_most_of_the_files_are_there() -> None:
    refused = [file for file in FILES if any(file.stem.startswith(name) for name in REFUSED)]
    assert len(FILES) >= 80
    assert len(FILES) - len(refused) >= 48


@pytest.mark.parametrize(
    (
        "name",
        "parameters",
        "kv_bytes",
    ),  # as their owners state them; 2 x layers x KV heads x head size x 2 bytes
    [
        ("meta-llama--Meta-Llama-3.1-8B", 8_030_261_248, 2 * 32 * 8 * 128 * 2),
        ("meta-llama--Meta-Llama-3.1-70B", 70_553_706_496, 2 * 80 * 8 * 128 * 2),
        ("meta-llama--Meta-Llama-3.1-405B", 405_853_388_800, 2 * 126 * 8 * 128 * 2),
        ("Qwen--Qwen3-0.6B", 596_049_920, 2 * 28 * 8 * 128 * 2),
        ("Qwen--Qwen3-8B", 8_190_735_360, 2 * 36 * 8 * 128 * 2),
        ("Qwen--Qwen3-32B-FP8-Static-PerTensor", 32_762_123_264, 2 * 64 * 8 * 128 * 2),
        ("Qwen--Qwen3-30B-A3B", 30_532_122_624, 2 * 48 * 4 * 128 * 2),
        ("Qwen--Qwen3-235B-A22B", 235_093_634_560, 2 * 94 * 4 * 128 * 2),
        ("Qwen--Qwen3-Coder-480B-A35B-Instruct", 480_154_875_392, 2 * 62 * 8 * 128 * 2),
        ("mistralai--Mixtral-8x7B-v0.1", 46_702_792_704, 2 * 32 * 8 * 128 * 2),
        ("meta-llama--Llama-2-7b-hf", 6_738_415_616, 2 * 32 * 32 * 128 * 2),
        ("Qwen--Qwen2.5-7B", 7_615_616_512, 2 * 28 * 4 * 128 * 2),
        ("openai--gpt-oss-20b", 20_914_757_184, 2 * 24 * 8 * 64 * 2),
        ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31_577_940_288, 2 * 6 * 2 * 128 * 2),
        ("nvidia--Nemotron-H-56B-Base-8K", 56_324_350_464, 2 * 10 * 8 * 128 * 2),
    ],
)
def test_sizes_are_those_that_are_published(name: str, parameters: int, kv_bytes: int) -> None:
    model, _ = read(next(file for file in FILES if file.stem == name))
    assert num_parameters(model) == parameters
    mixers = model.attention.values()
    assert sum(mixer.num_kv_heads * (mixer.k_dim + mixer.v_dim) * 2 for mixer in mixers) == kv_bytes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # with the embedding; without a pooler behind the states, which is not read
        ("BAAI--bge-m3", 566_705_152),
        ("sentence-transformers--all-MiniLM-L6-v2", 22_565_376),
        ("answerdotai--ModernBERT-base", 149_014_272),
        ("google--embeddinggemma-300m", 302_863_104),
    ],
)
def test_encoders_as_published(name: str, parameters: int) -> None:
    model, _ = read(next(file for file in FILES if file.stem == name))
    assert model.attends_both_ways
    assert not model.has_head
    assert num_parameters(model) == parameters


@pytest.mark.parametrize("name", ["stepfun-ai--Step-3.7-Flash", "stepfun-ai--Step-3.7-Flash-FP8"])
def test_step_as_published_is_read_once_its_keys_are_those_of_a_language_model(name: str) -> None:
    text = json.loads(next(file for file in FILES if file.stem == name).read_text())
    outside = {"model_type": "step3p7", "architectures": ["Step3p7ForConditionalGeneration"]}
    scheme = {key: text.pop(key) for key in ("quantization_config",) if key in text}
    model = read_model_config(
        {**outside, **scheme, "text_config": {**text, "model_type": "step3p5"}}
    )
    assert model.unread_keys.unknown == ()
    windows = [layer.mixer.window for layer in model.layers]
    assert (windows.count(None), windows.count(512), windows[0]) == (12, 33, None)
    experts = [isinstance(layer.feed_forward, MoEConfig) for layer in model.layers]
    assert experts == [False] * 3 + [True] * 42
    assert model.prediction_layers == 3
    assert num_parameters(model) == pytest.approx(196e9, rel=0.02)


def test_mimo_as_published() -> None:
    model, scheme = read(next(file for file in FILES if file.stem == "XiaomiMiMo--MiMo-V2-Flash"))
    mixers = [layer.mixer for layer in model.layers]
    expected = [0, *range(5, 48, 6)]
    assert [index for index, mixer in enumerate(mixers) if mixer.window is None] == expected
    assert {
        (m.num_kv_heads, m.k_dim, m.v_dim, m.sinks, m.v_factor) for m in mixers if m.window is None
    } == {(4, 192, 128, False, 0.707)}
    assert {
        (m.num_kv_heads, m.k_dim, m.v_dim, m.sinks, m.window)
        for m in mixers
        if m.window is not None
    } == {(8, 192, 128, True, 129)}
    assert [(rope.theta, rope.rotary_dim) for rope in model.ropes] == [(5e6, 64), (1e4, 64)]
    assert [isinstance(layer.feed_forward, MoEConfig) for layer in model.layers] == [False] + [
        True
    ] * 47
    assert scheme.weight_format is Format.E4M3FN
    assert num_parameters(model) == pytest.approx(309e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "in_four_bits", "left_out", "words"),
    [
        (
            "moonshotai--Kimi-K2.5",
            "model.language_model.layers.5.mlp.experts.17.down_proj",
            "model.language_model.layers.5.self_attn.o_proj",
            "compressed-tensors: weights in INT4, scales per 32 inputs, activations plain",
        ),
        (
            "nvidia--Gemma-4-31B-IT-NVFP4",
            "model.language_model.layers.5.mlp.down_proj",
            "model.language_model.layers.5.self_attn.o_proj",
            "modelopt: weights in NVFP4, scales per 16 inputs, activations plain; KV cache fp8_e4m3fn, no static "
            "scales promised",
        ),
    ],
)
def test_weights_in_four_bits_as_published(
    name: str, in_four_bits: str, left_out: str, words: str
) -> None:
    model, scheme = read(next(file for file in FILES if file.stem == name))
    assert f"{in_four_bits}.weight" in tensor_shapes(model)
    declared = scheme.linear(in_four_bits)
    assert declared is not None
    assert declared.bits == 4
    assert scheme.linear(left_out) is None
    assert scheme.description == words


def test_rotations_are_read_over_where_they_are_part_of_the_weights() -> None:
    content = json.loads(
        next(file for file in FILES if file.stem == "poolside--Laguna-XS.2-FP8").read_text()
    )
    steps = content["quantization_config"]["transform_config"]["config_groups"]["R1"]["apply"]
    assert {step["location"] for step in steps} == {"weight_output", "weight_input"}
    assert read_scheme(content, None).weight_format is Format.E4M3FN
    steps[1]["location"] = "input"
    with refuses(CheckpointError, "R1 at 'input'", "not implemented"):
        read_scheme(content, None)


HUB_KEYS = {  # what files on the hub have beside the keys of their family
    "model_max_length": 4096, "seq_length": 2048, "pad_token": "</s>", "bos_token": "<s>", "eos_token": "</s>",
    "unk_token": "<unk>", "model_name": "x", "description": "a model", "author": "somebody", "license": "mit",
    "flash_attn": True, "use_flash_attn": True, "use_flash_attention_2": True, "neftune_noise_alpha": 5.0,
    "lora_alpha": 16, "lora_r": 8, "rope_ratio": 1.0, "context_length": 4096, "train_batch_size": 8,
    "gradient_checkpointing": True, "learning_rate": 1e-5, "language": "en", "tags": ["chat"], "base_model": "x/y",
    "max_window_layers": 28, "cache_implementation": "hybrid", "pretraining_tp": 2, "ep_size": 8,
    "unsloth_version": "2025.1", "transformers_version": "4.40.0", "use_cache": True, "initializer_range": 0.02,
    "attention_dropout": 0.1, "hidden_dropout": 0.1, "pad_token_id": 0, "sep_token_id": 3, "tokenizer_class": "X",
    "auto_map": {"AutoConfig": "x.Y"}, "torchscript": False, "id2label": {"0": "a"}, "num_labels": 2,
    "task_specific_params": {"a": 1}, "output_attentions": False, "max_length": 20, "do_sample": True,
    "temperature": 0.7, "_name_or_path": "x",
}  # fmt: skip


@pytest.mark.parametrize("key", HUB_KEYS)
def test_a_key_that_changes_nothing_is_read_over_and_named(key: str) -> None:
    model = parsed(**{key: HUB_KEYS[key]})
    assert model == parsed()
    line = model.unread_keys.describe()
    if key == "rope_ratio":  # read: only 1 is computed
        assert line is None
        return
    assert line is not None
    assert key in line
    assert (key in model.unread_keys.harmless) == (key in HARMLESS or key.startswith("_"))


def test_there_are_47_of_them() -> None:
    assert len(HUB_KEYS) == 47


COMPUTING = {
    "alibi": True, "scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256, "qk_layernorm": True,
    "rope_ratio": 50.0, "use_dynamic_ntk": True, "use_logn_attn": True, "logit_scale": 0.0625,
    "residual_multiplier": 0.22, "embedding_multiplier": 12.0, "attention_multiplier": 0.0078, "clip_qkv": 8.0,
    "num_experts": 8, "kv_lora_rank": 512, "attention_chunk_size": 8192, "query_pre_attn_scalar": 256,
    "use_parallel_residual": True, "new_decoder_architecture": True, "index_topk": 2048, "swiglu_limit": 7.0,
    "sliding_window": 4096, "partial_rotary_factors": [0.5], "dual_chunk_attention_config": {"chunk_size": 8},
}  # fmt: skip


@pytest.mark.parametrize("key", COMPUTING)
def test_a_key_that_computes_is_refused_and_can_be_ignored_by_name(key: str) -> None:
    written = config(**{key: COMPUTING[key]})
    with pytest.raises(CheckpointError, match=rf"{key} = .*--ignore-config-keys {key}"):
        parse_model_config(written)
    model = parse_model_config(written, ignore_keys=[key])
    assert (model.ignored_keys, model.unread_keys.ignored) == ((key,), (key,))
    assert f"{key} (--ignore-config-keys" in str(model.unread_keys.describe())
    plain = parsed()
    assert model != plain  # the fingerprint of an engine has the model in it
    assert repr(model) != repr(plain)


def test_only_a_key_that_is_refused_can_be_ignored() -> None:
    with refuses(ConfigError, "alib", "no such key", "alibi"):
        parse_model_config(config(alibi=True), ignore_keys=["alib"])
    with refuses(ConfigError, "rope_theta", "reads"):
        parse_model_config(config(rope_theta=5e5), ignore_keys=["rope_theta"])
    assert parse_model_config(config(model_name="x"), ignore_keys=["model_name"]).ignored_keys == ()
    with refuses(ConfigError, "all of config.json"):
        read_model_config({"model_type": "gpt_neox", "a": 1}, ignore_keys=["a"])


def test_names_may_come_as_one_text() -> None:
    assert (
        names_of("alibi,scale_emb")
        == names_of(["alibi", "scale_emb"])
        == names_of("alibi scale_emb")
    )
    expected = ("alibi", "scale_emb")
    assert EngineArgs(ignore_config_keys="alibi, scale_emb").ignore_config_keys == expected
    with pytest.raises(ConfigError, match="ignore_config_keys is 7"):
        EngineArgs(ignore_config_keys=7)  # type: ignore[arg-type]


def moe(model_type: str, **more: object) -> dict[str, object]:
    """A small config.json of a family that `config` does not have."""
    said = config(moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2, **more)
    return {**said, "model_type": model_type, "architectures": None}


def test_published_spellings_of_single_families() -> None:
    assert parse_model_config(moe("qwen3_moe", use_qk_norm=True, shared_expert_intermediate_size=0))
    with pytest.raises(CheckpointError, match="use_qk_norm = False"):
        parse_model_config(moe("qwen3_moe", use_qk_norm=False))
    hy = parse_model_config(moe("hy_v3", expert_hidden_dim=48))
    assert hy == parse_model_config(moe("hy_v3"))
    without = {
        key: value for key, value in moe("hy_v3", expert_hidden_dim=48).items() if key[:3] != "moe"
    }
    assert hy == parse_model_config(without)
    with refuses(CheckpointError, "expert_hidden_dim = 32", "moe_intermediate_size = 48"):
        parse_model_config(moe("hy_v3", expert_hidden_dim=32))
    half = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    assert parsed("glm4", head_dim=26, rope_parameters=half).ropes[0].rotary_dim == 6


MELLUM = {  # as JetBrains' Mellum2-12B-A2.5B has it
    "architectures": ["MellumForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "dtype": "bfloat16", "eos_token_id": 28, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2304,
    "initializer_range": 0.02, "intermediate_size": 7168, "max_position_embeddings": 131072, "max_window_layers": 0,
    "model_type": "mellum", "moe_intermediate_size": 896, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "output_router_logits": False, "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001, "sliding_window": 1024,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 98304, "use_sliding_window": True,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 7,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn", "rope_theta": 500000.0, "factor": 16.0, "original_max_position_embeddings": 8192,
            "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.2772588722239782,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    },
}  # fmt: skip


def test_mellum_2_as_published() -> None:
    model = parse_model_config(MELLUM)
    assert [layer.mixer.window for layer in model.layers[:4]] == [1024, 1024, 1024, None]
    assert num_parameters(model) == pytest.approx(12.1e9, rel=0.02)


@pytest.mark.parametrize(
    ("form", "size"),
    [
        (Format.INT8, 54_018_048),
        (Format.E4M3FN, 54_018_048),
        (Format.BFLOAT16, 91_176_960),
        (Format.FLOAT32, 166_674_432),
    ],
)
def test_bytes_of_a_sequences_states(form: Format, size: int) -> None:
    """48 gated delta nets as in Qwen3.6-27B: S, 128 x 128, of 48 heads, with a scale for each head
    and value channel where it is quantized; 16 rows of k, u and decay; 3 inputs of the convolution.
    """
    model, _ = read(next(file for file in FILES if file.stem == "Qwen--Qwen3.5-27B"))
    spec = cache_spec(KVCacheConfig(Format.BFLOAT16, None, None, None, state=form), model, 16)
    scales = 2 * 48 * 128 if form.is_quantized else 0
    rows = 16 * (16 * 128 * 2 + 48 * 128 * 2 + 48 * 4)
    assert (
        spec.bytes_per_state
        == 48 * (48 * 128 * 128 * form.bytes + scales + rows + 3 * 10_240 * 2)
        == size
    )
