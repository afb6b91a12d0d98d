"""Layers without rotary embedding, beside layers that rotate by angles of zero."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from freight.cache.pool import allocate_pool
from freight.cache.spec import cache_spec
from freight.engine.runner import ModelRunner
from freight.fp8.formats import Format
from freight.kernels.select import select_kernels
from freight.model.config.model import ModelConfig, RopeConfig
from freight.model.config.parse import parse_model_config
from freight.model.config.presets import PRESETS
from freight.model.random_weights import random_model
from freight.settings.engine import KVCacheConfig

SMALL = {
    **PRESETS["llama-1b"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 40,
}
IDS = list(range(20))


def logits(config: ModelConfig, kernel_set: str) -> torch.Tensor:
    kernels, kv = select_kernels(kernel_set), KVCacheConfig(Format.FLOAT32, None, None, None)
    model = random_model(config, kernels, Format.FLOAT32, Format.FLOAT32, len(IDS), "cpu")
    pool = allocate_pool(cache_spec(kv, config, 16), kv, (2,), kernels)
    return ModelRunner(model, pool, "cpu").logits(IDS, 0, pool.whole)


@pytest.mark.parametrize("kernel_set", ["reference", "auto"])
def test_a_layer_without_rope_is_one_whose_angles_are_all_zero(kernel_set: str):
    plain = parse_model_config(SMALL)
    last = plain.layers[-1]
    unmoved = RopeConfig(last.mixer.k_dim, kind="linear", parameters={"factor": 1e30})
    with_rope = {
        rope: replace(
            plain, layers=(plain.layers[0], replace(last, mixer=replace(last.mixer, rope=rope)))
        )
        for rope in (None, 1)
    }
    got = logits(with_rope[None], kernel_set)
    assert torch.equal(
        got, logits(replace(with_rope[1], ropes=(*plain.ropes, unmoved)), kernel_set)
    )
    assert (got - logits(plain, kernel_set)).abs().max() > 0.01


def test_a_model_that_rotates_nothing_has_no_ropes():
    plain = parse_model_config(SMALL)
    layers = tuple(replace(layer, mixer=replace(layer.mixer, rope=None)) for layer in plain.layers)
    config = replace(plain, layers=layers, ropes=())
    assert config.position_limit == plain.max_position_embeddings
    torch.testing.assert_close(
        logits(config, "auto"), logits(config, "reference"), rtol=1e-4, atol=1e-4
    )
