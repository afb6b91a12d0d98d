"""A checkpoint that chooses its KV cache by layer: when the choice is taken, and when something
else is asked for.
"""

from __future__ import annotations

from tests.refusals import refuses

from freight.errors import ConfigError
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import KVScales, LayerScales, Scheme
from freight.settings.engine import EngineArgs, KVCacheConfig
from freight.settings.resolve import resolve_kv_cache

FN, FNUZ = Format.E4M3FN, Format.E4M3FNUZ
LAYER = LayerScales((0.25,), (0.5,), Granularity.TENSOR, ("k_scale", "v_scale"))


def decide(
    scales: KVScales, native: Format = FN, dtype: str = "auto", source: str = "auto"
) -> KVCacheConfig:
    args = EngineArgs(kv_cache_dtype=dtype, kv_scales=source)
    return resolve_kv_cache(args, Format.BFLOAT16, Scheme(), scales, native, frozenset())


MIXED = KVScales((LAYER, None), mixed=(Granularity.TENSOR, None))


def test_a_choice_by_layer_is_taken_where_nothing_else_is_asked_for():
    for source in ("auto", "checkpoint"):
        cache = decide(MIXED, source=source)
        expected = ["fp8_e4m3fn, tensor", "bfloat16"]
        assert [str(cache.of_layer(index)) for index in range(2)] == expected
        assert "layer 0 per tensor, layer 1 in 16 bits" in cache.note
    assert decide(MIXED, FNUZ).of_layer(0).format is FNUZ
    assert decide(MIXED, FNUZ).scales.layers[0].k == (0.5,)
    nothing = KVScales((None, None), mixed=(None, None))
    expected = {"dtype": "bfloat16", "granularity": None, "scale_source": None}
    assert decide(nothing).names() == expected


def test_a_choice_by_layer_gives_way_to_what_is_asked_for():
    expected = {"dtype": "bfloat16", "granularity": None, "scale_source": None}
    assert decide(MIXED, dtype="bfloat16").names() == expected
    dynamic = {"granularity": "token", "scale_source": "dynamic"}
    expected = {"dtype": "fp8_e4m3fn", **dynamic}
    assert decide(MIXED, dtype="fp8", source="dynamic").names() == expected
    assert decide(MIXED, dtype="int8").names() == {"dtype": "int8", **dynamic}
    with refuses(ConfigError, "layer 1", "16 bits", "--kv-cache-dtype auto", "--kv-scales dynamic"):
        decide(MIXED, dtype="fp8")
