"""Keys of families with Mamba-2: Granite 4 and Nemotron-H, and the models around the latter."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.unit.config.test_model import num_parameters
from transformers import AutoConfig

from freight.cache.spec import cache_spec
from freight.errors import CheckpointError
from freight.fp8.formats import Format
from freight.model.architectures import skipped_parts, tensor_names
from freight.model.config.layer import DenseConfig, MoEConfig
from freight.model.config.model import ModelConfig
from freight.model.mixers.attention.spec import AttentionConfig
from freight.model.mixers.mamba2.spec import Mamba2Config
from freight.model.open import read_model_config
from freight.operands.activation import Activation, GatedActivation
from freight.operands.routing import Scoring
from freight.settings.engine import KVCacheConfig

Json = dict[str, Any]
PUBLISHED = Path(__file__).parents[2] / "fixtures/published"
NEMOTRON: Json = {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"]}
GRANITE: Json = {  # like Granite-4.0-H-Small; written by hand, not compared with the file
    "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "hidden_size": 4096,
    "intermediate_size": 768, "shared_intermediate_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_local_experts": 72, "num_experts_per_tok": 10, "vocab_size": 100352,
    "layer_types": ["attention" if index % 10 == 5 else "mamba" for index in range(40)], "mamba_chunk_size": 256,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False, "position_embedding_type": "nope",
    "attention_multiplier": 0.0078125, "embedding_multiplier": 12, "logits_scaling": 16, "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": True, "max_position_embeddings": 131072, "rope_theta": 10000,
}  # fmt: skip
NAMES = {  # of the fields of Mamba2Config, in order
    "granitemoehybrid": "mamba_n_groups mamba_n_heads mamba_d_head mamba_d_state mamba_d_conv mamba_n_groups "
    "mamba_conv_bias mamba_proj_bias time_step_limit",
    "nemotron_h": "n_groups mamba_num_heads mamba_head_dim ssm_state_size conv_kernel n_groups use_conv_bias use_bias "
    "time_step_limit",
}


def published(name: str) -> ModelConfig:
    model = read_model_config(json.loads((PUBLISHED / f"nvidia--{name}.json").read_text()))
    assert model.unread_keys.unknown == ()
    return model


def kinds(model: ModelConfig) -> str:
    """As `hybrid_override_pattern` has them."""
    letters = {Mamba2Config: "M", AttentionConfig: "*", DenseConfig: "-", MoEConfig: "E"}
    assert all((layer.mixer is None) != (layer.feed_forward is None) for layer in model.layers)
    return "".join(letters[type(layer.mixer or layer.feed_forward)] for layer in model.layers)


def mamba_of(model: ModelConfig) -> Mamba2Config:
    (mixer,) = {layer.mixer for layer in model.layers if isinstance(layer.mixer, Mamba2Config)}
    return mixer


def experts_of(model: ModelConfig) -> MoEConfig:
    (experts,) = {
        layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, MoEConfig)
    }
    return experts


@pytest.mark.parametrize(
    ("name", "parameters", "layers", "state"),
    [
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31.6e9, (23, 6, 0, 23), 64 * 64 * 128),
        ("NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 120.7e9, (40, 8, 0, 40), 128 * 64 * 128),
        ("NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", 549.3e9, (48, 12, 0, 48), 256 * 64 * 128),
        ("Nemotron-H-56B-Base-8K", 56.3e9, (54, 10, 54, 0), 256 * 64 * 256),
    ],
)
def test_nemotron_as_published(
    name: str, parameters: float, layers: tuple[int, ...], state: int
) -> None:
    model = published(name)
    assert num_parameters(model) == pytest.approx(parameters, rel=1e-3)
    assert tuple(map(kinds(model).count, "M*-E")) == layers
    spec = cache_spec(
        KVCacheConfig(Format.BFLOAT16, None, None, None, state=Format.FLOAT32), model, 16
    )
    mamba = mamba_of(model)
    rows = 16 * (
        2 * (mamba.groups * mamba.state_size + mamba.heads * mamba.head_dim) + 4 * mamba.heads
    )
    assert spec.bytes_per_state == layers[0] * (4 * state + rows + 2 * 3 * mamba.channels)
    assert (mamba.limits, mamba.norm_groups, mamba.conv_bias) == ((0.0, math.inf), 8, True)
    assert mamba.bias is False
    assert all(mixer.rope is None for mixer in model.attention.values())
    assert (model.norm_eps, model.wide_norms, model.tie_word_embeddings) == (1e-5, True, False)


def test_experts_of_nemotron_3() -> None:
    nano, ultra = (
        experts_of(published(f"NVIDIA-Nemotron-3-{name}"))
        for name in ("Nano-30B-A3B-BF16", "Ultra-550B-A55B-FP8")
    )
    assert (nano.num_experts, nano.routing.top_k, nano.routing.factor) == (128, 6, 2.5)
    assert nano.latent_size is None
    assert (ultra.num_experts, ultra.routing.top_k, ultra.routing.factor) == (512, 22, 5.0)
    assert ultra.latent_size == 2048
    for one, shared in ((nano, 3712), (ultra, 10240)):
        assert one.shared == DenseConfig(shared, Activation.RELU_SQUARED)
        assert (one.routing.scoring, one.routing.normed) == (Scoring.SIGMOID, True)
        assert one.choice_bias is True


def test_granite_4_h_small() -> None:
    model = read_model_config(GRANITE)
    assert num_parameters(model) == pytest.approx(32.2e9, rel=0.01)
    assert tuple(model.attention) == (5, 15, 25, 35)
    assert mamba_of(model) == Mamba2Config(1, 128, 64, 128, 4, 1)
    assert {mixer.rope for mixer in model.attention.values()} == {None}
    rotated = read_model_config({**GRANITE, "position_embedding_type": "rope"})
    assert {mixer.rope for mixer in rotated.attention.values()} == {0}
    assert experts_of(model).shared == DenseConfig(1536)
    assert (model.embedding_multiplier, model.residual_multiplier) == (12, 0.22)
    assert model.logit_divisor == 16


def test_granite_without_experts_has_the_shared_one_alone() -> None:
    model = read_model_config({**GRANITE, "num_local_experts": 0, "num_experts_per_tok": 0})
    assert {layer.feed_forward for layer in model.layers} == {DenseConfig(1536)}


@pytest.mark.parametrize(
    "said", [NEMOTRON, {key: GRANITE[key] for key in ("model_type", "architectures")}]
)
def test_absent_keys_mean_what_transformers_takes(said: Json) -> None:
    ours, theirs = read_model_config(said), AutoConfig.for_model(said["model_type"])
    mamba, experts, own = mamba_of(ours), experts_of(ours), said["model_type"] == "granitemoehybrid"
    assert mamba == Mamba2Config(
        *(getattr(theirs, name) for name in NAMES[said["model_type"]].split())
    )
    assert ours.num_layers == theirs.num_hidden_layers
    assert (ours.hidden_size, ours.vocab_size) == (theirs.hidden_size, theirs.vocab_size)
    assert ours.norm_eps == (theirs.rms_norm_eps if own else theirs.layer_norm_epsilon)
    assert experts.num_experts == theirs.num_local_experts
    assert experts.routing.top_k == theirs.num_experts_per_tok
    assert experts.intermediate_size == (
        theirs.intermediate_size if own else theirs.moe_intermediate_size
    )
    shared = theirs.shared_intermediate_size if own else theirs.moe_shared_expert_intermediate_size
    assert experts.shared is not None
    assert experts.shared.intermediate_size == shared
    for mixer in ours.attention.values():
        assert (mixer.num_heads, mixer.num_kv_heads, mixer.k_dim) == (
            theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim,
        )  # fmt: skip


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    """Infinity becomes an object, and the kinds of layers have other words."""
    AutoConfig.for_model(
        "nemotron_h", hybrid_override_pattern="ME*-", time_step_limit=(0.01, math.inf)
    ).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["time_step_limit"] == [0.01, {"__float__": "Infinity"}]
    model = read_model_config({**written, "architectures": NEMOTRON["architectures"]})
    assert (kinds(model), mamba_of(model).limits) == ("ME*-", (0.01, math.inf))


def test_kinds_of_layers_have_two_spellings() -> None:
    listed = read_model_config(
        {**NEMOTRON, "layers_block_type": ["mamba", "attention", "mlp", "moe"]}
    )
    assert kinds(listed) == "M*-E"
    assert (
        listed.layers == read_model_config({**NEMOTRON, "hybrid_override_pattern": "M*-E"}).layers
    )


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"hybrid_override_pattern": "MX"}, "hybrid_override_pattern = 'MX' is not implemented"),
        ({"hybrid_override_pattern": ""}, "hybrid_override_pattern = ''"),
        ({"hybrid_override_pattern": ["M"]}, "hybrid_override_pattern"),
        ({"layers_block_type": ["mamba", "conv"]}, "layers_block_type"),
        ({"layers_block_type": "M*"}, "layers_block_type"),
        ({"layers_block_type": [["mamba"]]}, "layers_block_type"),
        (
            {"hybrid_override_pattern": "M*", "layers_block_type": ["mamba"]},
            "contradicts itself: layers_block_type",
        ),
        ({"hybrid_override_pattern": "M*", "num_hidden_layers": 3}, "num_hidden_layers = 3"),
        ({"mlp_bias": True}, "mlp_bias = True is not implemented for layers with experts"),
        ({"attention_bias": True}, "attention_bias"),
        ({"sliding_window": 64}, "sliding_window"),
        ({"n_shared_experts": 2}, "n_shared_experts = 2 is not implemented"),
        ({"residual_in_fp32": True}, "residual_in_fp32"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        ({"n_groups": 3}, "mamba_num_heads = 128 is not a multiple of n_groups = 3"),
        ({"norm_eps": 1e-6, "layer_norm_epsilon": 1e-5}, "contradicts itself"),
        (
            {"time_step_limit": [0, 1], "mamba_dt_limit": [0, 2]},
            "contradicts itself: mamba_dt_limit",
        ),
        ({"conv_kernel": 9}, "conv_kernel = 9 is not implemented; 2 to 8 are"),
        ({"hybrid_override_pattern": "-E"}, "no layer of mamba or attention"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True is not implemented"),
        *(
            ({"time_step_limit": limit}, "time_step_limit")
            for limit in (
                [0.1],
                "ab",
                [0.2, 0.1],
                [-1, 1],
                [math.inf, math.inf],
                [math.nan, 1],
                [0, True],
                3,
            )
        ),
    ],
)
def test_what_nemotron_does_not_compute_is_refused(keys: Json, words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read_model_config({**NEMOTRON, **keys})
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"mamba_d_head": 32},
            "mamba_d_head = 32 with mamba_n_heads = 128, but mamba_expand * hidden_size = 8192",
        ),
        ({"mamba_n_heads": 100}, "mamba_n_heads = 100"),
        ({"mamba_d_conv": 9}, "mamba_d_conv = 9 is not implemented; 2 to 8 are"),
        (
            {"hidden_act": "gelu_pytorch_tanh"},
            "hidden_act = 'gelu_pytorch_tanh' is not implemented for layers with a",
        ),
        ({"mamba_n_groups": 3}, "mamba_n_groups = 3"),
        ({"layer_types": ["mamba"] * 39 + ["conv"]}, "layer_types has 'conv'"),
        ({"layer_types": ["mamba"] * 39}, "num_hidden_layers = 40"),
        ({"layers_block_type": ["mamba"] * 40}, "contradicts itself"),
        ({"num_local_experts": True}, "num_local_experts = True"),
    ],
)
def test_what_granite_does_not_compute_is_refused(keys: Json, words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read_model_config({**GRANITE, **keys})
    assert words in str(error.value)


def test_without_a_state_granite_may_have_another_activation() -> None:
    model = read_model_config(
        {
            **GRANITE,
            "layer_types": ["attention"] * 40,
            "num_local_experts": 0,
            "hidden_act": "gelu_pytorch_tanh",
        }
    )
    assert {layer.feed_forward for layer in model.layers} == {
        DenseConfig(1536, GatedActivation.GELU_TANH)
    }


def test_an_older_name_of_the_limits() -> None:
    """It is that of transformers' configuration class; others of its kind are refused."""
    assert mamba_of(read_model_config({**NEMOTRON, "mamba_dt_limit": [0.1, 0.5]})).limits == (
        0.1,
        0.5,
    )
    for name in ("mamba_d_conv", "mamba_n_groups", "mamba_conv_bias"):
        with pytest.raises(CheckpointError, match=name):
            read_model_config({**NEMOTRON, name: 3})


@pytest.mark.parametrize(
    ("key", "bound"), [("time_step_min", 0.5), ("time_step_max", 0.7), ("time_step_floor", 0.1)]
)
def test_a_step_is_bounded_by_its_limits_alone(key: str, bound: float) -> None:
    """The others are of first values; transformers 5.23 bounds steps by the first of them
    (transformers#48989).
    """
    assert mamba_of(read_model_config({**NEMOTRON, key: bound})).limits == (0.0, math.inf)
    limits = [0.001, 1e308]
    expected = (0.001, math.inf)
    assert mamba_of(read_model_config({**NEMOTRON, "time_step_limit": limits})).limits == expected


@pytest.mark.parametrize(
    ("model_type", "architecture", "text_key", "body"),
    [
        ("nemotron_h_omni", "NemotronH_Omni_Reasoning_V3", "text_config", "model"),
        (
            "NemotronH_Nano_Omni_Reasoning_V3",
            "NemotronH_Nano_Omni_Reasoning_V3",
            "llm_config",
            "backbone",
        ),
        ("NemotronH_Nano_VL_V2", "NemotronH_Nano_VL_V2", "llm_config", "backbone"),
    ],
)
def test_the_text_model_beside_pictures_and_sound(
    model_type: str, architecture: str, text_key: str, body: str
) -> None:
    text = {**NEMOTRON, "hybrid_override_pattern": "M*"}
    said = {
        "model_type": model_type, "architectures": [architecture], "vision_config": {"patch_size": 16},
        "projector_hidden_size": 20480, "downsample_ratio": 0.5, "force_image_size": 512, text_key: text,
    }  # fmt: skip
    first = f"language_model.{body}.embeddings.weight"
    model = read_model_config(said, tensors=[first])
    names = tensor_names(model)
    assert (names.embedding, names.head) == (first, "language_model.lm_head.weight")
    assert kinds(model) == "M*"
    assert model.unread_keys.unknown == ()
    others = [
        "mlp1.0.weight",
        "vision_model.radio_model.model.blocks.0.attn.qkv.weight",
        "sound_projection.norm.weight",
    ]
    assert skipped_parts(model, others) == {
        "of the vision model: Freight runs the text model alone": 2,
        "of the audio model: Freight runs the text model alone": 1,
    }
