"""Latent attention (MLA) in config.json: models as published, defaults, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.config.test_model import num_parameters
from transformers import AutoConfig

from freight.cache.spec import cache_spec
from freight.errors import CheckpointError, ConfigError
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.fp8.scheme import KVScales, LayerScales, Scheme
from freight.model.config.latent import beyond_dense
from freight.model.config.layer import DenseConfig, MoEConfig
from freight.model.config.model import ModelConfig
from freight.model.mixers.kimi_delta.spec import KimiDeltaConfig
from freight.model.mixers.latent.spec import IndexerConfig, LatentConfig
from freight.model.open import read_model_config
from freight.model.shapes import tensor_shapes
from freight.operands.routing import Routing, Scoring
from freight.quantizer.modules import kept_modules
from freight.settings.device import DeviceFacts, DeviceKind
from freight.settings.engine import EngineArgs, KVCacheConfig
from freight.settings.resolve import resolve

PUBLISHED = Path(__file__).parents[2] / "fixtures/published"
ROWS = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
}
NEEDED = {"deepseek_v2": {"num_experts_per_tok": 6}}  # what has no default
FLASH = {
    "model_type": "glm4_moe_lite",
    "architectures": [ROWS["glm4_moe_lite"]],
    "dtype": "bfloat16",
}
MISTRAL_4_ROPE = {"rope_type": "yarn", "factor": 128.0, "original_max_position_embeddings": 8192, "mscale": 1.0,
                  "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
CPU = DeviceFacts(DeviceKind.CPU, "a CPU", Format.E4M3FN, 2**30, 2**30, 2)
GPU = DeviceFacts(DeviceKind.CUDA, "a GPU", Format.E4M3FN, 2**30, 2**30, 2)
R1 = json.loads((PUBLISHED / "deepseek-ai--DeepSeek-R1.json").read_text())


def latent_of(model: ModelConfig) -> LatentConfig:
    (mixer,) = {layer.mixer for layer in model.layers}
    assert isinstance(mixer, LatentConfig)
    return mixer


def bytes_per_token(
    model: ModelConfig, format: Format, granularity: Granularity | None = None
) -> int:
    return cache_spec(KVCacheConfig(format, granularity, None, None), model, 16).bytes_per_token


@pytest.mark.parametrize("name", ["R1", "V3", "V3.1"])
def test_deepseek_as_published(name: str) -> None:
    model = read_model_config(
        json.loads((PUBLISHED / f"deepseek-ai--DeepSeek-{name}.json").read_text())
    )
    assert num_parameters(model) == pytest.approx(671.0e9, rel=1e-3)
    sharper = 0.1 * math.log(40) + 1
    assert latent_of(model) == LatentConfig(
        128, 1536, 512, 128, 64, 128, softmax_scale=192**-0.5 * sharper**2
    )
    assert (model.ropes[0].rotary_dim, model.ropes[0].interleaved) == (64, True)
    assert model.prediction_layers == 1
    parts = [type(layer.feed_forward) for layer in model.layers]
    assert parts == [DenseConfig] * 3 + [MoEConfig] * 58
    assert bytes_per_token(model, Format.BFLOAT16) == 61 * 576 * 2 == 70272
    assert bytes_per_token(model, Format.E4M3FN, Granularity.TOKEN) == 61 * 578 == 35258
    assert bytes_per_token(model, Format.E4M3FN) == 61 * 576
    assert (
        bytes_per_token(model, Format.E4M3FN, Granularity.GROUP)
        == 61 * (512 + 4 * 2 + 64 * 2)
        == 39528
    )


def test_glm_4_7_flash_by_the_defaults_of_transformers() -> None:
    model = read_model_config(FLASH)
    assert num_parameters(model) == pytest.approx(29.9e9, rel=5e-3)
    assert latent_of(model) == LatentConfig(20, 768, 512, 192, 64, 256, softmax_scale=1 / 16)
    assert model.norm_eps == 1e-5  # and the latents' norms keep the 1e-6 of transformers' class
    assert [isinstance(layer.feed_forward, MoEConfig) for layer in model.layers] == [False] + [
        True
    ] * 46
    assert bytes_per_token(model, Format.BFLOAT16) == 54144
    assert bytes_per_token(model, Format.E4M3FN, Granularity.TOKEN) == 27166
    assert bytes_per_token(model, Format.E4M3FN, Granularity.GROUP) == 30456
    assert bytes_per_token(model, Format.INT8, Granularity.GROUP) == 30456


def small_4(**more: Any) -> dict[str, Any]:
    """Mistral Small 4 in the form that its keys have in a file: a text model beside a vision model."""
    text = {"model_type": "mistral4", "head_dim": 128, "qk_head_dim": 128, "num_key_value_heads": 32, "n_group": None,
            "rope_parameters": {**MISTRAL_4_ROPE, "type": "yarn", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                                "max_position_embeddings": 1048576}, **more}  # fmt: skip
    return {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16",
            "vision_config": {"model_type": "pixtral"}, "tie_word_embeddings": False, "text_config": text}  # fmt: skip


def test_mistral_small_4_by_the_defaults_of_transformers() -> None:
    model = read_model_config(small_4())
    alone = read_model_config(
        {"model_type": "mistral4", "architectures": [ROWS["mistral4"]], "dtype": "bfloat16"}
    )
    assert (model.layers, model.ropes) == (alone.layers, alone.ropes)
    assert num_parameters(model) == pytest.approx(119e9, rel=2e-3)
    sharper = 0.1 * math.log(128) + 1
    assert latent_of(model) == LatentConfig(
        32, 1024, 256, 64, 64, 128, softmax_scale=128**-0.5 * sharper**2
    )
    (rope,) = model.ropes
    assert (rope.rotary_dim, rope.interleaved) == (64, True)
    assert rope.parameters["llama_4_scaling_beta"] == 0.1
    assert model.position_limit == 1048576
    experts = {layer.feed_forward for layer in model.layers}
    assert [
        (moe.routing.scoring, moe.choice_bias) for moe in experts if isinstance(moe, MoEConfig)
    ] == [(Scoring.SOFTMAX, False)]
    assert len(experts) == 1


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"head_dim": 64}, "head_dim = 64"),
        (
            {"partial_rotary_factor": 0.25},
            "partial_rotary_factor = 0.25, but qk_rope_head_dim = 64 of the 128",
        ),
        (
            {"rope_parameters": {**MISTRAL_4_ROPE, "partial_rotary_factor": 1.0}},
            "partial_rotary_factor = 1.0 in rope_parameters, but qk_rope_head_dim = 64 of the 128",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "llama_4_scaling_beta"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"rope_interleave": False}, "rope_interleave"),
    ],
)
def test_what_mistral_4_does_not_compute_is_refused(more: dict[str, Any], word: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read_model_config(small_4(**more))
    assert word in str(error.value)


@pytest.mark.parametrize(("value", "normed"), [(True, True), (False, False), (None, False)])
def test_null_does_not_norm_the_weights_of_experts(value: bool | None, normed: bool) -> None:
    """As transformers reads it; a file without the key has the default, which norms them."""
    named = [
        read_model_config(config)
        for config in ({**R1, "norm_topk_prob": value}, small_4(norm_topk_prob=value))
    ]
    experts = [model.layers[-1].feed_forward for model in named]
    assert [one.routing.normed for one in experts if isinstance(one, MoEConfig)] == [normed, normed]


# as DeepSeek-V2's and V2-Lite's files have them
V2: dict[str, Any] = {
    "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 5120,
    "intermediate_size": 12288, "num_hidden_layers": 60, "num_attention_heads": 128, "num_key_value_heads": 128,
    "max_position_embeddings": 163840, "q_lora_rank": 1536, "kv_lora_rank": 512, "first_k_dense_replace": 1,
    "moe_intermediate_size": 1536, "moe_layer_freq": 1, "n_group": 8, "topk_group": 3, "n_routed_experts": 160,
    "num_experts_per_tok": 6, "n_shared_experts": 2, "norm_topk_prob": False, "routed_scaling_factor": 16.0,
    "scoring_func": "softmax", "topk_method": "group_limited_greedy", "torch_dtype": "bfloat16", "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.707,
                     "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1},
}  # fmt: skip
LITE = V2 | {
    "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16, "n_group": 1,
    "num_key_value_heads": 16, "q_lora_rank": None, "moe_intermediate_size": 1408, "n_routed_experts": 64,
    "topk_group": 1, "topk_method": "greedy", "routed_scaling_factor": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("said", "parameters", "routing"),
    [
        (
            V2,
            235.7e9,
            Routing(160, 6, normed=False, factor=16.0, num_groups=8, top_groups=3, group_best=1),
        ),
        (LITE, 15.7e9, Routing(64, 6, normed=False, group_best=1)),
        (
            LITE | {"n_group": 8, "topk_group": 3},
            15.7e9,
            Routing(64, 6, normed=False, group_best=1),
        ),
        (LITE | {"norm_topk_prob": True}, 15.7e9, Routing(64, 6, normed=False, group_best=1)),
    ],
)
def test_deepseek_v2(said: dict[str, Any], parameters: float, routing: Routing) -> None:
    model = read_model_config(said)
    assert num_parameters(model) == pytest.approx(parameters, rel=2e-3)
    sharper, mixer = 0.1 * 0.707 * math.log(40) + 1, latent_of(model)
    assert (mixer.q_rank, mixer.softmax_scale) == (said["q_lora_rank"], 192**-0.5 * sharper**2)
    parts = [layer.feed_forward for layer in model.layers]
    assert [isinstance(part, MoEConfig) for part in parts] == [False] + [True] * (
        said["num_hidden_layers"] - 1
    )
    assert {part.routing for part in parts if isinstance(part, MoEConfig)} == {routing}
    assert model.unread_keys.unknown == ()


@pytest.mark.parametrize(
    "more",
    [
        {"moe_layer_freq": 2},
        {"topk_method": "noaux_tc"},
        {"scoring_func": "sigmoid"},
        {"attention_bias": True},
    ],
)
def test_what_deepseek_v2_does_not_compute_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(more))):
        read_model_config(V2 | more)


@pytest.mark.parametrize(
    ("name", "parameters", "latent", "theta"),
    [
        ("deepseek-ai--DeepSeek-V3.2", 671.0e9, (128, 1536, 512, 128, 64, 128), 1e4),
        ("zai-org--GLM-5", 744e9, (64, 2048, 512, 192, 64, 256), 1e6),
        ("zai-org--GLM-5.1-FP8", 744e9, (64, 2048, 512, 192, 64, 256), 1e6),
        ("zai-org--GLM-5.2-FP8", 744e9, (64, 2048, 512, 192, 64, 256), 8e6),
    ],
)
def test_sparse_attention_as_published(
    name: str, parameters: float, latent: tuple[int, ...], theta: float
) -> None:
    """Dense up to index_topk tokens; keys about the indexer, and GLM-5.2's head_dim of 192, are
    read over.
    """
    content = json.loads((PUBLISHED / f"{name}.json").read_text())
    model, mixer = read_model_config(content), latent_of(read_model_config(content))
    sizes = (
        mixer.num_heads,
        mixer.q_rank,
        mixer.latent,
        mixer.nope,
        mixer.rotated,
        mixer.head_size,
    )
    assert sizes == latent
    assert num_parameters(model) == pytest.approx(parameters, rel=5e-3)
    assert (model.dense_limit, model.max_position_embeddings) == (2048, 2048)
    assert model.position_limit == 2048
    assert (model.ropes[0].theta, model.ropes[0].rotary_dim) == (theta, 64)
    assert model.unread_keys.unknown == ()
    parts = [isinstance(layer.feed_forward, MoEConfig) for layer in model.layers]
    assert parts == [False] * 3 + [True] * (len(parts) - 3)
    shorter = read_model_config(content | {"max_position_embeddings": 1024})
    assert (shorter.dense_limit, shorter.max_position_embeddings) == (2048, 1024)


FIRST = "zai-org--GLM-5.2"


@pytest.mark.parametrize(
    ("name", "indexer", "context", "layers"),
    [
        ("deepseek-ai--DeepSeek-V3.2", IndexerConfig(64, 128, 2048), 163840, 61),
        ("zai-org--GLM-5", IndexerConfig(32, 128, 2048, interleaved=True), 202752, 78),
        ("zai-org--GLM-5.2", IndexerConfig(32, 128, 2048, interleaved=True), 1048576, 21),
    ],
)
def test_indexers_as_published(
    name: str, indexer: IndexerConfig, context: int, layers: int
) -> None:
    """Layers have them in contexts beyond index_topk alone: five tensors each, and keys in the cache."""
    dense = read_model_config(json.loads((PUBLISHED / f"{name}.json").read_text()))
    model = beyond_dense(dense)
    assert (model.dense_limit, model.max_position_embeddings) == (None, context)
    assert model.position_limit == context
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, LatentConfig)]
    assert len(mixers) == model.num_layers
    owners = [i for i, mixer in enumerate(mixers) if mixer.indexer is not None]
    assert len(owners) == layers
    assert {mixers[i].indexer for i in owners} == {indexer}
    for i, mixer in enumerate(mixers):
        assert mixer.chosen_by == max(owner for owner in owners if owner <= i)
    assert mixers[0].q_rank is not None
    own = (
        indexer.num_heads * 128 * mixers[0].q_rank
        + (128 + indexer.num_heads) * model.hidden_size
        + 256
    )
    assert num_parameters(model) - num_parameters(dense) == layers * own
    shapes = tensor_shapes(model)
    assert sum(".indexer." in tensor for tensor in shapes) == 5 * layers
    assert not any(".indexer." in tensor for tensor in tensor_shapes(dense))
    assert "model.layers.0.self_attn.indexer.weights_proj" in kept_modules(model)
    for format, granularity, size in (
        (Format.BFLOAT16, None, 256),
        (Format.E4M3FN, Granularity.TOKEN, 132),
        (Format.INT8, Granularity.GROUP, 132),
    ):
        kinds = format, granularity
        assert bytes_per_token(model, *kinds) - bytes_per_token(dense, *kinds) == layers * size


def test_which_layers_have_an_indexer() -> None:
    published = json.loads((PUBLISHED / f"{FIRST}.json").read_text())
    types = published.pop("indexer_types")

    def chosen_by(**more: Any) -> tuple[int, ...]:
        model = read_model_config({**published, **more})
        assert model.sparse is not None
        return model.sparse.chosen_by[:8]

    assert chosen_by(indexer_types=types) == chosen_by() == (0, 1, 2, 2, 2, 2, 6, 6)
    assert chosen_by(index_topk_pattern="FSSF" * 20) == (0, 0, 0, 3, 4, 4, 4, 7)
    assert chosen_by(index_topk_freq=1) == tuple(range(8))
    assert chosen_by(index_topk_freq=2, index_skip_topk_offset=1) == (0, 0, 2, 2, 4, 4, 6, 6)
    for wrong in (["shared"] * 78, ["full"] * 77, ["full", "half"] * 39, 3):
        with pytest.raises(CheckpointError, match="indexers of 78 layers"):
            chosen_by(indexer_types=wrong)


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"index_head_dim": 96}, "index_head_dim = 96"),
        ({"index_head_dim": 32}, "qk_rope_head_dim = 64"),
        ({"q_lora_rank": None}, "q_lora_rank = None"),
    ],
)
def test_an_indexer_that_is_not_computed_is_refused_beyond_dense(
    more: dict[str, Any], word: str
) -> None:
    published = json.loads((PUBLISHED / "zai-org--GLM-5.json").read_text())
    model = read_model_config({**published, **more})
    with pytest.raises(CheckpointError, match=word):
        beyond_dense(model)


@pytest.mark.parametrize("model_type", ROWS)
def test_absent_keys_mean_what_transformers_takes(model_type: str) -> None:
    said = {
        "model_type": model_type,
        "architectures": [ROWS[model_type]],
        **NEEDED.get(model_type, {}),
    }
    ours, theirs = read_model_config(said), AutoConfig.for_model(**said)
    mixer, names = (
        latent_of(ours),
        "num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim",
    )
    assert (mixer.num_heads, mixer.q_rank, mixer.latent, mixer.nope, mixer.rotated) == tuple(
        getattr(theirs, name) for name in names.split()
    )
    assert mixer.head_size == theirs.v_head_dim
    assert (ours.num_layers, ours.hidden_size, ours.vocab_size, ours.norm_eps, ours.max_position_embeddings) == (
        theirs.num_hidden_layers, theirs.hidden_size, theirs.vocab_size, theirs.rms_norm_eps,
        getattr(theirs, "index_topk", theirs.max_position_embeddings),
    )  # fmt: skip
    experts = ours.layers[-1].feed_forward
    assert isinstance(experts, MoEConfig)
    routing = experts.routing
    assert (routing.num_experts, routing.top_k, routing.num_groups, routing.top_groups, routing.factor) == (
        theirs.n_routed_experts, theirs.num_experts_per_tok, theirs.n_group or 1, theirs.topk_group or 1,
        theirs.routed_scaling_factor,
    )  # fmt: skip
    assert experts.intermediate_size == theirs.moe_intermediate_size
    assert routing.normed == theirs.norm_topk_prob
    assert experts.shared == DenseConfig(theirs.n_shared_experts * theirs.moe_intermediate_size)
    assert ours.bos_token_id == theirs.bos_token_id
    assert list(ours.eos_token_ids) == [theirs.eos_token_id]
    assert ours.ropes[0].theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("model_type", ROWS)
def test_what_transformers_writes_is_read(model_type: str, tmp_path: Path) -> None:
    rank = 24 if "index_topk" in AutoConfig.for_model(model_type).to_dict() else None
    more = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": rank,
        "num_hidden_layers": 4,
    }
    theta: dict[str, Any] = {"rope_theta": 5e5}
    if (
        model_type == "mistral4"
    ):  # has a theta in its default rope, which one outside does not change
        theta = {"rope_parameters": {**MISTRAL_4_ROPE, **theta}}
    AutoConfig.for_model(model_type, **more, **theta, **NEEDED.get(model_type, {})).save_pretrained(
        tmp_path
    )
    written = json.loads((tmp_path / "config.json").read_text())
    ours = read_model_config({**written, "architectures": [ROWS[model_type]]})
    assert (ours.num_layers, latent_of(ours).q_rank, ours.ropes[0].theta) == (4, rank, 5e5)
    assert (latent_of(ours).q_sizes[0] == latent_of(ours).q_sizes[1]) == (rank is None)


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"num_key_value_heads": 8}, "num_key_value_heads = 8"),
        ({"head_dim": 128}, "head_dim = 128"),
        ({"qk_head_dim": 64}, "qk_head_dim = 64"),
        ({"qk_rope_head_dim": 63}, "odd"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"rope_interleave": None}, "rope_interleave = None"),
        ({"rope_interleave": ""}, "rope_interleave = ''"),
        ({"attention_bias": True}, "attention_bias"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"index_topk": 2048}, "index_topk"),
        ({"rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0}}, "factor"),
    ],
)
def test_what_is_not_computed_is_refused(more: dict[str, Any], word: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read_model_config({**R1, **more})
    assert word in str(error.value)


def settled(model: ModelConfig, facts: DeviceFacts = CPU, **options: Any) -> KVCacheConfig:
    args = EngineArgs(**{"kv_cache_dtype": "fp8", "kv_scales": "group", **options})
    return resolve(args, model, Scheme(), KVScales((None,) * model.num_layers), facts).kv


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_scales_per_group_are_the_default_of_latents_on_a_cpu(dtype: str) -> None:
    model = read_model_config(R1)
    kv = settled(model, kv_cache_dtype=dtype, kv_scales="auto")
    assert (kv.granularity, kv.scale_source) == (Granularity.GROUP, ScaleSource.DYNAMIC)
    assert "per group" in kv.note
    skipping = settled(
        model, kv_cache_dtype=dtype, kv_scales="auto", kv_cache_dtype_skip_layers=("0",)
    )
    assert [skipping.of_layer(layer).granularity for layer in (0, 1)] == [None, Granularity.GROUP]
    assert (
        settled(model, kv_cache_dtype=dtype, kv_scales="dynamic").granularity is Granularity.TOKEN
    )
    narrow = read_model_config({**R1, "kv_lora_rank": 192})
    assert settled(narrow, kv_cache_dtype=dtype, kv_scales="auto").granularity is Granularity.TOKEN
    assert (
        settled(model, kv_cache_dtype=dtype, kv_scales="auto", kernels="reference").granularity
        is Granularity.GROUP
    )


def test_of_a_choice_by_layer_those_per_token_are_per_group_if_no_other_is_static() -> None:
    """Static scales are made for the formats of their layers, and stay; so does a layer in 16 bits."""
    model, static = read_model_config(FLASH), LayerScales((0.1,), (0.1,), Granularity.TENSOR)

    def chosen(*first: Granularity | None) -> KVCacheConfig:
        mixed = (*first, *(Granularity.TOKEN,) * (model.num_layers - len(first)))
        layers = tuple(static if one is Granularity.TENSOR else None for one in mixed)
        args = EngineArgs(kv_cache_dtype="auto", kv_scales="auto")
        return resolve(args, model, Scheme(), KVScales(layers, mixed=mixed), CPU).kv

    measured = chosen(None)
    assert measured.granularity is Granularity.GROUP
    assert [measured.of_layer(layer).granularity for layer in (0, 1)] == [None, Granularity.GROUP]
    assert "layer 0 in 16 bits" in measured.note
    assert "per token" not in measured.note
    partly = chosen(Granularity.TENSOR)
    expected = [Granularity.TENSOR, Granularity.TOKEN]
    assert [partly.of_layer(layer).granularity for layer in (0, 1)] == expected


def test_the_default_is_for_the_layers_that_are_quantized() -> None:
    """Whole groups in these are enough; where no layer stores keys and values, there are none."""
    model = read_model_config(FLASH)
    mixer = model.layers[0].mixer
    assert isinstance(mixer, LatentConfig)
    narrow = replace(model.layers[0], mixer=replace(mixer, latent=192))
    other = replace(model, layers=(narrow, *model.layers[1:]))
    assert settled(other, kv_scales="auto").granularity is Granularity.TOKEN
    for said in ("auto", "group"):
        kv = settled(other, kv_scales=said, kv_cache_dtype_skip_layers="0")
        assert [kv.of_layer(layer).granularity for layer in (0, 1)] == [None, Granularity.GROUP]
    states = tuple(
        replace(layer, mixer=KimiDeltaConfig(2, 16, 4, rank=16)) for layer in model.layers
    )
    assert settled(replace(model, layers=states), kv_scales="auto").granularity is Granularity.TOKEN


def test_elsewhere_the_default_of_latents_is_a_scale_per_token() -> None:
    model = read_model_config(R1)
    assert settled(model, GPU, kv_scales="auto").granularity is Granularity.TOKEN
    assert (
        settled(model, GPU, kv_scales="auto", kernels="reference").granularity is Granularity.GROUP
    )
    fp8 = {"kv_scales": "auto", "kernels": "reference", "attention_compute": "fp8"}
    assert settled(model, **fp8).granularity is Granularity.TOKEN


def test_scales_per_group_are_asked_for_by_name() -> None:
    model = read_model_config(FLASH)
    kv = settled(model)
    assert (kv.format, kv.granularity) == (Format.E4M3FN, Granularity.GROUP)
    assert kv.scale_source == ScaleSource.DYNAMIC
    assert settled(model, kv_cache_dtype="int8").names() == {
        "dtype": "int8", "granularity": "group", "scale_source": "dynamic",
    }  # fmt: skip
    skipped = cache_spec(settled(model, kv_cache_dtype_skip_layers="0"), model, 16)
    assert skipped.bytes_per_token == 46 * 648 + 1152
    assert settled(model, GPU, kernels="reference").granularity is Granularity.GROUP


@pytest.mark.parametrize(
    ("latent", "device", "options", "words"),
    [
        (192, CPU, {}, ("kv_lora_rank", "192", "128", "--kv-scales dynamic")),
        (None, CPU, {}, ("layer 0", "qwen3", "latents", "--kv-scales dynamic")),
        (512, GPU, {}, ("a GPU", "not on GPUs yet", "--kv-scales dynamic", "--device cpu")),
        (512, CPU, {"device": "cuda"}, ("--device cuda", "not on GPUs yet")),
        (
            512,
            CPU,
            {"kv_cache_dtype": "fp8_e5m2"},
            ("fp8_e5m2", "E4M3 and INT8", "--kv-cache-dtype fp8 or int8"),
        ),
        (512, CPU, {"kv_cache_dtype": "bfloat16"}, ("unquantized", "--kv-cache-dtype fp8")),
        (512, CPU, {"kv_cache_dtype": "auto"}, ("unquantized", "--kv-cache-dtype fp8")),
        (
            512,
            CPU,
            {"kernels": "reference", "attention_compute": "fp8"},
            ("--kv-scales group", "--kv-scales dynamic"),
        ),
    ],
)
def test_where_scales_per_group_are_refused(
    latent: int | None, device: DeviceFacts, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    qwen = json.loads((PUBLISHED / "Qwen--Qwen3-8B.json").read_text())
    model = read_model_config(qwen if latent is None else {**FLASH, "kv_lora_rank": latent})
    with pytest.raises(ConfigError) as error:
        settled(model, device, **options)
    assert all(word in str(error.value) for word in words), str(error.value)
