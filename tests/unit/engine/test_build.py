"""The order in which an engine is built: what does not fit is refused before a weight is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.refusals import refuses

from freight.cache.pool import KVPool
from freight.cache.spec import KVCacheSpec, LayerKVSpec
from freight.engine import build
from freight.engine.build import cache_facts, start_engine
from freight.errors import CapacityError
from freight.fp8.formats import Format, Granularity
from freight.model.decoder import Decoder
from freight.model.open import OpenModel, open_model, open_random
from freight.settings.engine import EngineArgs, EngineConfig

MIB = 2**20
DEMO_WEIGHTS = 11_540_992  # bytes of the demo's tensors, in bfloat16


class LoadedError(Exception):
    """The weights would be read now."""


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(opened: OpenModel, config: EngineConfig, num_positions: int | None = None) -> Decoder:
        raise LoadedError

    monkeypatch.setattr(OpenModel, "load", load)


def start(free: int, **options: Any) -> None:
    opened = open_model(EngineArgs(max_model_len=16, **options))
    start_engine(replace(opened, device=replace(opened.device, memory_free=free)))


def test_a_cache_beyond_what_is_free_is_refused_before_weights_are_read():
    with pytest.raises(CapacityError) as error:
        start(free=23 * 2**30, kv_cache_memory="200GiB")
    for figure in (f"{200 * 2**30:,}", f"{DEMO_WEIGHTS:,}", f"{23 * 2**30:,}", "at most 23540MiB"):
        assert figure in str(error.value)


@pytest.mark.parametrize(("dtype", "factor"), [("bfloat16", 1), ("float32", 2)])
def test_cache_and_weights_are_counted_to_the_byte(dtype: str, factor: int):
    cache = 2**20
    exactly = cache + factor * DEMO_WEIGHTS
    with pytest.raises(LoadedError):
        start(free=exactly, kv_cache_memory=cache, dtype=dtype)
    with pytest.raises(CapacityError, match="free memory first"):
        start(free=exactly - 1, kv_cache_memory=cache, dtype=dtype)


def test_weights_that_become_fp8_count_as_fp8():
    with pytest.raises(LoadedError):
        start(free=2**20 + DEMO_WEIGHTS * 2 // 3, kv_cache_memory=2**20, quantization="fp8")


def test_adapters_beyond_what_is_free_are_refused_by_their_options(monkeypatch: pytest.MonkeyPatch):
    """Without an option for the cache, which has what they leave."""
    monkeypatch.setattr(build, "memory_for_cache", lambda device: 8 * MIB)  # half of what is free
    with refuses(CapacityError, "--max-loras", "--max-lora-rank", f"{16 * MIB:,} are free"):
        opened = open_model(EngineArgs(model="demo", enable_lora=True, max_loras=64))
        start_engine(opened)
    with pytest.raises(CapacityError, match="--max-loras"):
        start(16 * MIB, model="demo", enable_lora=True, max_loras=64, kv_cache_memory="4MiB")


def test_a_share_of_what_is_free_is_not_judged():
    with pytest.raises(LoadedError):
        start(free=1)


def test_a_cache_of_one_byte_is_counted_in_the_singular():
    with refuses(CapacityError, "1 byte", "0 tokens", "3072 bytes"):
        start(free=2**30, kv_cache_memory=1)


def test_random_weights_are_counted_as_well():
    with pytest.raises(CapacityError, match="the weights need"):
        start_engine(open_random(EngineArgs(kv_cache_memory="900TiB"), "llama-1b"))


def test_the_same_memory_at_16_bits_holds_half_the_tokens_of_fp8():
    args = EngineArgs(max_model_len=16)
    config = open_model(args).resolve(args)

    def tokens(format: Format, granularity: Granularity | None) -> object:
        spec = KVCacheSpec((LayerKVSpec(format, granularity, 2, 16, 16),), 4)
        return cache_facts(KVPool((), spec, (10,)), config)["tokens_at_16_bits"]

    assert tokens(Format.BFLOAT16, None) == 40
    assert tokens(Format.E4M3FN, Granularity.HEAD) == 20
    assert tokens(Format.E4M3FN, Granularity.TOKEN) == 20  # 22.5, in whole blocks


def test_windows_do_not_make_fp8_look_like_more_than_twice_16_bits():
    args = EngineArgs(max_model_len=16)
    config = open_model(args).resolve(args)
    full = LayerKVSpec(Format.E4M3FN, Granularity.HEAD, 2, 16, 16)
    pool = KVPool((), KVCacheSpec((full, replace(full, window=8)), 4), (100, 10))
    facts = cache_facts(pool, config)
    assert (facts["capacity_tokens"], facts["tokens_at_16_bits"]) == (400, 200)
