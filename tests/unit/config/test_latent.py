"""Latent attention (MLA) in config.json: DeepSeek-V3 and GLM-4.7-Flash as published, defaults, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from freight.cache.spec import cache_spec
from freight.config.engine import KVCacheConfig
from freight.config.layer import DenseConfig, LatentConfig, MoEConfig
from freight.config.model import ModelConfig
from freight.errors import CheckpointError
from freight.fp8.formats import Format, Granularity
from freight.models.open import read_model_config
from freight.models.shapes import tensor_shapes

PUBLISHED = Path(__file__).parents[2] / "fixtures/published"
ROWS = {"deepseek_v3": "DeepseekV3ForCausalLM", "glm4_moe_lite": "Glm4MoeLiteForCausalLM"}
FLASH = {"model_type": "glm4_moe_lite", "architectures": [ROWS["glm4_moe_lite"]], "dtype": "bfloat16"}
R1 = json.loads((PUBLISHED / "deepseek-ai--DeepSeek-R1.json").read_text())


def latent_of(model: ModelConfig) -> LatentConfig:
    (mixer,) = {layer.mixer for layer in model.layers}
    assert isinstance(mixer, LatentConfig)
    return mixer


def bytes_per_token(model: ModelConfig, format: Format, granularity: Granularity | None = None) -> int:
    return cache_spec(KVCacheConfig(format, granularity, None, None), model, 16).bytes_per_token


@pytest.mark.parametrize("name", ["R1", "V3", "V3.1"])
def test_deepseek_as_published(name: str) -> None:
    model = read_model_config(json.loads((PUBLISHED / f"deepseek-ai--DeepSeek-{name}.json").read_text()))
    assert sum(math.prod(shape) for shape in tensor_shapes(model).values()) == pytest.approx(671.0e9, rel=1e-3)
    sharper = 0.1 * math.log(40) + 1
    assert latent_of(model) == LatentConfig(128, 1536, 512, 128, 64, 128, softmax_scale=192**-0.5 * sharper**2)
    assert (model.ropes[0].rotary_dim, model.ropes[0].interleaved, model.prediction_layers) == (64, True, 1)
    parts = [type(layer.feed_forward) for layer in model.layers]
    assert parts == [DenseConfig] * 3 + [MoEConfig] * 58
    assert bytes_per_token(model, Format.BFLOAT16) == 61 * 576 * 2 == 70272
    assert bytes_per_token(model, Format.E4M3FN, Granularity.TOKEN) == 61 * 578 == 35258
    assert bytes_per_token(model, Format.E4M3FN) == 61 * 576


def test_glm_4_7_flash_by_the_defaults_of_transformers() -> None:
    model = read_model_config(FLASH)
    assert sum(math.prod(shape) for shape in tensor_shapes(model).values()) == pytest.approx(29.9e9, rel=5e-3)
    assert latent_of(model) == LatentConfig(20, 768, 512, 192, 64, 256, softmax_scale=1 / 16)
    assert model.norm_eps == 1e-5  # and the latents' norms keep the 1e-6 of transformers' class
    assert [isinstance(layer.feed_forward, MoEConfig) for layer in model.layers] == [False] + [True] * 46
    assert bytes_per_token(model, Format.BFLOAT16) == 54144
    assert bytes_per_token(model, Format.E4M3FN, Granularity.TOKEN) == 27166


@pytest.mark.parametrize("model_type", ROWS)
def test_absent_keys_mean_what_transformers_takes(model_type: str) -> None:
    said = {"model_type": model_type, "architectures": [ROWS[model_type]]}
    ours, theirs = read_model_config(said), AutoConfig.for_model(model_type)
    mixer, names = latent_of(ours), "num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim"
    assert (mixer.num_heads, mixer.q_rank, mixer.latent, mixer.nope, mixer.rotated) == tuple(
        getattr(theirs, name) for name in names.split()
    )
    assert mixer.head_size == theirs.v_head_dim
    assert (ours.num_layers, ours.hidden_size, ours.vocab_size, ours.norm_eps, ours.max_position_embeddings) == (
        theirs.num_hidden_layers, theirs.hidden_size, theirs.vocab_size, theirs.rms_norm_eps,
        theirs.max_position_embeddings,
    )  # fmt: skip
    experts = ours.layers[-1].feed_forward
    assert isinstance(experts, MoEConfig)
    routing = experts.routing
    assert (routing.num_experts, routing.top_k, routing.num_groups, routing.top_groups, routing.factor) == (
        theirs.n_routed_experts, theirs.num_experts_per_tok, theirs.n_group, theirs.topk_group,
        theirs.routed_scaling_factor,
    )  # fmt: skip
    assert (experts.intermediate_size, routing.normed) == (theirs.moe_intermediate_size, theirs.norm_topk_prob)
    assert experts.shared == DenseConfig(theirs.n_shared_experts * theirs.moe_intermediate_size)
    assert (ours.bos_token_id, list(ours.eos_token_ids)) == (theirs.bos_token_id, [theirs.eos_token_id])
    assert ours.ropes[0].theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("model_type", ROWS)
def test_what_transformers_writes_is_read(model_type: str, tmp_path: Path) -> None:
    more = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": None, "num_hidden_layers": 4}
    AutoConfig.for_model(model_type, **more, rope_theta=5e5).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    ours = read_model_config({**written, "architectures": [ROWS[model_type]]})
    assert (ours.num_layers, latent_of(ours).q_rank, ours.ropes[0].theta) == (4, None, 5e5)
    assert latent_of(ours).q_sizes[0] == latent_of(ours).q_sizes[1]


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"num_key_value_heads": 8}, "num_key_value_heads = 8"),
        ({"head_dim": 128}, "head_dim = 128"),
        ({"qk_head_dim": 64}, "qk_head_dim = 64"),
        ({"qk_rope_head_dim": 63}, "odd"),
        ({"rope_interleave": False}, "rope_interleave"),
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
