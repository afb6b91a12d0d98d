"""`freight evaluate --per-layer`: shares of layers, against a cache in which a single layer is quantized."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from freight.config.engine import EngineArgs, KVCacheConfig
from freight.config.resolve import mixed_cache
from freight.errors import ConfigError
from freight.evaluate.perplexity import Window
from freight.evaluate.report import run_caches
from freight.evaluate.sensitivity import PerLayer, as_json, as_table, per_layer
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.fp8.scheme import KVScales

IDS = [0, *range(300, 363)]
ARGS = EngineArgs(max_model_len=64)


def measured(args: EngineArgs) -> PerLayer:
    return per_layer(args, lambda opened, longest: [Window(IDS, [])])


@pytest.fixture(scope="module")
def found() -> PerLayer:
    return measured(ARGS)


def one_layer(index: int) -> KVCacheConfig:
    mixed = tuple(Granularity.TOKEN if layer == index else None for layer in range(6))
    return mixed_cache(KVScales((None,) * 6, mixed=mixed), Format.BFLOAT16, Format.E4M3FN, ScaleSource.DYNAMIC)


def test_a_layer_costs_what_the_engine_measures_with_it_alone(found):
    """The engine's runs end before the last token, which has no target."""
    runs = run_caches(ARGS, [one_layer(0), one_layer(4)], [*IDS[1:], 7], window=64)
    assert len(runs[0].token_kl) == len(IDS)
    assert [float(run.token_kl.double().mean()) for run in runs[1:]] == pytest.approx(
        [found.layers[0].kl, found.layers[4].kl]
    )


def test_shares_add_up_and_the_whole_is_measured(found):
    assert sum(layer.share for layer in found.layers) == pytest.approx(1)
    assert sum(layer.kl for layer in found.layers) == pytest.approx(found.kl_sum)
    assert min(layer.kl for layer in found.layers) > 0
    assert found.kl_whole > max(layer.kl for layer in found.layers) / 2
    assert found.num_tokens == len(IDS)
    assert [(layer.dtype, layer.granularity) for layer in found.layers] == [("fp8_e4m3fn", "token")] * 6


def test_it_is_said_as_a_table_and_as_json(found):
    lines = as_table(found).splitlines()
    assert len(lines) == 2 + 6 + 2
    assert len({len(line) for line in lines}) == 1
    said = json.loads(json.dumps(as_json(found)))
    assert said["kl_whole"] == found.kl_whole
    assert said["layers"][2] == {"layer": 2, "dtype": "fp8_e4m3fn", "granularity": "token"} | {
        "kl": found.layers[2].kl,
        "share": found.layers[2].share,
    }


def test_a_cache_that_quantizes_nothing_is_refused():
    with pytest.raises(ConfigError, match="no layer of it is quantized"):
        measured(replace(ARGS, kv_cache_dtype="bfloat16"))
